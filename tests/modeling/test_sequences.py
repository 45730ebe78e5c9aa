"""Sequences of a call: masks of scores, masks of padding, positions, keywords, in models that share layers."""

from __future__ import annotations

import copy
import pathlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask

from kda_layers import swap_attention
from kda_layers.modeling.inputs.keywords import without_plans
from kda_layers.modeling.models.hybrid import HybridForCausalLM
from tests.kernels.cases import FP64_LIMIT, error
from tests.modeling import models, stock_models, test_on_gpu
from tests.modeling.models import ids

LENGTHS = (5, 1, 17)
T = sum(LENGTHS)
OFFSETS = torch.tensor([0, 5, 6, 23])
FP32_LIMIT = 1e-5
SWAPPED = [name for name in stock_models.FAMILIES if name not in stock_models.MIXING]
every_model = pytest.mark.parametrize("name", ["kda", "hybrid", "key_bias", "llama", "windows", *SWAPPED])
one_of_each = pytest.mark.parametrize("name", ["kda", "hybrid", "llama", "kimi_linear"])
_swapped: dict[str, Any] = {}


def model(name: str) -> Any:
    """A model that tests share and leave as it is."""
    if name in models.OURS:
        return models.model(name)
    if name not in _swapped:
        _swapped[name] = stock_models.build(name, dense=True)
        swap_attention(_swapped[name])
    return _swapped[name]


def limit(name: str) -> float:
    return FP32_LIMIT if name in stock_models.FAMILIES else FP64_LIMIT


def logits(m: Any, tokens: Tensor, **arguments: Any) -> Tensor:
    with torch.no_grad():
        return m(tokens, **(dict(use_cache=False) | arguments)).logits


def alone(m: Any, tokens: Tensor) -> Tensor:
    """Logits of each document in a call of its own."""
    return torch.cat([logits(m, part) for part in tokens.split(LENGTHS, 1)], 1)


def numbers(*lengths: int) -> Tensor:
    """[T]: the number of each token's document, from 1."""
    return torch.repeat_interleave(torch.arange(len(lengths)) + 1, torch.tensor(lengths))


def block_diagonal(of: Tensor) -> Tensor:
    """[1, 1, T, T] bool: each token sees those of its own document up to itself; number 0 is padding."""
    return ((of[:, None] == of) & (of > 0) & torch.ones(len(of), len(of)).tril().bool())[None, None]


def additive(mask: Tensor, hidden: float = torch.finfo(torch.float32).min) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, hidden)


DOCUMENTS = block_diagonal(numbers(*LENGTHS))
SCORES = {
    "bool": DOCUMENTS,
    "least finite number": additive(DOCUMENTS),
    "-inf": additive(DOCUMENTS, -torch.inf),
    "-1e4": additive(DOCUMENTS, -1e4),
    "all heads": DOCUMENTS.expand(1, 4, T, T),
}


# ---------------------------------------------------------------- masks of scores


@every_model
@pytest.mark.parametrize("kind", SCORES)
def test_a_block_diagonal_mask_keeps_documents_apart(name: str, kind: str) -> None:
    m, tokens = model(name), ids(1, T)
    mask = SCORES[kind]
    if mask.is_floating_point():
        mask = mask.to(m.dtype).clamp(min=torch.finfo(m.dtype).min if kind == "least finite number" else -torch.inf)
    if kind == "all heads":
        mask = mask[:, : m.config.get_text_config().num_attention_heads]
    want = alone(m, tokens)
    if name == "windows":  # a mask of scores has no window, neither here nor in stock models
        window = m.config.sliding_window
        m.config.sliding_window = T
    try:
        assert error(logits(m, tokens, attention_mask=mask), want if name != "windows" else alone(m, tokens)) < limit(
            name
        )
    finally:
        if name == "windows":
            m.config.sliding_window = window
    changed = torch.cat((ids(1, 5, seed=9), tokens[:, 5:]), 1)
    rest = [logits(m, t, attention_mask=mask)[:, 5:] for t in (tokens, changed)]
    assert torch.equal(*rest)


