"""Doge after `swap_attention`: the keys that its queries keep, memory, packing, and what is refused.

That it is the stock model, in gradients, generation, caches, saving and so on, `test_swap_stock.py` asks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache

from kda_layers import restore_attention, swap_attention
from kda_layers.modeling.swap.families import doge
from kda_layers.serving import enable_speculative_decoding
from tests.kernels.cases import BF16, FP32, FP64, budget, error
from tests.modeling.common import same
from tests.modeling.stock_models import build, swapped_layers_of, with_oracle
from tests.modeling.test_swap_stock import GREEDY, both, ids, limit, logits

KEEP, T = 7, 40  # keys that a query keeps, of many
FIXED = Version(transformers.__version__) >= Version("5.23")  # of what 5.17's own model has wrong


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that choose their keys together are so few that there are several lots of them, the last one smaller."""
    monkeypatch.setattr(doge, "ROWS", 5)


def attention(queries: int, dtype: torch.dtype) -> list[Tensor]:
    """q [2, queries, 4, 8], k, v [2, T, 2, 8], bias [2, 2, 1, T], no two of a row equal in any dtype."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, queries, 4, 8), (2, T, 2, 8), (2, T, 2, 8))
    inputs = [torch.randn(*s, generator=generator, dtype=FP64) for s in shapes]
    bias = torch.rand(2, 2, 1, T, generator=generator).argsort(-1) / 16
    return [t.to(dtype).requires_grad_() for t in (*inputs, bias)]


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, visible: Tensor, keep: int) -> Tensor:
    """Score by score; of its visible keys each query sees those whose bias has a rank below `keep`."""
    lower = bias[..., None, :] > bias[..., :, None]  # [.., 1, key, other key]
    rank = (lower & visible[..., None, :]).sum(-1)  # [.., query, key]
    seen = visible & (rank < keep)
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(2, 2)) / q.shape[-1] ** 0.5
    scores = scores + bias.repeat_interleave(2, 1)
    scores = scores.masked_fill(~seen.repeat_interleave(2, 1), -torch.inf)
    return torch.einsum("bhts,bshd->bthd", torch.softmax(scores, -1), v.repeat_interleave(2, 2))


# ---------------------------------------------------------------- the keys of the largest biases


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("keep", [2, KEEP, T - 1, T])
@pytest.mark.parametrize("queries", [1, 4, T - 3, T])
def test_the_largest_biases_and_every_gradient(queries: int, keep: int, dtype: torch.dtype) -> None:
    """Few queries as many, with more and with fewer keys before them than each keeps."""
    visible = torch.ones(queries, T, dtype=torch.bool).tril(T - queries)[None, None]
    weight = torch.randn(2, queries, 4, 8, generator=torch.Generator().manual_seed(9), dtype=FP64)

    def run(f: Any, inputs: list[Tensor]) -> list[Tensor]:
        o = f(*inputs)
        return [o.detach(), *torch.autograd.grad((o * weight.to(o)).sum(), inputs)]

    inputs = attention(queries, dtype)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    truth, yardstick = (run(lambda *x: dense(*x, visible, keep), x) for x in (exact, inputs))
    got = run(lambda *x: doge.attend_to_largest(*x, True, keep, None), inputs)
    whole = [*inputs[:3], inputs[3].expand(-1, -1, queries, -1).masked_fill(~visible, -torch.inf)]
    masked = doge.attend_to_largest(*whole, False, keep, None).detach()
    limits = [budget(error(y, t), dtype) for y, t in zip(yardstick, truth, strict=True)]
    errors = [error(g, t) for g, t in zip(got, truth, strict=True)]
    assert all(e <= most for e, most in zip(errors, limits, strict=True)), (errors, limits)
    assert error(masked, truth[0]) <= limits[0]
    if keep < T:
        assert error(dense(*exact, visible, T).detach(), truth[0]) > 1e-3, "choosing keys changes nothing"


def test_many_lots_are_as_exact_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are not rounded for each lot of queries."""
    inputs = attention(T, BF16)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    visible = torch.ones(T, T, dtype=torch.bool).tril()[None, None]
    truth = torch.autograd.grad(dense(*exact, visible, KEEP).square().sum(), exact)
    errors = []
    for rows in (T, 1):
        monkeypatch.setattr(doge, "ROWS", rows)
        o = doge.attend_to_largest(*inputs, True, KEEP, None)
        grads = torch.autograd.grad(o.double().square().sum(), inputs)
        errors.append([error(g, t) for g, t in zip(grads, truth, strict=True)])
    assert all(many <= 1.3 * one for one, many in zip(*errors, strict=True)), errors


