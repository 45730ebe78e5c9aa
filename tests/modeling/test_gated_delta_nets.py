"""Swapped models with gated delta nets: what no KDA family has. The rest is tested with every family."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import GenerationConfig

from kda_layers import restore_attention, swap_attention
from kda_layers.kernels.fused.gated_norm import gated_rms_norm
from kda_layers.serving import enable_continuous_batching, enable_speculative_decoding
from tests.kernels.cases import FP32, budget, error
from tests.modeling.stock_models import (
    GATED_DELTA_FAMILIES,
    build,
    every_gated_delta_family,
    oracle,
    swapped_layers_of,
    with_oracle,
)

vision = pytest.mark.skipif("qwen3_5_moe" not in GATED_DELTA_FAMILIES, reason="transformers has no Qwen3.5")
olmo = pytest.mark.skipif("olmo_hybrid" not in GATED_DELTA_FAMILIES, reason="transformers has no OLMo Hybrid")
lara = pytest.mark.skipif("lara_mini" not in GATED_DELTA_FAMILIES, reason="transformers has no Lara Mini")
ngrams = pytest.mark.skipif("qwen4_exp" not in GATED_DELTA_FAMILIES, reason="transformers has no Qwen4")
IMAGE = 90  # the token of an image's patches


def swapped(stock: Any) -> Any:
    model = copy.deepcopy(stock)
    swap_attention(model)
    return model


def layer_of(model: Any) -> Any:
    return next(iter(swapped_layers_of(model).values()))


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 80, shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- the layer


@olmo
@pytest.mark.parametrize("negative", [False, True])
@torch.no_grad()
def test_negative_eigenvalues(negative: bool) -> None:
    """beta is in (0, 1), or in (0, 2)."""
    stock = build("olmo_hybrid", linear_allow_neg_eigval=negative)
    x = torch.randn(2, 75, 32, generator=torch.Generator().manual_seed(0))
    truth = oracle(copy.deepcopy(layer_of(stock)).double(), x.double())
    got, want = layer_of(swapped(stock))(x), layer_of(stock)(x)
    assert error(got, truth) <= budget(error(want, truth), FP32)


@every_gated_delta_family
@pytest.mark.parametrize("activation", ["sigmoid", "silu", "swish"])
@torch.no_grad()
def test_the_activation_of_the_output_gate(family: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the norm has it, for the fused forms under the name that they know."""
    stock, asked = build(family), list[Any]()
    norm = next(m for n, m in layer_of(stock).named_children() if n.endswith("norm"))
    norm.activation = activation

    def gated(*args: Any, **options: Any) -> Tensor:
        asked.append(args[5])
        return gated_rms_norm(*args, **options)

    monkeypatch.setattr("kda_layers.modeling.layer.forward.gated_rms_norm", gated)
    x = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0))
    assert error(layer_of(swapped(stock))(x), layer_of(stock)(x)) < 1e-5
    assert asked == ["silu" if activation == "swish" else activation]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "output gate": (dict(norm="gelu"), r"linear_attn: the output gate's activation must be 'silu' or .*got 'gelu'"),
    "convolution": (dict(activation="relu"), "linear_attn: the convolution's activation must be 'silu', got 'relu'"),
    "bias": (dict(bias=True), "linear_attn: conv1d must have no bias"),
}


@every_gated_delta_family
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(family: str, case: str) -> None:
    changes, message = REFUSED[case]
    model = build(family)
    layer = layer_of(model)
    if "norm" in changes:
        next(m for n, m in layer.named_children() if n.endswith("norm")).activation = changes["norm"]
    elif "bias" in changes:
        layer.conv1d.bias = nn.Parameter(torch.zeros(layer.conv_dim))
    else:
        layer.activation = changes["activation"]
    with pytest.raises(ValueError, match=message):
        swap_attention(model)
    assert not any(type(m).__name__.startswith("Fast") for m in model.modules())