@one_of_each
def test_documents_before_padding_in_a_mask_of_scores(name: str) -> None:
    """Padding, which sees nothing or everything, changes no real token."""
    m, tokens, of = model(name), ids(1, T + 4), torch.cat((numbers(*LENGTHS), torch.zeros(4, dtype=torch.long)))
    mask = block_diagonal(of)
    mask[..., T:, 0] = True  # as transformers lets padding see something, so that no row of scores is empty
    assert error(logits(m, tokens, attention_mask=mask)[:, :T], alone(m, tokens[:, :T])) < limit(name)


@one_of_each
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_masks_of_transformers_own_making_pass(name: str, attention: str, padded: bool) -> None:
    m, tokens = model(name), ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    if padded:
        mask[0, :3] = 0
    config = copy.copy(m.config)
    config._attn_implementation = attention
    scores = create_causal_mask(config, torch.empty(2, 9, 0, dtype=m.dtype), mask, None)
    if scores is None:
        scores = torch.ones(9, 9).tril().bool().expand(2, 1, 9, 9)
    assert scores.ndim == 4
    real = mask.bool()
    got, want = (logits(m, tokens, attention_mask=each)[real] for each in (scores, mask))
    assert error(got, want) < limit(name)


@pytest.mark.parametrize("name", ["kda", "hybrid", "kimi_linear"])
def test_a_causal_mask_of_scores_continues_a_cache(name: str) -> None:
    m, tokens = model(name), ids(1, 9)
    cache = DynamicCache(config=m.config)
    causal = torch.ones(9, 9).tril().bool()[None, None]
    first = logits(m, tokens[:, :4], attention_mask=causal[..., :4, :4], past_key_values=cache, use_cache=True)
    second = logits(m, tokens[:, 4:], attention_mask=causal[..., 4:, :], past_key_values=cache, use_cache=True)
    assert error(torch.cat((first, second), 1), logits(m, tokens)) < limit(name)
    with pytest.raises(ValueError, match=r"attention_mask .* must let each token see"):
        logits(m, ids(1, 2), attention_mask=torch.eye(2, 11).bool()[None, None], past_key_values=cache, use_cache=True)


@one_of_each
def test_padding_inside_a_row_of_a_mask_of_scores(name: str) -> None:
    """As transformers makes it from a mask [B, S], and with rows of padding that see everything."""
    m, tokens = model(name), ids(1, 9)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 1]])
    scores = (torch.ones(9, 9).tril().bool() & mask.bool())[None]
    opened = scores.clone()
    opened[:, ~mask[0].bool()] = True
    want = logits(m, tokens, attention_mask=mask)[mask == 1]
    for given in (scores, opened):
        assert error(logits(m, tokens, attention_mask=given[None])[mask == 1], want) < limit(name)


def test_padding_inside_a_packed_document_is_refused() -> None:
    mask = DOCUMENTS & (torch.arange(T) != 15)
    with pytest.raises(ValueError, match=r"attention_mask .* must let each token see"):
        logits(model("hybrid"), ids(1, T), attention_mask=mask)


@pytest.mark.parametrize("name", ["kda", "hybrid", "llama"])
@pytest.mark.parametrize("pieces", [(9,), (4, 5), (1, 8)], ids=str)
def test_a_mask_may_be_as_wide_as_a_static_cache(name: str, pieces: tuple[int, ...]) -> None:
    """Its columns for slots that are still empty are not those of this call's tokens."""
    m, tokens, mask = model(name), ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, 4:6] = 0
    want = logits(m, tokens, attention_mask=mask)[mask == 1]
    wide, cache = torch.nn.functional.pad(mask, (0, 5)), StaticCache(config=m.config, max_cache_len=14)
    parts = tokens.split(pieces, 1)
    got = [logits(m, part, attention_mask=wide, past_key_values=cache, use_cache=True) for part in parts]
    assert error(torch.cat(got, 1)[mask == 1], want) < limit(name)