def test_logits_loss_and_every_gradient_of_long_sequences() -> None:
    """Compare tokens that are all different, for which no two biases are equal; in fp64, as biases in another order are
    another model."""
    stock = build("doge", keep_window_size=KEEP).double()
    swapped = copy.deepcopy(stock)
    swap_attention(swapped)
    tokens = torch.stack([torch.randperm(90, generator=torch.Generator().manual_seed(row))[:T] for row in range(2)])
    found = []
    for m in (with_oracle(stock), swapped, with_oracle(build("doge"))):
        out = m(tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        results = dict(logits=out.logits.detach(), loss=out.loss.detach())
        found.append(results | {n: p.grad for n, p in m.named_parameters()})
    truth, got, short = found
    # The model's norms are in fp32 whatever its dtype.
    assert not {n: e for n, t in truth.items() if not (e := error(got[n], t)) < 1e-5}
    assert error(short["logits"], truth["logits"]) > 1e-2, "no query has more keys than it keeps"


@pytest.mark.parametrize("how", ["greedy", "beam", "static", "no cache", "prompt lookup"])
@pytest.mark.parametrize("padding", [0, 4])
def test_generation_beyond_what_a_query_keeps(how: str, padding: int) -> None:
    options: dict[str, Any] = {
        "beam": dict(num_beams=3), "static": dict(cache_implementation="static"), "no cache": dict(use_cache=False),
        "prompt lookup": dict(prompt_lookup_num_tokens=3, max_matching_ngram_size=1),
    }.get(how, {})  # fmt: skip
    stock, swapped = both("doge", keep_window_size=KEEP + 5)
    for prompt in (KEEP, T):  # the limit is passed while decoding; before it
        tokens = ids(1 if how == "prompt lookup" else 2, prompt, high=7 if how == "prompt lookup" else 80)
        mask = torch.ones_like(tokens)
        tokens[0, :padding], mask[0, :padding] = 0, 0
        call = dict(attention_mask=mask, **(GREEDY | options))
        assert torch.equal(swapped.generate(tokens, **call), stock.generate(tokens, **call))


@pytest.mark.parametrize("keep", [T, 20, KEEP])
def test_no_tensor_has_the_size_of_all_scores(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are of keys alone; biases too, but for some queries at a time that have more keys than they keep."""
    operator, shapes, masks = doge.biased_attention, [], []

    def spy(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, **options: Any) -> Tensor:
        shapes.append(tuple(bias.shape[2:]))
        return operator(q, k, v, bias, **options)

    _, swapped = both("doge", keep_window_size=keep)
    monkeypatch.setattr(doge, "biased_attention", spy)
    for layer in swapped_layers_of(swapped).values():
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: masks.append(kwargs["attention_mask"].shape), with_kwargs=True
        )
    tokens, mask = ids(2, T), torch.ones(2, T, dtype=torch.long)
    mask[0, :3] = 0
    swapped.train()(tokens, attention_mask=mask, labels=tokens).loss.backward()
    assert set(masks) == {(2, 1, 1, T)}
    lots = [(5, min(end, T)) for end in range(keep + 5, T + 1, 5)]
    lots += [(left, T)] if (left := (T - keep) % 5) else []
    assert shapes[: 1 + len(lots)] == [(1, keep), *lots]
    assert len(shapes) == 3 * (1 + 2 * len(lots)), "the backward does not choose the keys again"


# ---------------------------------------------------------------- right where stock is not


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_no_token_sees_a_later_one(implementation: str) -> None:
    stock, swapped = both("doge")
    changed = ids(2, 20)
    changed[:, -1] = (changed[:, -1] + 1) % 80
    leaks = []
    for m in (stock, swapped):
        m.set_attn_implementation(implementation)
        leaks.append(error(logits(m, ids(2, 20))[:, :-1], logits(m, changed)[:, :-1]))
    assert leaks[1] == 0
    assert (leaks[0] == 0) == (FIXED or implementation == "eager")


PACKED = {
    "position_ids": dict(),
    "flash kwargs alone": dict(return_flash_attn_kwargs=True, return_position_ids=False),
    "seq_idx": dict(return_seq_idx=True),
}


@pytest.mark.parametrize("keep", [T, KEEP])
@pytest.mark.parametrize("how", PACKED)
def test_packed_documents_are_as_alone(how: str, keep: int) -> None:
    """Also such as are longer than what a query keeps, next to shorter ones."""
    stock, swapped = both("doge", keep_window_size=keep)
    documents = [ids(n, seed=n).tolist() for n in (5, 1, 17, 8)]
    batch = dict(DataCollatorWithFlattening(**PACKED[how])([dict(input_ids=d) for d in documents]))
    tokens, _ = batch.pop("input_ids"), batch.pop("labels")
    want = torch.cat([logits(swapped, torch.tensor([d]), use_cache=False) for d in documents], 1)
    assert error(logits(swapped, tokens, **batch), want) < limit("doge")
    assert error(logits(stock, tokens, **batch), want) > 1e-2


@pytest.mark.skipif(not FIXED, reason="5.17's own experts fail")
def test_experts() -> None:
    stock, swapped = both("doge", is_moe=True, num_experts=16, num_experts_per_tok=4, output_router_logits=True)
    tokens = ids(2, 20)
    outs = [m(tokens, labels=tokens) for m in (stock, swapped)]
    assert error(outs[1].logits.detach(), outs[0].logits.detach()) < limit("doge")
    same((outs[1].loss, outs[1].aux_loss), (outs[0].loss, outs[0].aux_loss), 1e-5)


def test_autocast_trains_as_stock() -> None:
    """Norms of queries and keys return fp32. The truth is the stock model in fp32."""
    stock, swapped = both("doge")
    tokens, results = ids(2, 20), []
    for model, cast in ((stock, False), (stock, True), (swapped, True)):
        model.zero_grad()
        with torch.autocast("cpu", BF16, enabled=cast):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        results.append(torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters())]))
    truth, yardstick, got = results
    assert 0 < error(got, truth) <= budget(error(yardstick, truth), BF16)


# ---------------------------------------------------------------- parts, undoing, refusing


def test_some_layers() -> None:
    """Next to stock layers, which need masks of all scores, ours compute the same; with packed documents not."""
    stock = build("doge")
    swapped = copy.deepcopy(stock)
    assert swap_attention(swapped, [1, -1]) == ["model.layers.1.self_attn", "model.layers.2.self_attn"]
    tokens, mask = ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = 0
    outs = [logits(m, tokens, attention_mask=mask)[mask == 1] for m in (stock, swapped)]
    assert error(outs[1], outs[0]) < limit("doge")
    assert torch.equal(swapped.generate(tokens, **GREEDY), stock.generate(tokens, **GREEDY))
    with pytest.raises(ValueError, match=r"every attention layer .* 2 packed sequences, got stock layers at layers\.0"):
        swapped(ids(1, 9), cu_seq_lens_q=torch.tensor([0, 4, 9]))


def test_a_mask_of_four_dimensions_is_taken_as_it_comes() -> None:
    stock, swapped = both("doge")
    visible = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril() & (torch.rand(1, 1, 20, 20) < 0.7)
    visible[..., range(20), range(20)] = True
    outs = [logits(m, ids(2, 20), attention_mask=visible, use_cache=False) for m in (stock, swapped)]
    assert error(outs[1], outs[0]) < limit("doge")
    assert error(outs[1], logits(swapped, ids(2, 20))) > 1e-2


def test_drafting_needs_no_call() -> None:
    _, swapped = both("doge")
    before = set(vars(swapped))
    enable_speculative_decoding(swapped)
    assert set(vars(swapped)) == before
    tokens = ids(1, 20, high=7)
    want = swapped.generate(tokens, **GREEDY)
    assert torch.equal(swapped.generate(tokens, prompt_lookup_num_tokens=3, max_matching_ngram_size=1, **GREEDY), want)
    assert torch.equal(swapped.generate(tokens, assistant_model=build("doge", seed=1), **GREEDY), want)


def test_base_and_classification_models() -> None:
    tokens = ids(2, 9)
    tokens[:, -1] = 5
    for kind in (transformers.DogeModel, transformers.DogeForSequenceClassification):
        stock = kind(build("doge").config).eval()
        swapped = copy.deepcopy(stock)
        assert len(swap_attention(swapped)) == 3
        with torch.no_grad():
            outs = [m(tokens)[0] for m in (stock, swapped)]
        assert error(outs[1], outs[0]) < limit("doge")
        assert len(restore_attention(swapped)) == 3
        with torch.no_grad():
            assert torch.equal(swapped(tokens)[0], outs[0])


def test_the_backend_is_passed_on() -> None:
    model = build("doge")
    swap_attention(model, backend="eager")
    assert {m.backend for m in swapped_layers_of(model).values()} == {"eager"}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "a window": (
        dict(sliding_window=8),
        {},
        ValueError,
        r"layers\.0\.self_attn: sliding_window must be None, .* got 8",
    ),
    "dropout": (dict(attention_dropout=0.1), {}, ValueError, r"attention_dropout must be 0, .* got 0\.1"),
    "a backend": ({}, dict(backend="sm90"), ValueError, "backend must be one of .*eager.*, got 'sm90'"),
    "a pattern": ({}, dict(layers="3:1"), ValueError, "layers must be None, 'all' or indices .* got '3:1'"),
    "beyond": ({}, dict(layers=[3]), ValueError, r"layers must be in \[-3, 3\) for a model of 3 layers, got \[3\]"),
    "configured": ({}, dict(linear_num_heads=2), TypeError, "linear_num_heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_swapped(case: str) -> None:
    fields, arguments, error_type, message = REFUSED[case]
    model = build("doge", **fields)
    before = {p: (type(m), set(vars(m))) for p, m in model.named_modules()}
    with pytest.raises(error_type, match=message):
        swap_attention(model, **arguments)
    assert {p: (type(m), set(vars(m))) for p, m in model.named_modules()} == before
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_what_a_swapped_model_refuses() -> None:
    stock, swapped = both("doge")
    tokens, packed = ids(1, 9), dict(cu_seq_lens_q=torch.tensor([0, 4, 9]))
    filled = stock(tokens, past_key_values=DynamicCache(config=stock.config)).past_key_values
    calls: tuple[tuple[dict[str, Any], str], ...] = (
        (dict(output_attentions=True), "output_attentions must be False"),
        (dict(past_key_values=filled), "cache must hold values of 9 channels in layer 0, .* got 8"),
        (dict(attention_mask=torch.ones(1, 8)), r"attention_mask must have shape \[1, at least 9\] .* got \[1, 8\]"),
        (packed | dict(attention_mask=(tokens != tokens[0, 0]).long()), "attention_mask must be None with packed"),
        (packed | dict(use_cache=True), "use_cache unset or False with 2 packed"),
    )
    for arguments, message in calls:
        with pytest.raises(ValueError, match=message):
            swapped(tokens, **arguments)