@every_gated_delta_family
def test_adapters(family: str) -> None:
    """On projections they count; on weights that are read without a call they are refused, by the stock names."""
    peft = pytest.importorskip("peft")
    model = swapped(build(family))
    layer, x = layer_of(model), torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    before = layer(x)
    targets = [n for n, m in layer.named_children() if isinstance(m, nn.Linear)]
    torch.manual_seed(0)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False), model)
    y = layer(x)
    assert error(y, before) > 1e-2
    y.sum().backward()
    adapters = [p for n, p in layer.named_parameters() if "lora" in n]
    assert len(adapters) == 2 * len(targets)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in adapters)

    model = swapped(build(family))
    rank = layer_of(model).conv_dim  # PEFT wants a multiple of the groups
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, target_modules=["linear_attn.conv1d"]), model)
    with pytest.raises(ValueError, match=r"conv1d must have no adapter.*modules_to_save=\['conv1d'\]"):
        layer_of(model)(x)


class Adapter(nn.Module):
    """As PEFT holds the module that it adapts."""

    def __init__(self, base_layer: nn.Module):
        super().__init__()
        self.base_layer = base_layer


@every_gated_delta_family
def test_an_adapter_of_the_norm_is_refused_by_its_own_name(family: str) -> None:
    layer = layer_of(swapped(build(family)))
    name = next(n for n, _ in layer.named_children() if n.endswith("norm"))
    setattr(layer, name, Adapter(getattr(layer, name)))
    with pytest.raises(ValueError, match=rf"^{name} must have no adapter.*modules_to_save=\['{name}'\]"):
        layer(torch.zeros(1, 2, 32))


# ---------------------------------------------------------------- n-grams


@ngrams
def test_packed_documents_beside_embeddings_of_ngrams_are_refused() -> None:
    model = swapped(build("qwen4_exp", linear_only=True, ple_layer_ids=[1]))
    with pytest.raises(ValueError, match=r"one sequence in each row, got 2 packed .* n-grams, before layers \[1\]"):
        model(tokens(1, 9), cu_seq_lens_q=torch.tensor([0, 4, 9]))


@ngrams
@pytest.mark.parametrize(("before", "drafted", "rejected"), [(9, 5, 2), (1, 4, 4), (9, 1, 1), (2, 20, 0)])
@torch.no_grad()
def test_drafts_are_taken_back_from_the_states_of_ngrams(before: int, drafted: int, rejected: int) -> None:
    """The embeddings' own states are cropped with those of the layers, and are no longer than before."""
    model = swapped(build("qwen4_exp"))
    ids, others = tokens(2, before + drafted), tokens(2, 3, seed=2)
    cache = model(ids[:, :before], use_cache=True).past_key_values
    sizes = [t.shape for t in cache.layers[0].conv_states.values()]
    cache.activate_past_recording()
    for part in ids[:, before:].split(2, 1):
        model(part, past_key_values=cache)
    cache.crop(-rejected)
    assert [t.shape for t in cache.layers[0].conv_states.values()] == sizes
    kept = torch.cat((ids[:, : before + drafted - rejected], others), 1)
    got, want = model(others, past_key_values=cache).logits, model(kept, use_cache=False).logits[:, -3:]
    assert error(got, want) < 1e-5


# ---------------------------------------------------------------- images


def with_images(model: Any, rows: int) -> dict[str, Tensor]:
    """A call of a vision model: rows of text, an image of 2 x 3 merged patches, and text."""
    config = model.config.vision_config
    merge, grid = config.spatial_merge_size, torch.tensor([[1, 4, 6]] * rows)
    per_image = int(grid[0].prod()) // merge**2
    image = torch.full((rows, per_image), IMAGE)
    ids = torch.cat((tokens(rows, 5), image, tokens(rows, 9, seed=2)), 1)
    patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
    pixels = torch.randn(rows * int(grid[0].prod()), patch, generator=torch.Generator().manual_seed(0))
    return dict(input_ids=ids, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=(ids == IMAGE).int())


def padded_left(call: dict[str, Tensor], by: int) -> dict[str, Tensor]:
    """The call with padding before its first row, and after the tokens of the other ones cut by as many."""
    ids = call["input_ids"]
    mask = torch.ones_like(ids)
    first = pad(ids[:1], (by, 0))[:, : ids.shape[1]]
    mask[0, :by] = 0
    ids = torch.cat((first, ids[1:]))
    return call | dict(input_ids=ids, attention_mask=mask, mm_token_type_ids=(ids == IMAGE).int())