def test_a_mask_of_the_new_tokens_alone_is_refused() -> None:
    m, cache = model("kda"), DynamicCache(config=model("kda").config)
    logits(m, ids(2, 4), past_key_values=cache, use_cache=True)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    with pytest.raises(
        ValueError, match=r"attention_mask must have a column for each of 4 cached tokens and of these 3"
    ):
        logits(m, ids(2, 3), attention_mask=mask, past_key_values=cache, use_cache=True)


def band(width: int) -> Tensor:
    return DOCUMENTS.new_ones(T, T).tril().triu(1 - width)[None, None]


def with_hole() -> Tensor:
    mask = DOCUMENTS.clone()
    mask[..., 10, 8] = False
    return mask


REFUSED = {
    "window": (band(4), "attention_mask .* must let each token see"),
    "hole": (with_hole(), "attention_mask .* must let each token see"),
    "later tokens": (torch.ones(1, 1, T, T).bool(), "attention_mask .* must let each token see"),
    "numbers": (additive(DOCUMENTS) - torch.arange(T), "attention_mask .* must let each token see"),
    "heads that differ": (
        torch.cat((DOCUMENTS, DOCUMENTS.new_ones(T, T).tril()[None, None]), 1), "attention_mask .* alike in all heads"
    ),
    "integers": (DOCUMENTS.long(), "attention_mask with 4 dimensions must be bool or floating point, got torch.int64"),
    "another length": (DOCUMENTS[..., 1:, 1:], r"attention_mask must have shape \[1 or 1, heads, 23, 23\], got"),
    "three dimensions": (DOCUMENTS[0], r"attention_mask must have shape .*got \[1, 23, 23\]"),
}  # fmt: skip


@one_of_each
@pytest.mark.parametrize("case", REFUSED)
def test_refused_masks_of_scores(name: str, case: str) -> None:
    mask, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        logits(model(name), ids(1, T), attention_mask=mask)


@one_of_each
def test_documents_of_several_rows_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="attention_mask must separate documents only in a single row, got 2 rows"):
        logits(model(name), ids(2, T), attention_mask=DOCUMENTS)


@one_of_each
def test_a_block_mask_of_flex_attention_is_refused(name: str) -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, T, T, device="cpu")
    with pytest.raises(TypeError, match=r"attention_mask must be a tensor or a dict .*, got BlockMask"):
        logits(model(name), ids(1, T), attention_mask=mask)


@pytest.mark.parametrize("name", ["kda", "hybrid", "kimi_linear"])
def test_two_descriptions_must_agree(name: str) -> None:
    m, tokens = model(name), ids(1, T)
    assert error(logits(m, tokens, attention_mask=DOCUMENTS, cu_seqlens=OFFSETS), alone(m, tokens)) < limit(name)
    for mask in (band(T), block_diagonal(numbers(5, 18))):
        with pytest.raises(ValueError, match="attention_mask must separate the sequences of the other arguments"):
            logits(m, tokens, attention_mask=mask, cu_seqlens=OFFSETS)


@pytest.mark.parametrize("name", ["kda", "hybrid"])
def test_generate_refuses_documents_in_a_mask_of_scores(name: str) -> None:
    with pytest.raises(ValueError, match="attention_mask must hold one document in each row to generate"):
        model(name).create_masks_for_generate(model(name).config, torch.empty(1, T, 0), DOCUMENTS, None)


