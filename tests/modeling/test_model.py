"""The language model as transformers uses it: generation, caches, packing, training, saving, compiling.

Tokens are compared in fp64, where two ways of computing the same logits cannot disagree about the largest one.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy, log_softmax
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    CompileConfig,
    DataCollatorWithFlattening,
    DynamicCache,
    StaticCache,
)

from kda_layers import KDAConfig, KDAForCausalLM, KDAModel, KimiDeltaAttention
from kda_layers.modeling.cache import KDACacheLayer, KDAOnlyCacheLayer
from tests.kernels.cases import BF16, FP32, FP64, FP64_LIMIT, budget, error
from tests.modeling.common import same

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "kda_layers" / "configs").glob("*.json"))
TINY = dict(
    vocab_size=29, hidden_size=32, intermediate_size=48, num_hidden_layers=2, linear_num_heads=2, linear_head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4, bos_token_id=None, eos_token_id=None,
    pad_token_id=0,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "kda": {},
    "hybrid": dict(full_attention_interval=2),
    "softplus_tied": dict(linear_gate_activation="softplus", linear_lower_bound=None, tie_word_embeddings=True),
    "grouped": dict(
        linear_num_value_heads=4, linear_value_head_dim=12, linear_conv_kernel_dim=3, linear_allow_neg_eigval=True,
        layer_types=["full_attention", "linear_attention"],
    ),
    "key_bias": dict(attention_bias="key", full_attention_interval=2),
}  # fmt: skip
every_model = pytest.mark.parametrize("name", MODELS)
kda_and_hybrid = pytest.mark.parametrize("name", ["kda", "hybrid"])
every_attention = pytest.mark.parametrize("attention", ["sdpa", "eager"])
HYBRIDS = ("hybrid", "grouped", "key_bias")


def build(name: str, dtype: torch.dtype = FP64, seed: int = 1, **fields: Any) -> KDAForCausalLM:
    torch.manual_seed(seed)
    m = KDAForCausalLM(KDAConfig(**(TINY | MODELS[name] | fields))).to(dtype).eval()
    for n, p in m.named_parameters():
        if n.endswith(".A"):  # it starts at 0, where biases do nothing
            torch.nn.init.normal_(p, std=0.3)
    return m


@functools.cache
def model(name: str, attention: str = "sdpa") -> KDAForCausalLM:
    """A model that tests share and leave as it is."""
    m = build(name)
    m.set_attn_implementation(attention)
    return m


def ids(*shape: int, seed: int = 1, high: int = 29) -> Tensor:
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(seed))


def generate(m: KDAForCausalLM, tokens: Tensor, **options: Any) -> Any:
    options = dict(max_new_tokens=10, do_sample=False, attention_mask=torch.ones_like(tokens)) | options
    return m.generate(tokens, **options)


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows [n_i] -> [B, max n] with token 3 in front of the short ones, and the mask."""
    T = max(len(row) for row in rows)
    tokens = torch.stack([torch.cat((row.new_full((T - len(row),), 3), row)) for row in rows])
    return tokens, (torch.arange(T) >= torch.tensor([[T - len(row)] for row in rows])).long()


# ---------------------------------------------------------------- generation


