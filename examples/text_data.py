"""Byte-level text for the examples: where it comes from, how it is cut into batches, and a trigram model of it."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor

BYTES = 256


class InputError(ValueError):
    """Something the user gave cannot be used; the message is the whole explanation."""


class Text(NamedTuple):
    """Bytes as integers, and what tells this text from another."""

    train: Tensor  # the first nine tenths
    heldout: Tensor  # the rest
    sha256: str


def load_text(path: str | None, length: int) -> Text:
    """The text in a file, or without one Python's own reference documentation, to be cut into excerpts of `length`.

    Raises:
        InputError: the file cannot be read, or holds less than ten excerpts.
    """
    if path is None:
        data = python_reference()
    else:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise InputError(f"--data {path}: expected a readable file, got: {error.strerror}") from error
    if len(data) < 10 * length:
        raise InputError(
            f"--data {path or '(default)'}: expected at least {10 * length:,} bytes, ten of --seq-len {length}, "
            f"got {len(data):,} bytes"
        )
    ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    cut = len(ids) * 9 // 10
    return Text(ids[:cut], ids[cut:], hashlib.sha256(data).hexdigest())


def python_reference() -> bytes:
    """Python's reference documentation as `help()` shows it: 0.37 MB of English.

    Many of its sections are printed under several topics. Each paragraph is kept once: the end of the text is held
    out, and a score on paragraphs that were also trained on would measure memory.
    """
    paragraphs = "\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def training_batch(train: Tensor, batch_size: int, length: int, seed: int, step: int) -> Tensor:
    """[batch_size, length] random excerpts: a pure function of its arguments, so that resuming needs no position."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(train) - length + 1, (batch_size, 1), generator=generator)
    return train[starts + torch.arange(length)]


def heldout_windows(train: Tensor, heldout: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(inputs, labels), both [windows, length]: windows that overlap by half and are scored on their second half.

    So each held-out byte is scored once, given at least half a window of text before it (at first the end of the
    training text). Labels are -100 where nothing is scored.
    """
    half = length // 2
    text = torch.cat([train[-half:], heldout])
    text = torch.nn.functional.pad(text, (0, -len(text) % half), value=-100)
    inputs = text.unfold(0, 2 * half, half)
    labels = inputs.clone()
    labels[:, :half] = -100
    return inputs.clamp(min=0), labels


class Trigram:
    """Interpolated byte trigrams: p(x | ab) mixes how often x followed ab, followed b, and occurred at all.

    A context seen `total` times with `distinct` different next bytes trusts its own counts by
    total / (total + strength * distinct), and the shorter context with the rest; strength 1 is Witten and Bell's
    method C. The strengths of the last two orders are those that predict the last tenth of the training text best
    from its first nine tenths; then all of the training text is counted. Held-out text plays no part.
    """

    ORDERS = (1, 2, 3)

    def __init__(self, train: Tensor) -> None:
        fit, validation = train.tensor_split([len(train) * 9 // 10])
        self._count(fit)
        candidates = [(1.0, bi, tri) for bi, tri in itertools.product((0.5, 1.0, 1.5, 2.0, 3.0, 4.0), repeat=2)]
        self.strengths = min(candidates, key=lambda s: self.bits_per_byte(fit, validation, s))
        self._count(train)

    def _count(self, text: Tensor) -> None:
        """For each order n: how often each of the 256 bytes followed each of the 256 ** (n - 1) contexts."""
        self.counts = []
        for n in self.ORDERS:
            keys = _base256(text.unfold(0, n, 1))
            self.counts.append(torch.bincount(keys, minlength=BYTES**n).view(-1, BYTES))
        self.totals = [c.sum(1) for c in self.counts]
        self.distinct = [(c > 0).sum(1) for c in self.counts]

    def probabilities(self, windows: Tensor, strengths: tuple[float, ...] | None = None) -> Tensor:
        """[M]: of the last byte of each of the windows [M, 3], given the two before it."""
        p = torch.full((len(windows),), 1 / BYTES, dtype=torch.float64)
        tables = zip(self.ORDERS, self.counts, self.totals, self.distinct, strengths or self.strengths, strict=True)
        for n, counts, totals, distinct, strength in tables:
            context = _base256(windows[:, 3 - n : 2])
            total, backoff = totals[context], strength * distinct[context]
            mixed = (counts[context, windows[:, 2]] + backoff * p) / (total + backoff)
            p = torch.where(total > 0, mixed, p)
        return p

    def bits_per_byte(self, before: Tensor, text: Tensor, strengths: tuple[float, ...] | None = None) -> float:
        """Cross-entropy of `text`, which follows `before`."""
        windows = torch.cat([before[-2:], text]).unfold(0, 3, 1)
        return -self.probabilities(windows, strengths).log2().mean().item()


def _base256(digits: Tensor) -> Tensor:
    """[M] from [M, n]: each row read as a number; 0 for n = 0."""
    value = torch.zeros(len(digits), dtype=torch.long)
    for column in digits.unbind(1):
        value = value * BYTES + column
    return value