@one_of_each
def test_where_values_cannot_be_read_a_mask_of_scores_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the capture of a CUDA graph; masks that are prepared for each type of layer pass."""
    m, tokens = model(name), ids(1, T)
    causal = torch.ones(T, T).tril().bool()[None, None]
    monkeypatch.setattr("kda_layers.modeling.inputs.sequences.is_tracing", lambda tensor=None: True)
    with pytest.raises(ValueError, match=r"attention_mask must have 2 dimensions .* under torch.compile"):
        logits(m, tokens, attention_mask=causal)
    prepared = dict.fromkeys(m.config.layer_types, causal) | {"linear_attention": None}
    assert error(logits(m, tokens, attention_mask=prepared), logits(m, tokens)) < limit(name)


@pytest.mark.compiles
def test_a_compiled_model_refuses_a_mask_of_scores() -> None:
    torch.compiler.reset()
    compiled = torch.compile(model("hybrid"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="attention_mask must have 2 dimensions"):  # torch's own type around ours
        compiled(ids(1, 9), attention_mask=torch.ones(9, 9).tril().bool()[None, None], use_cache=False)


# ---------------------------------------------------------------- positions


def restarting(first: int = 0) -> Tensor:
    return torch.cat([torch.arange(n) + first for n in LENGTHS])


POSITIONS = {
    "from 0": restarting()[None],
    "from 1": restarting(1)[None],
    "one dimension": restarting(),
    "a step back": torch.cat((torch.arange(5), torch.tensor([3]), torch.arange(2, 19)))[None],
    "repeats": torch.cat((torch.arange(5), torch.tensor([4]), torch.arange(4, 21)))[None],
    "int32": restarting()[None].int(),
}


@every_model
@pytest.mark.parametrize("how", POSITIONS)
def test_positions_that_do_not_go_on_begin_a_sequence(name: str, how: str) -> None:
    m, tokens = model(name), ids(1, T)
    assert error(logits(m, tokens, position_ids=POSITIONS[how]), alone(m, tokens)) < max(limit(name), 1e-6)


@every_model
@pytest.mark.parametrize("positions", [torch.arange(T), torch.arange(T)[None] + 1], ids=["from 0", "from 1"])
def test_positions_of_one_sequence(name: str, positions: Tensor) -> None:
    m, tokens = model(name), ids(2, T)
    assert error(logits(m, tokens, position_ids=positions), logits(m, tokens)) < max(limit(name), 1e-6)


REFUSED_POSITIONS = {
    "a slice of a sequence": (1, torch.arange(64, 64 + T)[None], "a row that starts at 64.*context parallel"),
    "from 2": (1, torch.arange(2, T + 2)[None], "a row that starts at 2.*context parallel"),
    "negative": (1, torch.arange(-1, T - 1)[None], "a row that starts at -1"),
    "a jump": (1, torch.cat((torch.arange(9), torch.arange(10, T + 1)))[None], "a jump forward.*context parallel"),
    "balanced slices": (
        1, torch.cat((torch.arange(11), torch.arange(100, 88 + T + 1)))[None], "a jump forward.*context parallel"
    ),
    "one of two rows": (2, torch.stack((torch.arange(T), torch.arange(T) + 7)), "a row that starts at 7"),
    "rows": (2, restarting().expand(2, T), "position_ids must restart only in a single row .* got 2 rows"),
    "one row for two": (2, restarting()[None], "position_ids must restart only in a single row .* got 2 rows"),
    "shape": (2, torch.arange(T).expand(3, T), r"position_ids must have shape .* or \[2, T\], got \[3, 23\]"),
}  # fmt: skip


@one_of_each
@pytest.mark.parametrize("case", REFUSED_POSITIONS)
def test_refused_positions(name: str, case: str) -> None:
    rows, positions, message = REFUSED_POSITIONS[case]
    with pytest.raises(ValueError, match=message):
        logits(model(name), ids(rows, T), position_ids=positions)


@one_of_each
def test_a_cache_goes_on_at_any_position(name: str) -> None:
    m, tokens = model(name), ids(1, 9)
    cache = DynamicCache(config=m.config)
    logits(m, tokens[:, :5], past_key_values=cache, use_cache=True)
    if isinstance(m, HybridForCausalLM):
        with pytest.raises(ValueError, match=r"position_ids must have shape \[4\] or \[B or 1, 4\], got \[1, 3\]"):
            logits(m, tokens[:, 5:], position_ids=torch.arange(5, 8)[None], past_key_values=cache, use_cache=True)
    got = logits(m, tokens[:, 5:], position_ids=torch.arange(5, 9)[None], past_key_values=cache, use_cache=True)
    assert error(got, logits(m, tokens)[:, 5:]) < limit(name)


@one_of_each
def test_padding_and_positions(name: str) -> None:
    """Positions of a padded row may count padding or not; packed sequences have none."""
    m, tokens, mask = model(name), ids(1, 9), torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0]])
    want = logits(m, tokens, attention_mask=mask)[:, 2:8]
    for positions in (torch.arange(9)[None], (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)):
        got = logits(m, tokens, attention_mask=mask, position_ids=positions)[:, 2:8]
        assert error(got, want) < max(limit(name), 1e-6)
    packed = torch.tensor([[0, 0, 0, 1, 2, 0, 1, 2, 0]])
    with pytest.raises(ValueError, match="position_ids must not restart in a row with padding"):
        logits(m, tokens, attention_mask=mask, position_ids=packed)


HOW_PACKED = {
    "position_ids": dict(position_ids=restarting()[None]),
    "seq_idx": dict(seq_idx=numbers(*LENGTHS)[None].int()),
    "cu_seq_lens_q": dict(cu_seq_lens_q=OFFSETS.int()),
    "cu_seqlens": dict(cu_seqlens=OFFSETS),
}


@every_model
@pytest.mark.parametrize("how", HOW_PACKED)
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_a_mask_of_ones_says_nothing(name: str, how: str, dtype: torch.dtype) -> None:
    m, tokens = model(name), ids(1, T)
    got = logits(m, tokens, attention_mask=torch.ones(1, T, dtype=dtype), **HOW_PACKED[how])
    assert error(got, alone(m, tokens)) < limit(name)


@every_model
@pytest.mark.parametrize("how", HOW_PACKED)
def test_packed_sequences_have_no_padding(name: str, how: str) -> None:
    mask = torch.ones(1, T, dtype=torch.long)
    mask[:, -2:] = 0
    message = "must not restart in a row with padding|attention_mask must be None with packed sequences"
    with pytest.raises(ValueError, match=message):
        logits(model(name), ids(1, T), attention_mask=mask, **HOW_PACKED[how])


@one_of_each
@pytest.mark.parametrize("mask", [numbers(*LENGTHS)[None], torch.full((1, T), -1), torch.full((1, T), 0.5)])
def test_a_padding_mask_holds_zeros_and_ones(name: str, mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"attention_mask must hold 1 for real tokens and 0 for padding, .*seq_idx"):
        logits(model(name), ids(1, T), attention_mask=mask)


@one_of_each
def test_numbers_of_sequences_belong_to_one_row(name: str) -> None:
    with pytest.raises(ValueError, match=r"seq_idx must have shape \[1, 23\], .*got \[2, 23\] for 2 rows"):
        logits(model(name), ids(2, T), seq_idx=numbers(*LENGTHS).expand(2, T))


def test_given_positions_are_encoded_beside_offsets() -> None:
    """Rotary embeddings of a packed hybrid take the caller's positions: here those of every other token."""
    m, tokens = model("llama"), ids(1, T)
    got = logits(m, tokens, cu_seqlens=OFFSETS, position_ids=2 * restarting()[None])
    parts = []
    for part in tokens.split(LENGTHS, 1):
        cache = DynamicCache(config=m.config)  # with one, positions are taken as they are
        parts.append(logits(m, part, position_ids=2 * torch.arange(part.shape[1])[None], past_key_values=cache))
    assert error(got, torch.cat(parts, 1)) < FP64_LIMIT
    assert error(got, alone(m, tokens)) > 1e-3