@every_model
def test_greedy_is_the_largest_logit_of_a_whole_pass(name: str) -> None:
    m, want = model(name), ids(3, 9)
    with torch.no_grad():
        for _ in range(10):
            want = torch.cat((want, m(want, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(generate(m, ids(3, 9)), want)
    assert all(len(set(row.tolist())) >= 5 for row in want[:, 9:]), "the output is too uniform to show an error"


CACHES: dict[str, dict[str, Any]] = {
    "none": dict(use_cache=False),
    "static": dict(cache_implementation="static"),
    "chunked prefill": dict(prefill_chunk_size=4),
    "chunks of one": dict(prefill_chunk_size=1),
}


@every_model
@pytest.mark.parametrize("how", CACHES)
def test_caches_change_nothing(name: str, how: str) -> None:
    m = model(name)
    for tokens in (ids(3, 9), ids(1, 70, seed=2)):  # the second call uses the static cache of the first again
        assert torch.equal(generate(m, tokens, **CACHES[how]), generate(m, tokens))


SEARCHES: dict[str, dict[str, Any]] = {
    "sampling": dict(do_sample=True),
    "several samples": dict(do_sample=True, num_return_sequences=3),
    "beams": dict(num_beams=3),
    "several beams": dict(num_beams=4, num_return_sequences=2, length_penalty=0.5),
    "sampled beams": dict(num_beams=2, do_sample=True),
}


@every_model
@pytest.mark.parametrize("how", SEARCHES)
def test_searches_with_and_without_a_cache(name: str, how: str) -> None:
    """The same seed gives the same tokens whatever keeps the past, and reordered beams take their states along."""
    m, got = model(name), []
    for cache in ({}, CACHES["none"], CACHES["static"]):
        torch.manual_seed(3)
        got.append(generate(m, ids(2, 6), **SEARCHES[how], **cache))
    assert len(got[0]) == 2 * SEARCHES[how].get("num_return_sequences", 1)
    assert len(set(map(tuple, got[0].tolist()))) == len(got[0]), "returned sequences are equal"
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])
    assert not torch.equal(got[0][:2], generate(m, ids(2, 6))), "the search did not search"


@every_model
@pytest.mark.parametrize("how", ["dynamic", "none", "static", "beams", "chunked prefill"])
def test_left_padded_rows_are_as_alone(name: str, how: str) -> None:
    m, rows = model(name), [ids(n, seed=n) for n in (9, 6, 2)]
    tokens, mask = left_padded(rows)
    options = {"dynamic": {}, "beams": dict(num_beams=2)}.get(how) or CACHES.get(how, {})
    got = generate(m, tokens, attention_mask=mask, **options)
    options = dict(num_beams=2) if how == "beams" else {}
    for row, out in zip(rows, got, strict=True):
        assert torch.equal(out[9:], generate(m, row[None], **options)[0, len(row) :])


@every_model
@pytest.mark.parametrize("use_cache", [True, False])
def test_one_left_padded_row(name: str, use_cache: bool) -> None:
    m, row = model(name), ids(6, seed=6)
    tokens, mask = torch.cat((row.new_full((3,), 3), row))[None], torch.tensor([[0] * 3 + [1] * 6])
    got = generate(m, tokens, attention_mask=mask, use_cache=use_cache)
    assert torch.equal(got[0, 9:], generate(m, row[None])[0, 6:])


@every_model
@pytest.mark.parametrize("kind", ["returned", "dynamic", "static"])
def test_a_cache_goes_on(name: str, kind: str) -> None:
    """Generate, append tokens of a second turn, go on with the cache: as if from scratch."""
    m, options = model(name), dict(return_dict_in_generate=True)
    if kind == "dynamic":
        options["past_key_values"] = DynamicCache(config=m.config)
    if kind == "static":
        options["past_key_values"] = StaticCache(config=m.config, max_cache_len=40)
    first = generate(m, ids(2, 6), **options)
    assert "past_key_values" not in options or first.past_key_values is options["past_key_values"]
    turn = torch.cat((first.sequences, ids(2, 4, seed=2)), 1)
    got = generate(m, turn, past_key_values=first.past_key_values)
    assert torch.equal(got, generate(m, turn))


@every_model
def test_padding_in_a_second_turn(name: str) -> None:
    """Rows with other numbers of padding tokens in each turn, then decoding: each row as if they were not there."""
    m = model(name)
    turns = [
        left_padded([ids(n, seed=10 * turn + n) for n in lengths]) for turn, lengths in enumerate(((7, 4), (1, 5)))
    ]
    turns.append((ids(2, 1, seed=9), torch.ones(2, 1, dtype=torch.long)))
    with torch.no_grad():
        out, got = None, []
        for turn in range(3):
            mask = torch.cat([m for _, m in turns[: turn + 1]], 1)
            out = m(turns[turn][0], attention_mask=mask, past_key_values=out and out.past_key_values)
            got.append(out.logits)
        tokens, mask = (torch.cat(parts, 1) for parts in zip(*turns, strict=True))
        for row in range(2):
            real = mask[row] == 1
            same((torch.cat(got, 1)[row, real],), (m(tokens[row : row + 1, real]).logits[0],))


@functools.cache
def guessable(name: str) -> tuple[KDAForCausalLM, KDAForCausalLM]:
    """A model of few tokens, which a guess often hits, and a draft that is nearly the same model."""
    m = build(name, vocab_size=7, pad_token_id=None)  # a draft would hide a pad token that it has itself generated
    draft = copy.deepcopy(m)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(0.15 * p.std(correction=0) * torch.randn_like(p))
    return m, draft


GUESSES: dict[str, Any] = {
    "prompt lookup": lambda draft: dict(prompt_lookup_num_tokens=4, max_matching_ngram_size=2),
    "draft": lambda draft: dict(assistant_model=draft),
}


@every_model
@pytest.mark.parametrize("how", GUESSES)
def test_guessed_tokens_change_nothing(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt lookup and assisted generation give the greedy tokens in fewer passes, some guesses being taken back."""
    m, draft = guessable(name)
    forward, crop, passes, removed = m.model.forward, KDACacheLayer.crop, [], []
    new, saved = 20, 0

    def counted_crop(self: KDACacheLayer, n: Any) -> None:
        removed.append(abs(int(n)))
        crop(self, n)

    monkeypatch.setattr(KDACacheLayer, "crop", counted_crop)
    monkeypatch.setattr(m.model, "forward", lambda **kwargs: passes.append(1) or forward(**kwargs))
    for seed in range(3):
        tokens = ids(1, 12, seed=seed, high=7)
        want = generate(m, tokens, max_new_tokens=new)
        saved += new
        passes.clear()
        assert torch.equal(generate(m, tokens, max_new_tokens=new, **GUESSES[how](draft)), want)
        saved -= len(passes)
    assert saved > 0, "no guess was right"
    assert any(removed), "no guess was wrong"


@kda_and_hybrid
@pytest.mark.parametrize("how", ["prompt lookup", "draft"])
def test_guesses_on_a_given_cache(name: str, how: str) -> None:
    """A user's own empty cache, which afterwards goes on without guesses."""
    m, draft = guessable(name)
    tokens, cache = ids(1, 12, seed=5, high=7), DynamicCache(config=m.config)
    got = generate(m, tokens, past_key_values=cache, max_new_tokens=20, **GUESSES[how](draft))
    want = generate(m, tokens, max_new_tokens=30)
    assert torch.equal(got, want[:, :32])
    assert torch.equal(generate(m, got, past_key_values=cache), want)


def test_a_draft_of_another_kind() -> None:
    """An all-KDA draft for a hybrid target and the reverse, both unrelated to their target: mostly wrong guesses."""
    for target, draft in itertools.permutations(("kda", "hybrid")):
        m, other = guessable(target)[0], build(draft, vocab_size=7, pad_token_id=None, seed=5)
        tokens = ids(1, 8, high=7)
        assert torch.equal(generate(m, tokens, assistant_model=other), generate(m, tokens))


# ---------------------------------------------------------------- caches and masks in forward


@every_model
def test_cached_forward_equals_one_pass(name: str) -> None:
    m, tokens = model(name), ids(2, 12)
    with torch.no_grad():
        whole, out, logits = m(tokens), None, []
        for part in tokens.split((5, 1, 1, 4, 1), 1):
            out = m(part, past_key_values=None if out is None else out.past_key_values)
            logits.append(out.logits)
    same((torch.cat(logits, 1),), (whole.logits,))
    assert out.past_key_values.get_seq_length() == 12


@every_model
def test_default_of_use_cache(name: str) -> None:
    """A cache in evaluation if the config says so, none while training; an explicit choice wins."""
    m = build(name)
    cache = m(ids(1, 3)).past_key_values
    kind = KDACacheLayer if name in HYBRIDS else KDAOnlyCacheLayer
    linear = [c for c, t in zip(cache.layers, m.config.layer_types, strict=True) if t == "linear_attention"]
    assert all(type(layer) is kind for layer in linear)
    assert m(ids(1, 3), use_cache=False).past_key_values is None
    m.train()
    assert m(ids(1, 3)).past_key_values is None
    assert m(ids(1, 3), use_cache=True).past_key_values is not None
    m.eval()
    m.config.use_cache = False
    assert m(ids(1, 3)).past_key_values is None


@every_model
@pytest.mark.parametrize("positions", [False, True], ids=["", "position_ids"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_logits(name: str, side: str, positions: bool) -> None:
    """Real tokens' logits are those of the row alone, whichever side the padding is on."""
    m, T = model(name), 8
    for lengths in ((8, 5, 1), (5,)):
        mask = torch.stack([(torch.arange(T) < n).long() for n in lengths])
        mask = mask.flip(1) if side == "left" else mask
        tokens = ids(len(lengths), T)
        position_ids = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0) if positions else None
        with torch.no_grad():
            got = m(tokens, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
            for row, real, logits in zip(tokens, mask.bool(), got, strict=True):
                same((logits[real],), (m(row[None, real]).logits[0],))


@kda_and_hybrid
def test_prepared_masks(name: str) -> None:
    """A dict of masks by layer type, which generate passes with a static cache, means the same as the 2D mask."""
    m, tokens, T = model(name), ids(2, 5), 5
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    causal = (torch.ones(T, T).tril() * mask[:, None]).bool()[:, None]
    masks = {"linear_attention": mask, "full_attention": causal}
    with torch.no_grad():
        got, want = (m(tokens, attention_mask=each).logits[mask == 1] for each in (masks, mask))
    same((got,), (want,))


def test_inputs_embeds_and_errors() -> None:
    m, tokens = model("hybrid"), ids(2, 5)
    embeds = m.model.embed_tokens(tokens)
    assert torch.equal(m(inputs_embeds=embeds).logits, m(tokens).logits)
    for arguments in ({}, dict(input_ids=tokens, inputs_embeds=embeds)):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            m(**arguments)
    assert torch.equal(generate(m, tokens), torch.cat((tokens, m.generate(inputs_embeds=embeds, max_new_tokens=10)), 1))


@every_model
def test_logits_to_keep(name: str) -> None:
    m, tokens = model(name), ids(2, 7)
    want = m(tokens).logits
    for kept, index in ((0, slice(None)), (1, slice(-1, None)), (3, slice(-3, None)), (torch.tensor([0, 4]), [0, 4])):
        same((m(tokens, logits_to_keep=kept).logits,), (want[:, index],))


@pytest.mark.parametrize("name", [n for n in MODELS if n != "key_bias"])  # whose layers have no weights to record
def test_recorded_outputs(name: str) -> None:
    """The input of every layer and the output of the model; the attention weights of the softmax layers."""
    m, tokens, B, T = model(name, "eager"), ids(2, 7), 2, 7
    out = m(tokens, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 1 + m.config.num_hidden_layers
    assert torch.equal(out.hidden_states[0], m.model.embed_tokens(tokens))
    assert torch.equal(out.hidden_states[-1], m.model(tokens).last_hidden_state)
    assert len(out.attentions) == m.config.layer_types.count("full_attention")
    for weights in out.attentions:
        assert weights.shape == (B, m.config.num_attention_heads, T, T)
        torch.testing.assert_close(weights.sum(-1), torch.ones(B, 4, T, dtype=FP64), rtol=0, atol=1e-6)  # fp32 softmax
        assert torch.equal(weights, weights.tril())
    plain = m(tokens)
    assert plain.hidden_states is None
    assert plain.attentions is None
    assert isinstance(m(tokens, return_dict=False), tuple)


@pytest.mark.parametrize("name", ["hybrid", "grouped"])
@pytest.mark.parametrize("padding", [0, 3])
def test_eager_attention_is_sdpa(name: str, padding: int) -> None:
    """Eager's logits are as right as those of sdpa, and the generated tokens are the same. In fp32: with fp64 inputs
    the softmax, which is in fp32 as everywhere in transformers, is not finite where all is masked."""
    tokens, mask = ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :padding] = 0
    m = build(name, FP32)
    truth = copy.deepcopy(m).double()(tokens, attention_mask=mask).logits[mask == 1].detach()
    errors, generated = [], []
    for attention in ("sdpa", "eager"):
        m.set_attn_implementation(attention)
        errors.append(error(m(tokens, attention_mask=mask).logits[mask == 1].detach(), truth))
        generated.append(generate(m, tokens, attention_mask=mask))
    assert errors[1] <= budget(errors[0], FP32)
    assert torch.equal(*generated)


# ---------------------------------------------------------------- packed documents

DOCUMENTS = (5, 1, 66, 2)


def packing(how: str) -> dict[str, Any]:
    """Arguments that say where documents start, as transformers' collator gives them."""
    documents = [{"input_ids": ids(n, seed=n).tolist()} for n in DOCUMENTS]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(documents)
    batch = {k: v if isinstance(v, Tensor) or not isinstance(v, list) else torch.tensor(v) for k, v in batch.items()}
    tokens, offsets = batch.pop("input_ids"), torch.tensor((0, *itertools.accumulate(DOCUMENTS)))
    assert torch.equal(batch["cu_seq_lens_q"].long(), offsets)
    flash = {k: v for k, v in batch.items() if k.startswith(("cu_seq", "max_length"))}
    arguments = {
        "cu_seqlens": dict(cu_seqlens=offsets.int()),
        "cu_seqlens, int64": dict(cu_seqlens=offsets),
        "position_ids": dict(position_ids=batch["position_ids"]),
        "seq_idx": dict(seq_idx=batch["seq_idx"]),
        "flash": flash,
        "flash, position_ids": flash | dict(position_ids=batch["position_ids"]),
        "all": {k: v for k, v in batch.items() if k != "labels"},
    }
    return dict(input_ids=tokens) | arguments[how]


HOW_PACKED = ("cu_seqlens", "cu_seqlens, int64", "position_ids", "seq_idx", "flash", "flash, position_ids", "all")


@every_model
@every_attention
@pytest.mark.parametrize("how", HOW_PACKED)
def test_packed_documents_are_as_alone(name: str, attention: str, how: str) -> None:
    """Logits, the loss, and its gradient."""
    m, batch = model(name, attention), packing(how)
    tokens = batch["input_ids"]
    labels = tokens.clone()
    labels[0, list(itertools.accumulate((0, *DOCUMENTS[:-1])))] = -100
    alone = [m(part, use_cache=False).logits for part in tokens.split(DOCUMENTS, 1)]
    out = m(**batch, labels=labels)
    limit = FP64_LIMIT
    if attention == "eager" and name in HYBRIDS:  # its softmax is in fp32: as wrong as that makes the documents alone
        exact = [model(name)(part, use_cache=False).logits for part in tokens.split(DOCUMENTS, 1)]
        limit = budget(error(torch.cat(alone, 1).detach(), torch.cat(exact, 1).detach()), FP32)
    same((out.logits,), (torch.cat(alone, 1),), limit)
    assert out.past_key_values is None
    parts = tokens.split(DOCUMENTS, 1)
    total = sum(cross_entropy(a[0, :-1], p[0, 1:], reduction="sum") for a, p in zip(alone, parts, strict=True))
    loss = total / (sum(DOCUMENTS) - len(DOCUMENTS))
    parameters = [m.model.layers[0].mlp.down_proj.weight, m.model.layers[-1].self_attn.k_proj.weight]
    got, want = ((each, *torch.autograd.grad(each, parameters)) for each in (out.loss, loss))
    same(got, want, 1e-5)  # transformers computes losses in fp32


@pytest.mark.parametrize("name", ["kda", "softplus_tied"])
def test_packed_prefill_of_the_model(name: str) -> None:
    """All KDA: the cache of packed documents goes on as a batch of them."""
    m, batch, step = model(name), packing("cu_seqlens"), ids(len(DOCUMENTS), 1, seed=9)
    with torch.no_grad():
        cache = m(**batch, use_cache=True).past_key_values
        got = m(step, past_key_values=cache).logits
        for row, part in enumerate(batch["input_ids"].split(DOCUMENTS, 1)):
            same((got[row],), (m(torch.cat((part, step[row : row + 1]), 1)).logits[0, -1:],))


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("how", HOW_PACKED)
def test_a_hybrid_caches_no_packed_documents(name: str, how: str) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must be None with a cache"):
        model(name)(**packing(how), use_cache=True)
    with pytest.raises(ValueError, match="cu_seqlens must be None with a cache"):
        model(name)(**packing("cu_seqlens"), past_key_values=DynamicCache(config=model(name).config))


# ---------------------------------------------------------------- training


@every_model
def test_loss(name: str) -> None:
    """Cross entropy of the next token over labels that are not -100; Trainer's num_items_in_batch divides instead."""
    m, tokens = model(name), ids(3, 9)
    labels = tokens.clone()
    labels[0, :4] = labels[1, -3:] = -100
    out = m(tokens, labels=labels)
    assert torch.equal(out.logits, m(tokens).logits)
    losses = -log_softmax(out.logits[:, :-1], -1).gather(2, labels[:, 1:, None].clamp(min=0))[..., 0]
    total, n = losses[labels[:, 1:] != -100].sum(), (labels[:, 1:] != -100).sum()
    # transformers computes losses in fp32
    torch.testing.assert_close(out.loss.double(), total / n, rtol=2**-20, atol=0)
    out = m(tokens, labels=labels, num_items_in_batch=torch.tensor(7))
    torch.testing.assert_close(out.loss.double(), total / 7, rtol=2**-20, atol=0)
    assert m(tokens).loss is None


@every_model
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradient_checkpointing(name: str, use_reentrant: bool) -> None:
    """Gradients are equal, layers run twice, and a cache is refused only while training."""
    m, tokens = build(name).train(), ids(2, 9)
    attentions = [layer.self_attn for layer in m.model.layers]

    def gradients() -> tuple[list[Tensor], int]:
        m.zero_grad()
        calls: list[int] = []
        hooks = [a.register_forward_hook(lambda *_: calls.append(1)) for a in attentions]
        m(tokens, labels=tokens).loss.backward()
        for hook in hooks:
            hook.remove()
        return [p.grad.clone() for p in m.parameters()], len(calls)

    want, calls = gradients()
    m.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=use_reentrant))
    got, checkpointed = gradients()
    assert (calls, checkpointed) == (2, 4)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    for arguments in (dict(use_cache=True), dict(past_key_values=DynamicCache(config=m.config))):
        with pytest.raises(ValueError, match="while training with gradient checkpointing"):
            m(tokens, **arguments)
    m.eval()
    assert m(tokens, use_cache=True).past_key_values is not None
    assert torch.equal(generate(m, tokens), generate(model(name), tokens))


@pytest.mark.parametrize("name", ["kda", "hybrid"])
def test_training_is_reproducible(name: str) -> None:
    """Two steps from the same seed give a held-out loss of the same bits; they also learn."""

    def train(seed: int, steps: int = 2) -> float:
        m = build(name, FP32, seed).train()
        optimizer = torch.optim.AdamW(m.parameters(), lr=3e-3)
        for step in range(steps):
            tokens = ids(2, 40, seed=step, high=5)
            m(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            held_out = ids(2, 40, seed=99, high=5)
            return float(m.eval()(held_out, labels=held_out).loss)

    assert train(0) == train(0)
    assert train(0) != train(1)
    assert train(0) < train(0, steps=0)


@every_model
def test_autocast(name: str) -> None:
    """A fp32 model under bf16 autocast is as wrong as the bf16 model, and its gradients arrive in fp32."""
    m, tokens = build(name, FP32), ids(2, 9)
    truth = copy.deepcopy(m).double()(tokens).logits.detach()
    yardstick = error(copy.deepcopy(m).bfloat16()(tokens).logits.detach(), truth)
    with torch.autocast("cpu", BF16):
        out = m(tokens, labels=tokens)
    out.loss.backward()
    assert error(out.logits.detach(), truth) <= budget(yardstick, BF16)
    assert all(p.grad.dtype == FP32 and p.grad.isfinite().all() for p in m.parameters())


# ---------------------------------------------------------------- saving, loading, resizing

FRESH = """
import sys, torch, kda_layers
from transformers import AutoModelForCausalLM
m = AutoModelForCausalLM.from_pretrained(sys.argv[1])
saved = torch.load(sys.argv[1] + "/expected.pt")
assert type(m) is kda_layers.KDAForCausalLM and not m.training
with torch.no_grad():
    assert torch.equal(m(saved["ids"]).logits, saved["logits"])
"""


@every_model
def test_save_and_load(name: str, tmp_path: pathlib.Path) -> None:
    """Every tensor and the config come back bit by bit, also as the base model."""
    m = build(name, FP32)
    m.save_pretrained(tmp_path)
    loaded, info = KDAForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert {n: p.dtype for n, p in loaded.named_parameters()} == {n: p.dtype for n, p in m.named_parameters()}
    for n, p in m.state_dict().items():
        assert torch.equal(loaded.state_dict()[n], p), n
    assert loaded.config.to_diff_dict().items() >= dict(TINY | MODELS[name], model_type="kda_lm").items()
    assert torch.equal(loaded(ids(2, 5)).logits, m(ids(2, 5)).logits)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is KDAForCausalLM
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is KDAModel
    assert torch.equal(base(ids(2, 5)).last_hidden_state, m.model(ids(2, 5)).last_hidden_state)


def test_a_fresh_process_loads_it(tmp_path: pathlib.Path) -> None:
    """`import kda_layers` is all that another process needs."""
    m, tokens = build("hybrid", FP32), ids(2, 9)
    m.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.save({"ids": tokens, "logits": m(tokens).logits}, tmp_path / "expected.pt")
    code = f"import torch; torch.set_num_threads({torch.get_num_threads()})\n" + FRESH
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@every_model
def test_bf16_load_keeps_the_gate_in_fp32(name: str, tmp_path: pathlib.Path) -> None:
    m, tokens = build(name, FP32), ids(2, 9)
    m.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    for n, p in loaded.named_parameters():
        in_fp32 = n.endswith(("A_log", "dt_bias", ".A"))
        assert p.dtype == (FP32 if in_fp32 else BF16), n
        assert not in_fp32 or torch.equal(p, m.state_dict()[n])
    truth = copy.deepcopy(loaded).double()(tokens).logits.detach()
    yardstick = error(copy.deepcopy(loaded).bfloat16()(tokens).logits.detach(), truth)  # the gate rounded as well
    out = loaded(tokens, labels=tokens)
    assert error(out.logits.detach(), truth) <= budget(yardstick, BF16)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in loaded.parameters())
    assert generate(loaded, tokens).shape == (2, 19)


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_offloaded_weights(offload: str, tmp_path: pathlib.Path) -> None:
    """accelerate fetches weights module by module, so that none may be read from outside its module."""
    accelerate = pytest.importorskip("accelerate")
    m, tokens = build("hybrid", FP32), ids(2, 9)
    want, generated = m(tokens).logits, generate(m, tokens)
    folder = (tmp_path,) if offload == "disk_offload" else ()
    getattr(accelerate, offload)(m, *folder, execution_device=torch.device("cpu"))
    assert next(m.parameters()).is_meta
    assert torch.equal(m(tokens).logits, want)
    assert torch.equal(generate(m, tokens), generated)


def test_loaded_gates_keep_the_optimizers_mark(tmp_path: pathlib.Path) -> None:
    build("hybrid", FP32).save_pretrained(tmp_path)
    loaded = KDAForCausalLM.from_pretrained(tmp_path)
    marked = {n.split(".")[-1] for n, p in loaded.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"A_log", "dt_bias"}


@every_model
def test_initialisation(name: str) -> None:
    """Linear and embedding weights of the configured spread, norms at one, the padding row at zero, gates as the
    layer's own, biases that are equal; building it again from the config, also through the meta device, is the same
    model."""
    torch.manual_seed(1)
    m = KDAForCausalLM(KDAConfig(**(TINY | MODELS[name])))
    for n, p in m.named_parameters():
        if n.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight")) and p.numel() > 500:
            assert abs(p.std() / 0.4 - 1) < 5 / math.sqrt(2 * p.numel()) + 0.02, n  # 5 sigma, and the zero row
        elif "norm" in n:
            assert (p == 1).all(), n
        elif n.endswith(".A"):
            assert (p == 0).all(), n
    assert (m.model.embed_tokens.weight[0] == 0).all()
    for layer in m.modules():
        if isinstance(layer, KimiDeltaAttention):
            dt = torch.nn.functional.softplus(layer.dt_bias)
            assert 0.99e-3 < dt.min() < dt.max() < 1.01e-1
            rate = layer.A_log.exp()
            assert (rate == 1).all() if name != "softplus_tied" else 1 <= rate.min() < rate.max() <= 16
    torch.manual_seed(1)
    again = AutoModelForCausalLM.from_config(m.config)
    assert type(again) is KDAForCausalLM
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), m.parameters(), strict=True))


