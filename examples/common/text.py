"""Text of the examples as bytes: sources, training batches and held-out windows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor

from common.cli import InputError

BYTES = 256


class Text(NamedTuple):
    """Bytes as integers [N], and a hash that identifies the text."""

    train: Tensor  # the first nine tenths
    heldout: Tensor  # the rest
    sha256: str


def load_text(path: str | None, length: int) -> Text:
    """Return the text in a file, or Python's own reference documentation if `path` is None.

    Raises:
        InputError: the file cannot be read, or holds less than ten excerpts of `length` bytes.
    """
    data = python_reference() if path is None else read_bytes(path)
    check_length(len(data), "bytes", length, path)
    ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    cut = len(ids) * 9 // 10
    return Text(ids[:cut], ids[cut:], hashlib.sha256(data).hexdigest())


def read_bytes(path: str, most: int = -1) -> bytes:
    """Return the first `most` bytes of a file, or all. Raise an InputError if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise InputError(f"--data {path}: expected a readable file, got: {error.strerror}") from error


def check_length(count: int, unit: str, length: int, path: str | None) -> None:
    """Raise an InputError if `count` bytes or tokens are less than ten excerpts of `length`."""
    if count < 10 * length:
        raise InputError(
            f"--data {path or '(default)'}: expected at least {10 * length:,} {unit}, ten of --seq-len {length}, "
            f"got {count:,} {unit}"
        )


def python_reference() -> bytes:
    """Return Python's reference documentation as `help()` shows it: 0.37 MB of English.

    Many of its sections are printed under several topics. Each paragraph is kept once: the end of the text is held
    out, and a score on paragraphs that are also in the training part would measure memory.
    """
    paragraphs = "\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def training_batch(train: Tensor, batch_size: int, length: int, seed: int, step: int) -> Tensor:
    """Return random excerpts [batch_size, length].

    They depend on the arguments alone, so that a resumed run needs no position in the data.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(train) - length + 1, (batch_size, 1), generator=generator)
    return train[starts + torch.arange(length)]


def heldout_windows(train: Tensor, heldout: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return (inputs, labels), both [windows, length]: windows that overlap by half, scored on their second half.

    Each held-out token is scored once, given at least half a window of text before it; the first ones are given the
    end of the training text. Labels are -100 where nothing is scored.
    """
    half = length // 2
    text = torch.cat([train[-half:], heldout])
    text = torch.nn.functional.pad(text, (0, -len(text) % half), value=-100)
    inputs = text.unfold(0, 2 * half, half)
    labels = inputs.clone()
    labels[:, :half] = -100
    return inputs.clamp(min=0), labels