@pytest.mark.parametrize("name", SWAPPED)
def test_a_swapped_model_takes_no_other_positions_than_its_masks(name: str) -> None:
    m, tokens = model(name), ids(1, T)
    for positions in (restarting()[None], torch.arange(T), restarting(7)[None]):
        got = logits(m, tokens, cu_seq_lens_q=OFFSETS, position_ids=positions)
        assert error(got, alone(m, tokens)) < FP32_LIMIT
    with pytest.raises(ValueError, match="position_ids must go on by 1 within each packed sequence of a swapped model"):
        logits(m, tokens, cu_seq_lens_q=OFFSETS, position_ids=2 * restarting()[None])


def test_positions_of_several_axes() -> None:
    """Images repeat positions, so a restart cannot be told from them and is refused."""
    m = stock_models.build("glm5_next", dense=True)
    swap_attention(m)
    tokens = ids(1, 8)
    image = torch.tensor([[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]])[:, None]
    assert torch.equal(logits(m, tokens, position_ids=image), logits(m, tokens))
    for text in (torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]), torch.tensor([0, 0, 1, 2, 3, 4, 5, 6])):
        with pytest.raises(ValueError, match=r"position_ids \[3, 1, 8\] of several axes must not restart"):
            logits(m, tokens, position_ids=text.expand(3, 1, 8))


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("name", ["kda", "hybrid"])
def test_compiled_positions_are_asserted_not_to_restart(name: str) -> None:
    torch.compiler.reset()
    m = model(name)
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    tokens = ids(1, T)
    with torch.no_grad():
        got = compiled(tokens, position_ids=torch.arange(T)[None], use_cache=False).logits
        assert error(got, logits(m, tokens)) < FP64_LIMIT
        with pytest.raises(RuntimeError, match=r"position_ids must not restart under torch.compile"):
            compiled(tokens, position_ids=restarting()[None], use_cache=False)
        with pytest.raises(RuntimeError, match=r"position_ids must start at 0 or 1 under torch.compile"):
            compiled(tokens, position_ids=torch.arange(64, 64 + T)[None], use_cache=False)