def test_missing_gates_are_initialised(tmp_path: pathlib.Path) -> None:
    """A checkpoint without them leaves no uninitialised memory behind."""
    m = build("softplus_tied", FP32)
    m.save_pretrained(tmp_path, state_dict={n: p for n, p in m.state_dict().items() if "self_attn" not in n})
    loaded = KDAForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.embed_tokens.weight, m.model.embed_tokens.weight)
    for layer in loaded.model.layers:
        assert 0 <= layer.self_attn.A_log.min() < layer.self_attn.A_log.max() <= math.log(16)
        assert -7 < layer.self_attn.dt_bias.min() < layer.self_attn.dt_bias.max() < -2
        assert abs(layer.self_attn.q_proj.weight.std() / 0.4 - 1) < 0.2
        assert (layer.self_attn.o_norm.weight == 1).all()
        assert layer.self_attn.conv1d.weight.isfinite().all()


def test_tied_embeddings(tmp_path: pathlib.Path) -> None:
    """They share storage: built, loaded, resized; the untied ones do not."""
    m = build("softplus_tied", FP32)
    m.save_pretrained(tmp_path)
    for each in (m, KDAForCausalLM.from_pretrained(tmp_path)):
        assert each.lm_head.weight is each.model.embed_tokens.weight
        each.resize_token_embeddings(31)
        assert each.lm_head.weight is each.model.embed_tokens.weight
        assert each(ids(1, 3)).logits.shape[-1] == 31
    assert build("kda").lm_head.weight is not build("kda").model.embed_tokens.weight


