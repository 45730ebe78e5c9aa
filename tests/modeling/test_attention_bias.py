"""`attention_bias="key"`: the layer against dense attention in fp64, and what its cache and its masks do with the bias.

What every model must do, generation, packing, saving and so on, `test_models.py` asks of a model with it, too.
"""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, StaticCache

from kda_layers import KDAForCausalLM
from kda_layers.modeling.inputs.masks import create_key_mask, masks_for_generate
from kda_layers.modeling.models import modeling_kda
from kda_layers.modeling.models.modeling_kda import KDABiasedAttention
from kda_layers.versions import installed
from tests.kernels.cases import BF16, FP32, FP64, budget, error
from tests.modeling.common import same
from tests.modeling.models import build, generate, ids, model

B, T, D, DRAWS = 3, 12, 32, 10
HIDDEN = {  # padding; packed sequences
    "whole": {},
    "left padding": dict(mask=torch.arange(T) >= torch.tensor([[0], [5], [T - 1]])),
    "right padding": dict(mask=torch.arange(T) < torch.tensor([[T], [5], [1]])),
    "packed": dict(cu_seqlens=torch.tensor([0, 5, 5, 6, T])),
}
CACHES: dict[str, Any] = {
    "dynamic": lambda m: DynamicCache(config=m.config),
    "static": lambda m: StaticCache(config=m.config, max_cache_len=T + 5),
}
every_cache = pytest.mark.parametrize("kind", CACHES)


def biased(m: KDAForCausalLM) -> KDABiasedAttention:
    return m.model.layers[1].self_attn


def dense(layer: KDABiasedAttention, x: Tensor, visible: Tensor) -> Tensor:
    """The layer from its parameters and its formula, score by score; visible [B, T, T], rows of queries."""
    w = dict(layer.named_parameters())
    H, H_kv, d = layer.config.num_attention_heads, layer.config.num_key_value_heads, layer.head_dim
    q, k, v = (x @ w[f"{n}_proj.weight"].T for n in "qkv")
    dt = v @ w["dt_proj.weight"].T  # [B, T, H]
    bias = torch.exp(w["A"].to(x.dtype) * torch.logaddexp(dt, torch.zeros_like(dt)))
    heads = []
    for h in range(H):
        g = h // (H // H_kv)
        q_h, k_h, v_h = q[..., h * d : (h + 1) * d], k[..., g * d : (g + 1) * d], v[..., g * d : (g + 1) * d]
        scores = (q_h @ k_h.mT / d**0.5 + bias[:, None, :, h]).masked_fill(~visible, -1e9)
        heads.append(torch.softmax(scores, -1) * visible @ v_h)
    return torch.cat(heads, -1) @ w["o_proj.weight"].T


def seen(mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """[B or 1, T, T]: which key each query sees."""
    visible = torch.ones(1, T, T, dtype=torch.bool).tril()
    if mask is not None:
        visible = visible & mask[:, None]
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens, torch.arange(T), right=True)
        visible = visible & (document[:, None] == document)
    return visible


# ---------------------------------------------------------------- the layer


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("how", HIDDEN)
def test_output_and_every_gradient_are_those_of_dense_attention(how: str, dtype: torch.dtype) -> None:
    """Padded rows are not read: their outputs have no weight in the loss, and nothing of them reaches the others."""
    layer = biased(build("key_bias")).to(dtype)
    truth = results(copy.deepcopy(layer).double(), how, dtype, exact=True)
    yardstick, got = (results(layer, how, dtype, exact) for exact in (True, False))
    limits = {n: budget(error(yardstick[n], t), dtype) for n, t in truth.items()}
    errors = {n: (error(got[n], t), limits[n]) for n, t in truth.items()}
    assert not {n: e for n, e in errors.items() if not e[0] <= e[1]}
    assert all(t.abs().max() > 0 for t in truth.values())


