"""A byte-level BPE: training, and tokens of long texts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from common.cli import InputError

BPE_CHARACTERS = 30_000_000  # of the text that a BPE is trained on
PIECE = 50_000  # characters tokenized at once, roughly; pieces end with a line, and BPE never joins across their ends


def train_bpe(text: str, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE, which can encode any text, on the first `BPE_CHARACTERS` of this one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(pieces(text[:BPE_CHARACTERS]), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise InputError(
            f"--vocab-size {vocab_size}: expected more text, or at most {tokenizer.get_vocab_size()}, "
            f"which is all that {len(text):,} characters give"
        )
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> Tensor:
    """Return the tokens of `text` [N], int32."""
    ids: list[Tensor] = [torch.empty(0, dtype=torch.int32)]
    batch = list(pieces(text))
    for i in range(0, len(batch), 256):  # the library's results are large: not all at once
        results = tokenizer.encode_batch_fast(batch[i : i + 256], add_special_tokens=False)
        ids += [torch.tensor(result.ids, dtype=torch.int32) for result in results]
    return torch.cat(ids)


def pieces(text: str) -> Iterator[str]:
    """Cut `text` after the first line end beyond each `PIECE` characters."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end