@every_model
@pytest.mark.parametrize("size", [20, 37])
def test_resized_embeddings(name: str, size: int) -> None:
    """Kept tokens keep their logits; the loss and generation go on with the new vocabulary."""
    m, tokens = build(name, FP32), ids(2, 6, high=20)
    want, kept = m(tokens).logits, min(size, 29)
    m.resize_token_embeddings(size)
    assert m.config.vocab_size == m.get_input_embeddings().num_embeddings == m.get_output_embeddings().out_features
    got = m(tokens, labels=tokens)
    assert got.logits.shape == (2, 6, size)
    assert got.loss.isfinite()
    torch.testing.assert_close(got.logits[..., :kept], want[..., :kept])
    assert generate(m, tokens).max() < size


# ---------------------------------------------------------------- the config

BAD_FIELDS = [
    (dict(layer_types=["linear_attention", "sliding_attention"]), "layer_types must hold 2 of"),
    (dict(layer_types=["linear_attention"]), r"layer_types must hold 2 of .*got \['linear_attention'\]"),
    (dict(linear_num_value_heads=3), "linear_num_value_heads must be a multiple of linear_num_heads = 2, got 3"),
    (dict(num_key_value_heads=3), "num_attention_heads must be a multiple of num_key_value_heads = 3, got 4"),
    (dict(full_attention_interval=-1), "full_attention_interval must be 0 or more, got -1"),
    (dict(hidden_size=0), "hidden_size must be at least 1, got 0"),
    (dict(hidden_size=3), "head_dim must be at least 1, got 0"),
    (dict(linear_conv_kernel_dim=0), "linear_conv_kernel_dim must be at least 1, got 0"),
    (dict(linear_gate_activation="tanh"), "linear_gate_activation .*tanh"),
    (dict(linear_gate_activation="softplus"), "linear_lower_bound must be None with .*softplus"),
    (dict(linear_lower_bound=None), "linear_lower_bound must be given"),
    (dict(linear_lower_bound=-6.0), r"linear_lower_bound must be in \[-5, 0\), got -6"),
    (dict(attention_bias="value"), "attention_bias must be 'none' or 'key', got 'value'"),
    (dict(attention_bias="key"), "attention_bias must be 'none' without a layer of 'full_attention', got 'key'"),
    (
        dict(attention_bias="key", full_attention_interval=2, attention_dropout=0.1),
        "attention_dropout must be 0 with attention_bias = 'key', .* got 0.1",
    ),
]
WRONG_TYPES = [
    dict(vocab_size=2.5), dict(hidden_size="32"), dict(use_cache="no"), dict(linear_gate_activation=3),
    dict(num_attention_heads=True), dict(linear_allow_neg_eigval="yes"), dict(linear_head_dim=None),
    dict(full_attention_interval=2.0), dict(layer_types="linear_attention"), dict(rms_norm_eps="small"),
    dict(attention_bias=True),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS, ids=[str(f) for f, _ in BAD_FIELDS])