# ---------------------------------------------------------------- keywords


@one_of_each
@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        ("cu_seq_lens", "cu_seq"),
        ("cu_seqlen", "cu_seqlens"),
        ("cu_seq_len_q", "cu_seq_lens_q"),
        ("seq_lens", "cu_seqlens"),
        ("document_ids", "seq_idx"),
        ("position_id", "position_ids"),
        ("attn_mask", "attention_mask"),
        ("attention_masks", "attention_mask"),
        ("past_key_value", "past_key_values"),
        ("kv_cache", "cache"),
        ("input_embeds", "inputs_embeds"),
        ("use_caches", "use_cache"),
        ("shards", "enable_context_parallel"),
    ],
)
def test_misspelt_keywords_are_refused(name: str, keyword: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"{keyword} is not an argument of .*{meant}"):
        logits(model(name), ids(1, T), **{keyword: OFFSETS})


@pytest.mark.parametrize("name", ["kda", "hybrid", "llama"])
def test_a_misspelt_argument_of_the_head(name: str) -> None:
    for keyword, meant in dict(
        num_logits_to_keep="logits_to_keep", labels_="labels", label="labels", label_ids="labels",
        num_items_in_batches="num_items_in_batch", skip_logit="skip_logits", shifted_labels="shift_labels",
    ).items():  # fmt: skip
        with pytest.raises(TypeError, match=rf"{keyword} is not .*ForCausalLM .*did you mean {meant}\?"):
            logits(model(name), ids(1, T), **{keyword: 1})
        model(name).model(ids(1, T), **{keyword: 1})  # none of a base model's, which ignores it as transformers' do
    with pytest.raises(TypeError, match=r"cu_seq_lens is not an argument of .*Model"):
        model(name).model(ids(1, T), cu_seq_lens=OFFSETS)


IGNORED = (
    "tokenizer", "assistant_tokenizer", "length", "special_tokens_mask", "overflow_to_sample_mapping", "offset_mapping",
    "num_truncated_samples", "assistant_masks", "completion_mask", "loss_mask", "advantages", "prompt", "messages",
    "text", "idx", "pixel_values", "image_grid_thw", "encoder_attention_mask", "decoder_input_ids", "frobnicate",
)  # fmt: skip


