"""Calls that come with a tokenizer: stop strings, pipelines, token healing, the columns that a tokenizer returns."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

from tests.modeling.models import CACHES, TINY_STOCK, build, every_model, generate, ids

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@functools.cache
def tokenizer() -> Any:
    """One token for each letter: a is token 3."""
    words = {"<pad>": 0, "<unk>": 1, "<s>": 2} | {letter: 3 + i for i, letter in enumerate(LETTERS)}
    tokens = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", unk_token="<unk>", bos_token="<s>")


@every_model
@pytest.mark.parametrize("cache", [{}, CACHES["static"], CACHES["none"]], ids=["dynamic", "static", "none"])
def test_stop_strings(name: str, cache: dict[str, Any]) -> None:
    """generate leaves the tokenizer in the arguments of each step."""
    m, tokens = build(name), ids(1, 9)
    want = generate(m, tokens)
    assert torch.equal(generate(m, tokens, tokenizer=tokenizer(), **cache), want)
    stop = tokenizer().decode(want[0, 12:13])
    first = 9 + want[0, 9:].tolist().index(int(want[0, 12]))
    got = generate(m, tokens, tokenizer=tokenizer(), stop_strings=[stop], **cache)
    assert torch.equal(got, want[:, : first + 1])


@every_model
def test_pipelines_and_token_healing(name: str) -> None:
    m = build(name)
    generator = pipeline("text-generation", model=m, tokenizer=tokenizer(), device="cpu")
    m.generation_config.pad_token_id = 0
    whole = generator("kimi", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    stopped = generator("kimi", max_new_tokens=8, do_sample=False, stop_sequence=whole[6])[0]["generated_text"]
    assert stopped == whole[: whole.index(whole[6], 4) + 1] != whole
    healed = generate(m, tokenizer()("kimi", return_tensors="pt").input_ids, tokenizer=tokenizer(), token_healing=True)
    assert healed.shape[1] > 10


@every_model
def test_columns_of_a_tokenizer(name: str) -> None:
    """All that it can return; a model of transformers ignores what it does not read."""
    batch = tokenizer()(
        ["delta", "rule"], padding=True, return_tensors="pt", return_length=True, return_special_tokens_mask=True,
        return_token_type_ids=True,
    )  # fmt: skip
    assert {"length", "special_tokens_mask", "token_type_ids"} <= set(batch)
    LlamaForCausalLM(LlamaConfig(**TINY_STOCK))(**batch)
    m, mask = build(name), batch["attention_mask"].bool()
    with torch.no_grad():
        got = m(**batch).logits
        want = m(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert torch.equal(got[mask], want[mask])
