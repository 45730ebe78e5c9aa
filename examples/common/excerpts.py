"""A text in a model's own tokens, cut into excerpts for transformers' Trainer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedModel

from common.cli import InputError
from common.text import BYTES, Text


class Excerpts(Dataset):
    """Tokens [N] cut into excerpts of `length`; the rest at the end is dropped."""

    def __init__(self, tokens: Tensor, length: int):
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def load_data(
    text: Text, path: str | None, model: PreTrainedModel, name: str, length: int
) -> tuple[Excerpts, Excerpts]:
    """Return the training and the held-out part of a text in the model's tokens.

    Args:
        path: file of the text, for the error message.
        name: path or name of the model, whose tokenizer is loaded unless the vocabulary is that of bytes.
        length: tokens of an excerpt.
    """
    parts = [text.train, text.heldout]
    if model.config.get_text_config().vocab_size != BYTES:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise InputError(
                f"--model {name}: expected a tokenizer beside it, or a vocabulary of the {BYTES} bytes"
            ) from error
        strings = [bytes(part.tolist()).decode(errors="replace") for part in parts]
        parts = [torch.tensor(tokenizer(s, add_special_tokens=False, verbose=False)["input_ids"]) for s in strings]
    train, heldout = (Excerpts(part, length) for part in parts)
    if not len(train) or not len(heldout):
        raise InputError(f"--data {path or '(default)'}: expected more than ten excerpts of --seq-len {length} tokens")
    return train, heldout