@one_of_each
@pytest.mark.parametrize("compiled", [False, True])
def test_other_keywords_are_ignored_as_by_stock_models(name: str, compiled: bool) -> None:
    """Keywords that generate leaves in a call, columns of tokenizers and of data sets."""
    m, tokens = model(name), ids(1, 9)
    with torch.no_grad():
        want = m(tokens, use_cache=False).logits
        if not compiled:
            assert torch.equal(m(tokens, use_cache=False, **dict.fromkeys(IGNORED, 1)).logits, want)
        elif name not in SWAPPED:
            torch.compiler.reset()
            call = torch.compile(m, backend="eager", fullgraph=True)
            assert torch.equal(call(tokens, use_cache=False, length=tokens, special_tokens_mask=tokens).logits, want)


@one_of_each
def test_keywords_that_transformers_passes(name: str) -> None:
    m, tokens = model(name), ids(1, 9)
    out = m(
        tokens, labels=tokens, token_type_ids=torch.zeros_like(tokens), output_attentions=False, return_dict=True,
        output_hidden_states=False, num_items_in_batch=torch.tensor(8),
    )  # fmt: skip
    assert error(out.logits.detach(), logits(m, tokens)) < limit(name)


def test_a_loss_function_has_keywords_of_its_own() -> None:
    m = copy.deepcopy(model("kda"))
    m.loss_function = lambda logits, labels, vocab_size, weight_of_z=0.0, **_: weight_of_z * logits.logsumexp(-1).mean()
    assert (
        m(ids(1, 9), labels=ids(1, 9), weight_of_z=2.0).loss == 2 * m(ids(1, 9), labels=ids(1, 9), weight_of_z=1.0).loss
    )
    with pytest.raises(TypeError, match=r"weight_of_y is not an argument .*did you mean weight_of_z\?"):
        m(ids(1, 9), labels=ids(1, 9), weight_of_y=2.0)
    m(ids(1, 9), labels=ids(1, 9), weight_of_z=2.0, tokenizer=object())


@pytest.mark.parametrize("name", SWAPPED)
def test_the_loss_function_of_a_swapped_model_has_keywords_of_its_own(name: str) -> None:
    m = copy.deepcopy(model(name))
    m.loss_function = lambda logits, labels, vocab_size, temperature=1.0, **_: (logits / temperature).mean()
    once, half = (m(ids(1, 9), labels=ids(1, 9), temperature=t).loss for t in (1.0, 2.0))
    assert error(half.detach(), once.detach() / 2) < FP32_LIMIT