@vision
@pytest.mark.parametrize("padding", [0, 3])
@torch.no_grad()
def test_images(padding: int) -> None:
    """Logits and tokens of a vision model whose text model is swapped, also where padding repeats positions."""
    stock = build("qwen3_5_moe")
    model, exact = swapped(stock), with_oracle(stock)
    call = with_images(stock, 2)
    if padding:
        call = padded_left(call, padding)
    real = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
    truth, want, got = (
        m(**call | dict(pixel_values=call["pixel_values"].to(m.dtype)), use_cache=False).logits[real]
        for m in (exact, stock, model)
    )
    assert error(got, truth) <= budget(error(want, truth), FP32)
    blind = stock(input_ids=call["input_ids"], attention_mask=real.long(), use_cache=False).logits[real]
    assert error(blind, want) > 1e-2
    made = [m.generate(**call, max_new_tokens=12, do_sample=False) for m in (stock, model)]
    assert torch.equal(*made)


@vision
@pytest.mark.parametrize("axes", [3, 4])
@torch.no_grad()
def test_packed_documents_with_positions_of_several_axes(axes: int) -> None:
    """Softmax layers rotate by the given positions, and no layer reads another document."""
    model = swapped(build("qwen3_5_moe")).model.language_model
    lengths, offsets = (8, 5), torch.tensor([0, 8, 13])
    image = torch.tensor([[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]])[:, None]
    each = [image, torch.arange(5).expand(3, 1, 5)]
    if axes == 4:
        each = [torch.cat((torch.arange(n).view(1, 1, n), p)) for n, p in zip(lengths, each, strict=True)]
    ids = tokens(1, 13)
    parts = [
        model(part, position_ids=p, use_cache=False).last_hidden_state
        for part, p in zip(ids.split(lengths, 1), each, strict=True)
    ]
    want, positions = torch.cat(parts, 1), torch.cat(each, -1)
    # Four axes say where a document begins by the first one.
    for described in [dict(cu_seq_lens_q=offsets)] + [{}] * (axes == 4):
        got = model(ids, position_ids=positions, use_cache=False, **described).last_hidden_state
        assert error(got, want) < 1e-5
    text = model(ids, cu_seq_lens_q=offsets, use_cache=False).last_hidden_state
    assert error(text, want) > 1e-3
    if axes == 3:
        with pytest.raises(ValueError, match=r"position_ids \[3, 1, 13\] of several axes must not restart"):
            model(ids, position_ids=positions, use_cache=False)


@vision
def test_a_vision_model_is_restored() -> None:
    stock = build("qwen3_5_moe")
    model = swapped(stock)
    assert restore_attention(model) == list(swapped_layers_of(stock))
    call = with_images(stock, 1)
    assert torch.equal(model(**call).logits, stock(**call).logits)


@lara
@torch.no_grad()
def test_sliding_windows() -> None:
    """Layers with a window beside those without: packed, padded and past the window in a cache."""
    kinds = ["linear_attention", "sliding_attention", "full_attention"]
    stock = build("lara_mini", dense=True, layer_types=kinds, sliding_window=8)
    model, ids = swapped(stock), tokens(1, 45)
    packed = model(ids, cu_seq_lens_q=torch.tensor([0, 20, 45], dtype=torch.int32)).logits
    apart = torch.cat([stock(part, use_cache=False).logits for part in ids.split([20, 25], 1)], 1)
    assert error(packed, apart) < 1e-5
    assert error(packed, stock(ids, use_cache=False).logits) > 1e-2
    padded, mask = pad(ids, (0, 9)), pad(torch.ones_like(ids), (0, 9))
    assert error(model(padded, attention_mask=mask).logits[:, :45], stock(ids).logits) < 1e-5
    greedy, prompt = dict(max_new_tokens=20, do_sample=False), ids[:, :5].repeat(1, 3)
    want = stock.generate(prompt, **greedy)
    assert torch.equal(model.generate(prompt, **greedy), want)
    enable_speculative_decoding(model)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **greedy), want)
    enable_continuous_batching()
    batched = model.generate_batch([prompt[0].tolist()], generation_config=GenerationConfig(eos_token_id=-1, **greedy))
    assert [out.generated_tokens for out in batched.values()] == [want[0, 15:].tolist()]