def results(layer: KDABiasedAttention, how: str, dtype: torch.dtype, exact: bool) -> dict[str, Tensor]:
    """The output and every gradient, for inputs that are rounded to dtype; of several draws, as A has few elements."""
    hidden, found, generator = HIDDEN[how], [], torch.Generator().manual_seed(0)
    mask, cu_seqlens = hidden.get("mask"), hidden.get("cu_seqlens")
    rows = B if cu_seqlens is None else 1
    real = torch.ones(rows, T, dtype=torch.bool) if mask is None else mask
    for _ in range(DRAWS):
        x, weight = (torch.randn(rows, T, D, generator=generator, dtype=FP64).to(dtype) for _ in range(2))
        x = (x / 4).masked_fill(~real[..., None], 3.0).to(layer.q_proj.weight).requires_grad_()
        if exact:
            o = dense(layer, x, seen(**hidden))
        else:
            o, _ = layer(x, None if mask is None else mask[:, None, None], None, cu_seqlens=cu_seqlens)
        o = torch.where(real[..., None], o, 0)
        grads = torch.autograd.grad((o * weight.to(o)).sum(), (x, *layer.parameters()))
        found.append([t.detach().flatten() for t in (o, *grads)])
    names = ("o", "x", *dict(layer.named_parameters()))
    return {n: torch.cat(parts) for n, parts in zip(names, zip(*found, strict=True), strict=True)}


def test_it_begins_as_attention_without_bias() -> None:
    """With A = 0 the logits are those of the same weights without a bias; then both parameters learn."""
    plain, m = build("hybrid"), build("key_bias")
    new = m.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert new == [f"model.layers.1.self_attn.{n}" for n in ("A", "dt_proj.weight")]
    torch.nn.init.zeros_(biased(m).A)
    same((m(ids(2, 9)).logits,), (plain(ids(2, 9)).logits,))
    before = [p.detach().clone() for p in (biased(m).A, biased(m).dt_proj.weight)]
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(2):
        m.train()(ids(2, 9), labels=ids(2, 9)).loss.backward()
        optimizer.step()
    assert not any(torch.equal(p, b) for p, b in zip((biased(m).A, biased(m).dt_proj.weight), before, strict=True))


def test_attention_implementations_have_no_say() -> None:
    tokens, mask = ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    results = [model("key_bias", name)(tokens, attention_mask=mask).logits for name in ("sdpa", "eager")]
    assert torch.equal(*results)


def test_a_missing_A_is_zero(tmp_path: pathlib.Path) -> None:
    m = build("key_bias", FP32)
    m.save_pretrained(tmp_path, state_dict={n: p for n, p in m.state_dict().items() if "self_attn" not in n})
    loaded = KDAForCausalLM.from_pretrained(tmp_path)
    assert (biased(loaded).A == 0).all()
    assert 0.3 < biased(loaded).dt_proj.weight.std() < 0.5


def test_offloaded_weights() -> None:
    accelerate = pytest.importorskip("accelerate")
    m = build("key_bias", FP32)
    want = m(ids(2, 9)).logits
    accelerate.cpu_offload(m, execution_device=torch.device("cpu"))
    assert biased(m).A.is_meta
    assert torch.equal(m(ids(2, 9)).logits, want)


# ---------------------------------------------------------------- the cache


