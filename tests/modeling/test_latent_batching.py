"""Swapped Kimi-Linear and Ling in transformers' continuous batching: pages of latents, beside the slots of KDA layers.

test_continuous_batching.py and test_prefixes.py run them, too, by the engine's steps.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

import kda_layers
from kda_layers.modeling.models.generation import LoopOnDevice
from tests.modeling import stock_models

try:
    from tests.modeling.test_continuous_batching import Engine, config, generation, model, prompts
except ImportError as error:  # as that file says
    pytest.skip(str(error), allow_module_level=True)

from kda_layers.modeling.serving import latent_allocator

FAMILIES = [family for family in stock_models.KDA_FAMILIES if family != "glm5_next"]
every_latent_family = pytest.mark.parametrize("family", FAMILIES)


def swapped(family: str, **fields: Any) -> Any:
    m = stock_models.build(family, **fields)
    kda_layers.swap_attention(m)
    return m


def generated(m: Any, given: list[list[int]], new: int = 8) -> list[list[int]]:
    ids = [torch.tensor([prompt]) for prompt in given]
    out = [m.generate(i, attention_mask=torch.ones_like(i), max_new_tokens=new, do_sample=False) for i in ids]
    return [o[0, len(prompt) :].tolist() for o, prompt in zip(out, given, strict=True)]


def batched(m: Any, given: list[list[int]], *options: Any) -> list[list[int]]:
    out = m.generate_batch(given, *(options or (generation(8), config()))).values()
    assert [o.error for o in out] == [None] * len(given)
    return [o.generated_tokens for o in out]


# ---------------------------------------------------------------- the tokens of generate


@every_latent_family
@pytest.mark.parametrize(
    "fields",
    [
        {},  # with experts
        dict(q_lora_rank=8, v_head_dim=24, qk_rope_head_dim=4),
        dict(linear_only=True),
        dict(num_hidden_layers=5, layer_types=["full_attention", *["linear_attention"] * 2, *["full_attention"] * 2]),
    ],
)
def test_other_shapes(family: str, fields: dict[str, Any]) -> None:
    m, given = swapped(family, **fields), prompts(5, 1, 70, 20)
    assert batched(m, given) == generated(m, given)


@every_latent_family
def test_sampling(family: str) -> None:
    """One token to choose from, whatever the temperature."""
    m, given = swapped(family), prompts(5, 17)
    options = GenerationConfig(do_sample=True, top_k=1, temperature=2.0, max_new_tokens=8, eos_token_id=-1)
    assert batched(m, given, options, config(return_logprobs=True)) == generated(m, given)
    torch.manual_seed(0)
    options = GenerationConfig(do_sample=True, temperature=3.0, max_new_tokens=8, eos_token_id=-1)
    assert batched(m, given, options, config()) != generated(m, given)


def flash(
    query: Tensor, key: Tensor, value: Tensor, mask: None, query_length: int, is_causal: bool, softmax_scale: float,
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, max_length_q: int, max_length_k: int, **_: Any,
) -> Tensor:  # fmt: skip
    """Flash attention of packed sequences [1, T, H, D], of one width, in plain PyTorch."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert is_causal
    assert cu_seq_lens_q.dtype == cu_seq_lens_k.dtype == torch.int32
    assert (cu_seq_lens_q.diff().max(), cu_seq_lens_k.diff().max()) == (max_length_q, max_length_k)
    out = []
    for a, b, c, d in zip(*(t.tolist() for x in (cu_seq_lens_q, cu_seq_lens_k) for t in (x[:-1], x[1:])), strict=True):
        q, k, v = (t[0].transpose(0, 1) for t in (query[:, a:b], key[:, c:d], value[:, c:d]))
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - b + a)
        out.append((torch.softmax((q @ k.mT * softmax_scale).masked_fill(~seen, -torch.inf), -1) @ v).transpose(0, 1))
    return torch.cat(out)[None]