@one_of_each
def test_descriptions_that_are_no_tensors(name: str) -> None:
    m, tokens = model(name), ids(1, T)
    for arguments, message in (
        (dict(cu_seq_lens_q=OFFSETS.tolist()), "cu_seq_lens_q must be a torch.Tensor, got list: pass torch.tensor"),
        (dict(cu_seqlens=OFFSETS[None]), r"cu_seqlens must have shape .*: pass cu_seqlens\[0\]"),
        (dict(seq_idx=[0] * T), "seq_idx must be a torch.Tensor, got list"),
        (dict(position_ids=[0] * T), "position_ids must be a torch.Tensor, got list"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            logits(m, tokens, **arguments)


@one_of_each
@pytest.mark.parametrize("argument", ["cu_seqlens", "cu_seq_lens_q"])
def test_offsets_are_reported_under_the_name_they_were_given(argument: str, name: str) -> None:
    m, tokens = model(name), ids(1, T)
    for offsets, message in (
        (OFFSETS + 1, "must start at 0, got 1"),
        (torch.tensor([0, 5, 3, T]), "must not decrease, got 5 then 3"),
        (OFFSETS[:-1], f"must end at T = {T}, got {OFFSETS[-2]}"),
        (OFFSETS[None], rf"must have shape \[N \+ 1\].*: pass {argument}\[0\]"),
        (OFFSETS.float(), "must be int32 or int64, got torch.float32"),
        (OFFSETS.to("meta"), "must be on input_ids's device cpu, got meta"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{argument} {message}"):
            logits(m, tokens, **{argument: offsets})


@one_of_each
def test_offsets_that_contradict_each_other(name: str) -> None:
    m, tokens = model(name), ids(1, T)
    want = logits(m, tokens, cu_seqlens=OFFSETS)
    assert torch.equal(logits(m, tokens, cu_seqlens=OFFSETS, cu_seq_lens_q=OFFSETS.int()), want)
    with pytest.raises(ValueError, match=r"cu_seqlens and cu_seq_lens_q must be the same .*, got \[0, .*\] and \[0, "):
        logits(m, tokens, cu_seqlens=OFFSETS, cu_seq_lens_q=torch.tensor([0, T]))


# ---------------------------------------------------------------- host reads and attention kernels


@pytest.mark.parametrize("name", ["kda", "hybrid", "llama"])
def test_nothing_is_read_where_nothing_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in training nor in decoding: on a GPU each read would wait for all work before it."""
    m, tokens = model(name), ids(1, 9)
    cache = m(tokens, use_cache=True).past_key_values

    def watched(method: Any) -> Any:
        def read(*args: Any) -> Any:
            reader = pathlib.Path(sys._getframe(1).f_code.co_filename)
            assert not {"modeling", "transformers"} & set(reader.parts), f"{reader} reads a value"
            return method(*args)

        return read

    for name in ("__bool__", "item", "tolist", "__int__", "__float__"):
        monkeypatch.setattr(Tensor, name, watched(getattr(Tensor, name)))
    m(tokens, use_cache=False)
    m(tokens[:, :1], past_key_values=cache)


@pytest.mark.gpu
@pytest.mark.parametrize("interval", [0, 2], ids=["kda", "hybrid"])
def test_a_gpu_is_not_waited_for(interval: int) -> None:
    """Training, packed sequences and decoding, under torch's own watch for synchronisation."""
    m = test_on_gpu.build(interval)
    tokens, offsets = ids(1, 256, high=97).cuda(), torch.tensor([0, 100, 256], device="cuda")

    def calls() -> None:
        m(tokens, labels=tokens).loss.backward()
        if interval == 0:  # with softmax layers transformers reads the positions that restart, once
            m(tokens, cu_seqlens=offsets).logits.sum().backward()
        with torch.no_grad():
            cache = m(tokens, use_cache=True).past_key_values
            m(tokens[:, :1], past_key_values=cache)

    calls()  # compiles, tunes and allocates
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_decode_step_uses_no_attention_kernel_with_plans() -> None:
    x, cache = SimpleNamespace(shape=(1, 1, 8), is_cuda=True), DynamicCache()
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with without_plans(x, cache):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() is before
    for other, held in (
        (SimpleNamespace(shape=(1, 64, 8), is_cuda=True), cache),
        (x, None),
        (torch.empty(1, 1, 8), cache),
    ):
        with without_plans(other, held):
            assert torch.backends.cuda.cudnn_sdp_enabled() is before


def test_a_decode_step_leaves_the_users_switches_alone() -> None:
    """Also with several threads: the last one to leave enables cuDNN again."""
    x, cache, switches = SimpleNamespace(shape=(1, 1, 8), is_cuda=True), DynamicCache(), torch.backends.cuda
    with sdpa_kernel(SDPBackend.MATH):
        with without_plans(x, cache):
            assert not switches.flash_sdp_enabled()
            assert switches.math_sdp_enabled()
        assert not switches.cudnn_sdp_enabled()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), without_plans(x, cache):
        assert switches.cudnn_sdp_enabled()  # nothing else is left
    before = switches.cudnn_sdp_enabled()
    first, second = without_plans(x, cache), without_plans(x, cache)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not switches.cudnn_sdp_enabled()
    second.__exit__(None, None, None)
    assert switches.cudnn_sdp_enabled() is before