def biases_of(m: KDAForCausalLM, tokens: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """The values [B, T, H_kv d] and the biases [B, T, H] that the layer computes in one pass."""
    layer, values = biased(m), []
    hook = layer.v_proj.register_forward_hook(lambda *args: values.append(args[-1]))
    with torch.no_grad():
        m(tokens, use_cache=False, **arguments)
        hook.remove()
        return values[0], torch.exp(layer.A * torch.log1p(torch.exp(values[0] @ layer.dt_proj.weight.T)))


def held(cache: Any, tokens: int) -> tuple[Tensor, Tensor]:
    """The same of what a cache holds of its first tokens."""
    values = cache.layers[1].values[:, :, :tokens]
    v, bias = values[..., :8], values[..., 8:]  # two biases, one for each query head of the key head
    return v.transpose(1, 2).flatten(2), bias.transpose(1, 2).flatten(2)


@every_cache
def test_biases_are_cached_beside_the_values(kind: str) -> None:
    """In their slots, for prompts and single tokens; a reordered, a repeated and a cropped cache takes them along."""
    m, tokens = model("key_bias"), ids(B, T)
    cache = CACHES[kind](m)
    with torch.no_grad():
        for part in tokens.split((5, 1, 4, 2), 1):
            m(part, past_key_values=cache)
    want = biases_of(m, tokens)
    assert want[1].std() > 0.1, "the biases are too equal to show an error"
    same(held(cache, T), want)
    order = torch.tensor([2, 0, 0])
    cache.layers[1].reorder_cache(order)
    same(held(cache, T), [t[order] for t in want])
    if kind == "dynamic":
        cache.layers[1].crop(-3)
        same(held(cache, T), [t[order, :-3] for t in want])
        cache.layers[1].batch_select_indices(torch.tensor([1]))
        same(held(cache, T), [t[:1, :-3] for t in want])


@every_cache
@pytest.mark.parametrize("wrong", ["lost", "shifted", "heads"])
def test_a_wrong_cached_bias_shows(kind: str, wrong: str) -> None:
    """The other tests of caches compare logits with and without one: these see the bias in it."""
    m, tokens = model("key_bias"), ids(2, T)
    cache = CACHES[kind](m)
    with torch.no_grad():
        m(tokens[:, :-1], past_key_values=cache)
        values = cache.layers[1].values
        bias = values[:, :, : T - 1, 8:].clone()
        changed = {"lost": torch.zeros_like(bias), "shifted": bias.roll(1, 2), "heads": bias.flip(-1)}[wrong]
        values[:, :, : T - 1, 8:] = changed
        got = m(tokens[:, -1:], past_key_values=cache).logits
        want = m(tokens, use_cache=False).logits[:, -1:]
    assert error(got, want) > 1e-3


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("parts", [(T,), (5, 1, 4, 2), (2, T - 2)], ids=str)
@every_cache
def test_a_cache_in_parts_equals_one_pass(kind: str, parts: tuple[int, ...], padding: str) -> None:
    """Several queries meet a static cache whose end is empty, filled or not before, with padding on either side."""
    m, tokens = model("key_bias"), ids(2, T)
    mask = torch.ones(2, T, dtype=torch.long)
    if padding != "none":
        mask[0] = torch.arange(T) >= 3 if padding == "left" else torch.arange(T) < T - 3
    cache, got, done = CACHES[kind](m), [], 0
    with torch.no_grad():
        for part in tokens.split(parts, 1):
            done += part.shape[1]
            given = None if padding == "none" else mask[:, :done]
            got.append(m(part, attention_mask=given, past_key_values=cache).logits)
        for row, real in zip(range(2), mask.bool(), strict=True):
            want = m(tokens[row : row + 1, real], use_cache=False).logits[0]
            same((torch.cat(got, 1)[row, real],), (want,))


@pytest.mark.parametrize("kind", ["static", "offloaded_static"])
def test_chunked_prefill_of_a_static_cache(kind: str) -> None:
    """For which transformers makes the static cache early, as wide as it takes the values to be."""
    if kind == "offloaded_static" and not torch.cuda.is_available():
        pytest.skip("offloads from a GPU")
    if kind == "offloaded_static" and installed("transformers") < (5, 20):
        pytest.skip("transformers before 5.20 moves a layer back before its copy to the CPU is finished")
    device = "cpu" if kind == "static" else "cuda"
    m, tokens = copy.deepcopy(model("key_bias")).to(device), ids(2, T).to(device)
    # generate would compile a cache that moves between devices into CUDA graphs: the process aborted on an H200.
    got = generate(m, tokens, cache_implementation=kind, prefill_chunk_size=5, disable_compile=device == "cuda")
    assert torch.equal(got, generate(m, tokens))


def test_a_cache_of_other_layers_is_refused() -> None:
    plain, m, tokens = model("hybrid"), model("key_bias"), ids(2, T)
    cache = plain(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"cache must hold values of 10 channels in layer 1, .* got 8"):
        m(tokens[:, :1], past_key_values=cache)


# ---------------------------------------------------------------- masks and memory


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], bool]]:
    """The shape of the bias and whether the operator adds causality, of each of its calls."""
    found, operator = [], modeling_kda.biased_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, causal: bool, **options: Any) -> Tensor:
        found.append((tuple(bias.shape), causal))
        return operator(q, k, v, bias, causal=causal, **options)

    monkeypatch.setattr(modeling_kda, "biased_attention", spy)
    return found