def test_refused_configs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        KDAConfig(**(TINY | fields))


@pytest.mark.parametrize("fields", WRONG_TYPES, ids=str)
def test_wrong_types_in_a_config(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises((TypeError, StrictDataclassError), match=name):
        KDAConfig(**(TINY | fields))


def test_config_defaults() -> None:
    config = KDAConfig(num_hidden_layers=8, full_attention_interval=4, hidden_size=100, num_attention_heads=5)
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert (config.intermediate_size, config.head_dim, config.num_key_value_heads) == (320, 20, 5)
    assert (config.linear_num_value_heads, config.linear_value_head_dim) == (8, 128)
    assert set(KDAConfig().layer_types) == {"linear_attention"}


@every_model
def test_config_round_trip(name: str, tmp_path: pathlib.Path) -> None:
    config = KDAConfig(**(TINY | MODELS[name]), note="kept")
    config.save_pretrained(tmp_path)
    on_disk = json.loads((tmp_path / "config.json").read_text())
    assert on_disk["model_type"] == "kda_lm"
    for loaded in (KDAConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is KDAConfig
        assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()
        assert loaded.note == "kept"
    assert (
        json.loads(KDAConfig(**on_disk).to_json_string()).items()
        >= {k: v for k, v in on_disk.items() if k not in ("transformers_version", "architectures")}.items()
    )


def parameter_count(c: dict[str, Any]) -> int:
    """From the fields of a config file: every matrix and vector of the architecture, counted by hand."""
    D, H, K, n = c["hidden_size"], c["linear_num_heads"], c["linear_head_dim"], c["num_hidden_layers"]
    HV, V = c.get("linear_num_value_heads", H), c.get("linear_value_head_dim", K)
    heads = c["num_attention_heads"]
    d = c.get("head_dim", D // heads)
    inner = c.get("intermediate_size", math.ceil(8 * D / 3 / 64) * 64)
    qkv = 2 * H * K + HV * V
    kda = D * qkv + qkv * c.get("linear_conv_kernel_dim", 4) + HV * V * D  # projections in, convolution, out
    kda += D * V + V * HV * K + HV + HV * K  # decay: two low-rank factors, A_log, dt_bias
    kda += D * HV + D * V + V * HV * V + V  # beta, output gate of low rank, its norm
    softmax = 2 * D * heads * d + 2 * D * c.get("num_key_value_heads", heads) * d
    interval = c.get("full_attention_interval", 0)
    full = n // interval if interval else 0
    shared = n * (3 * D * inner + 2 * D) + D
    embeddings = c["vocab_size"] * D * (1 if c["tie_word_embeddings"] else 2)
    return (n - full) * kda + full * softmax + shared + embeddings


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_parameter_counts(path: pathlib.Path) -> None:
    with torch.device("meta"):
        m = KDAForCausalLM(KDAConfig.from_json_file(path))
    count = sum(p.numel() for p in m.parameters())
    assert count == parameter_count(json.loads(path.read_text()))
    named = {"120m": 120e6, "1.3b": 1.3e9}.get(path.stem)
    assert named is None or abs(count / named - 1) < 0.1


def test_every_config_file_is_counted() -> None:
    assert {p.stem for p in CONFIGS} >= {"tiny", "reference", "120m", "1.3b"}


# ---------------------------------------------------------------- compiled


@pytest.fixture
def counter() -> Iterator[CompileCounterWithBackend]:
    """Counts the compiled graphs. Floats are constants from the start: by default dynamo traces them (nn.RMSNorm's
    epsilon) as variables first, gives up and traces again."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True):
        yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


@pytest.mark.parametrize("case", ["padded", "packed"])
def test_compiled_layer(case: str, counter: CompileCounterWithBackend) -> None:
    """Forward and backward in one graph for every length, equal to the uncompiled layer."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(16, 2, 6, num_v_heads=4, head_v_dim=8).double()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for T in (70, 33, 129):
        x = torch.randn(1 if case == "packed" else 3, T, 16, dtype=FP64, requires_grad=True)
        arguments: dict[str, Tensor] = {}
        if case == "padded":
            arguments["attention_mask"] = (torch.arange(T) >= torch.tensor([[0], [2], [T - 1]])).long()
        if case == "packed":
            arguments["cu_seqlens"] = torch.tensor([0, 3, 3, T])
        inputs = (x, *layer.parameters())
        got, want = compiled(x, **arguments), layer(x, **arguments)
        same((got,), (want,))
        weight = torch.randn_like(want)
        same(*(torch.autograd.grad((o * weight).sum(), inputs) for o in (got, want)))
    assert counter.frame_count == 1


COMPILED = [("kda", "plain"), *((name, case) for name in ("hybrid", "key_bias") for case in ("padded", "packed"))]


@pytest.mark.parametrize(("name", "case"), COMPILED)
def test_compiled_model(name: str, case: str, counter: CompileCounterWithBackend) -> None:
    m = model(name)
    compiled = torch.compile(m, backend=counter, fullgraph=True, dynamic=True)
    parameters = list(m.parameters())
    for T in (70, 33, 129):
        tokens = ids(1 if case == "packed" else 3, T)
        arguments: dict[str, Any] = dict(labels=tokens, use_cache=False)
        if case == "padded":
            arguments["attention_mask"] = (torch.arange(T) >= torch.tensor([[0], [2], [T - 1]])).long()
        if case == "packed":
            arguments["cu_seqlens"] = torch.tensor([0, 3, 3, T])
        got, want = compiled(tokens, **arguments), m(tokens, **arguments)
        real = arguments.get("attention_mask", torch.ones_like(tokens)) == 1
        same((got.logits[real],), (want.logits[real],))
        if case != "padded":  # padding's labels count here
            same(*(torch.autograd.grad(out.loss, parameters) for out in (got, want)), limit=1e-6)  # a loss in fp32
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["kda", "hybrid", "key_bias"])
def test_compiled_generation(name: str, counter: CompileCounterWithBackend) -> None:
    """With a static cache transformers compiles the decoding step once: neither tokens nor later calls do so anew."""
    m = build(name)
    options = CompileConfig(fullgraph=True, dynamic=None, mode=None)
    options.backend = lambda graph, inputs: counter(graph, inputs)  # generate copies its options, but not functions
    options._compile_all_devices = True  # otherwise only accelerators compile
    graphs = []
    for seed, new in ((1, 8), (2, 5)):
        tokens, mask = ids(2, 9, seed=seed), torch.ones(2, 9, dtype=torch.long)
        mask[0, :3] = 0
        call = dict(attention_mask=mask, max_new_tokens=new)
        got = generate(m, tokens, cache_implementation="static", compile_config=options, **call)
        assert torch.equal(got, generate(m, tokens, **call))
        graphs.append(counter.frame_count)
    assert graphs == [1, 1]