@every_latent_family
def test_arguments_of_flash_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of all tokens in packed sequences, from pages; transformers pads values to the width of keys."""
    m, given = swapped(family, v_head_dim=8), prompts(5, 1, 40)
    want, calls = generated(m, given), []
    module = importlib.import_module("transformers.integrations.flash_attention")
    monkeypatch.setattr(module, "_flash_attention_forward", lambda *a, **k: calls.append(a) or flash(*a, **k))
    m.config._attn_implementation = "flash_attention_2"
    engine = Engine(m, max_batch_tokens=16)
    for prompt in given:
        engine.add(prompt)
    assert engine.tokens() == want
    assert len(calls) == len(engine.steps)
    assert engine.steps[0]["attention_mask"] is None


# ---------------------------------------------------------------- pages


def test_bytes_of_a_page() -> None:
    """The latent and the positional key of each token, once for all heads: of one layer, and of a published model."""
    m = swapped("kimi_linear", kv_lora_rank=24, qk_rope_head_dim=4)
    cache = Engine(m, page_size=16).cache
    pages, states = (cache.cache_allocators[kind] for kind in ("full_attention", "linear_attention"))
    assert pages.bytes_per_page == pages.bytes_per_block == 16 * (24 + 4) * 4
    assert cache.bytes_per_sector == states.bytes_per_block  # no larger than a state, rounded up to pages
    assert 0 <= states.bytes_per_page - (2 * 16 * 16 + 96 * 4) * 4 < pages.bytes_per_block
    assert cache.cache_tensor.numel() == (cache.num_sectors + 2) * cache.bytes_per_sector

    # num_blocks asks for so many pages of all layers, each as large as one of latents.
    cache = Engine(swapped("kimi_linear", kv_lora_rank=128), num_blocks=300).cache
    page = cache.cache_allocators["full_attention"].bytes_per_page
    assert cache.num_sectors == math.ceil(300 * 3 * page / cache.bytes_per_sector)

    large = transformers.KimiLinearConfig()
    expanded = 32 * (128 + 64 + 128) * 2  # bytes of the keys and values of a token in bf16
    assert latent_allocator.latent_page(large, torch.bfloat16, 256) == 256 * 1152
    assert 17 < expanded / 1152 < 18


def test_sizes_that_the_engine_plans_with() -> None:
    """The engine counts 2 * num_key_value_heads * head_dim for a token, and 2 * num_attention_heads in a call."""
    large = transformers.KimiLinearConfig()
    planned = latent_allocator.as_planned(large)
    assert 2 * planned.num_key_value_heads * planned.head_dim == 512 + 64
    keys_values_product = (128 + 64) + 128 + (128 + 128)
    assert 2 * planned.num_attention_heads * planned.head_dim >= 32 * keys_values_product
    assert (large.num_key_value_heads, large.head_dim) == (32, 64)
    others = model("llama").config
    assert latent_allocator.as_planned(others) is others


@every_latent_family
def test_pages_of_two_layers_are_apart(family: str) -> None:
    """A layer reads what it has written, whatever other layers, states and requests write."""
    kinds = ["full_attention", "linear_attention", "full_attention"]
    engine = Engine(swapped(family, layer_types=kinds, num_hidden_layers=3), page_size=4)
    pages = engine.cache.cache_allocators["full_attention"]
    for request in ("a", "b"):
        engine.cache.pool.allocate_sector(pages.index)
        pages.allocate_cache_to_request(request, 0, 10)
    for conv, state in engine.states.pools.values():
        conv.fill_(torch.nan)
        state.fill_(torch.nan)
    engine.states._copy_view[: 2 * engine.states.blocks_per_sector].fill_(0xFF)  # of padding

    def indices(request: str) -> tuple[Tensor, Tensor]:
        read, write = pages.get_read_indices(request, 0, 10), pages.get_write_indices(request, 0, 10)
        return torch.tensor(read), torch.tensor(write)

    latents = {(r, layer): torch.randn(10, 1, 16) for r in "ab" for layer in (0, 2)}
    keys = {where: torch.randn(10, 1, 8) for where in latents}
    nothing = torch.empty(0, dtype=torch.int64)
    for request, layer in latents:
        values = latents[request, layer], keys[request, layer]
        assert pages.update(*values, layer, nothing, indices(request)[1]) == values
    for request, layer in latents:
        read, _ = indices(request)
        trash = torch.tensor([pages.write_trash_index])
        found = pages.update(torch.zeros(1, 1, 16), torch.zeros(1, 1, 8), layer, read, trash)
        assert torch.equal(found[0], latents[request, layer])
        assert torch.equal(found[1], keys[request, layer])


def test_block_tables_are_off(caplog: pytest.LogCaptureFixture) -> None:
    m = swapped("kimi_linear")
    for asked, warned in ((None, False), (0, False), (8, True)):
        caplog.clear()
        manager = m.init_continuous_batching(generation(2), config(max_blocks_per_request=asked))
        assert manager.continuous_batching_config.max_blocks_per_request == 0
        assert ("max_blocks_per_request=8 is taken for 0" in caplog.text) is warned


# ---------------------------------------------------------------- refusals


@every_latent_family
def test_stock_layers_are_refused(family: str) -> None:
    m = stock_models.build(family)
    with pytest.raises(ValueError, match=r"got stock layers at .*: call kda_layers.swap_attention\(model\) first"):
        m.generate_batch(prompts(3), generation(2))
    kda_layers.swap_attention(m, layers=[0])
    layer = next(i for i, kind in enumerate(m.config.layer_types) if i and kind == "linear_attention")
    with pytest.raises(ValueError, match=f"got stock layers at model.layers.{layer}.self_attn, whose"):
        m.init_continuous_batching(generation(2))
    kda_layers.swap_attention(m, layers=[layer])
    given = prompts(3, 20)
    assert batched(m, given) == generated(m, given)


@pytest.mark.parametrize("swap", [False, True])
def test_indexed_attention_is_refused(swap: bool) -> None:
    m = swapped("glm5_next") if swap else stock_models.build("glm5_next")
    with pytest.raises(ValueError, match=r"a glm5_next_text model: .* indexed_attention keeps keys of its indexer"):
        m.generate_batch(prompts(3), generation(2))


def test_it_is_off_until_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    m = swapped("kimi_linear")
    monkeypatch.setattr(LoopOnDevice, "batches_continuously", False)
    with pytest.raises(RuntimeError, match=r"KimiLinearForCausalLM needs kda_layers.serving.enable_cont"):
        m.generate_batch(prompts(3), generation(2))


def test_latent_attention_without_kda_layers_is_as_before() -> None:
    """transformers' own pages serve it, or do not."""
    fields = dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, kv_lora_rank=16, qk_rope_head_dim=8)
    deepseek = transformers.DeepseekV3Config(**fields)
    assert not latent_allocator.has_latents(deepseek)
    assert latent_allocator.as_planned(deepseek) is deepseek