@every_cache
@pytest.mark.parametrize("padded", [False, True])
def test_neither_mask_nor_bias_has_a_size_of_all_scores(kind: str, padded: bool, calls: list[Any]) -> None:
    m, tokens, mask = model("key_bias"), ids(2, T), torch.ones(2, T, dtype=torch.long)
    mask[0, :3] = 0
    generate(m, tokens, attention_mask=mask if padded else None, max_new_tokens=3, past_key_values=CACHES[kind](m))
    m(tokens, attention_mask=mask if padded else None, labels=tokens, use_cache=False).loss.backward()
    assert len(calls) == 4
    assert all(shape[2] == 1 and causal for shape, causal in calls)
    cache = CACHES[kind](m)
    masks = masks_for_generate(m.config, torch.empty(2, T, 0), mask, cache)
    slots = T + 5 if kind == "static" else T
    assert torch.equal(masks["full_attention"], pad(mask.bool(), (0, slots - T))[:, None, None])


@pytest.mark.parametrize("form", ["bool", "additive", "keys"])
def test_masks_of_four_dimensions(form: str, calls: list[Any]) -> None:
    """As they come: whole ones, which may hide anything, and those of keys alone."""
    m, tokens = model("key_bias"), ids(2, T)
    keys = torch.arange(T) >= torch.tensor([[3], [0]])
    visible = seen(keys)
    if form != "keys":
        visible = visible & ~torch.eye(T, dtype=torch.bool).roll(-2, 1)  # no query sees the token before the last
    given = {"keys": keys[:, None, None], "bool": visible[:, None]}.get(form)
    if given is None:
        given = torch.zeros(2, 1, T, T, dtype=FP64).masked_fill(~visible[:, None], torch.finfo(FP64).min)
    x = torch.randn(2, T, D, generator=torch.Generator().manual_seed(0), dtype=FP64)
    got, _ = biased(m)(x, given, None)
    same((got[keys],), (dense(biased(m), x, visible)[keys],))
    assert calls == [((2, 4, 1 if form == "keys" else T, T), form == "keys")]
    masks = {"linear_attention": keys.long(), "full_attention": given}
    assert torch.equal(m(tokens, attention_mask=masks).logits, m(tokens, attention_mask=masks).logits)
    if form == "keys":
        same((m(tokens, attention_mask=masks).logits,), (m(tokens, attention_mask=keys.long()).logits,))


WRONG_MASKS = {
    "too short": (torch.ones(2, T - 1), rf"attention_mask must have shape \[2, {T}\] .* got \[2, {T - 1}\]"),
    "another batch": (torch.ones(3, T), rf"attention_mask must have shape \[2, {T}\] .* got \[3, {T}\]"),
    "three dimensions": (torch.ones(2, T, T), r"attention_mask must have shape .* or 4 dimensions, got \[2, 12, 12\]"),
}


@pytest.mark.parametrize("case", WRONG_MASKS)
def test_wrong_masks(case: str) -> None:
    mask, message = WRONG_MASKS[case]
    config = model("key_bias").config
    with pytest.raises(ValueError, match=message):
        create_key_mask(config, torch.empty(2, T, 0), mask, None)


@pytest.mark.parametrize("how", ["call", "config"])
def test_attention_weights_are_refused(how: str) -> None:
    m = build("key_bias")
    m.set_attn_implementation("eager")
    if how == "config":
        m.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions must be False"):
        m(ids(2, 5), **(dict(output_attentions=True) if how == "call" else {}))
