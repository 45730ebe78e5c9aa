"""Interpolated byte trigrams: the baseline of the byte-level models."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from common.text import BYTES


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
        """Count, for each order n, how often each of the 256 bytes follows each of the 256 ** (n - 1) contexts."""
        self.counts = []
        for n in self.ORDERS:
            keys = _base256(text.unfold(0, n, 1))
            self.counts.append(torch.bincount(keys, minlength=BYTES**n).view(-1, BYTES))
        self.totals = [c.sum(1) for c in self.counts]
        self.distinct = [(c > 0).sum(1) for c in self.counts]

    def probabilities(self, windows: Tensor, strengths: tuple[float, ...] | None = None) -> Tensor:
        """Return the probability [M] of the last byte of each of the windows [M, 3], given the two bytes before it."""
        p = torch.full((len(windows),), 1 / BYTES, dtype=torch.float64)
        tables = zip(self.ORDERS, self.counts, self.totals, self.distinct, strengths or self.strengths, strict=True)
        for n, counts, totals, distinct, strength in tables:
            context = _base256(windows[:, 3 - n : 2])
            total, backoff = totals[context], strength * distinct[context]
            mixed = (counts[context, windows[:, 2]] + backoff * p) / (total + backoff)
            p = torch.where(total > 0, mixed, p)
        return p

    def bits_per_byte(self, before: Tensor, text: Tensor, strengths: tuple[float, ...] | None = None) -> float:
        """Cross-entropy of `text` [N], which follows `before`, in bits per byte."""
        windows = torch.cat([before[-2:], text]).unfold(0, 3, 1)
        return -self.probabilities(windows, strengths).log2().mean().item()


def _base256(digits: Tensor) -> Tensor:
    """Read each row of [M, n] as a number in base 256: [M]; 0 for n = 0."""
    value = torch.zeros(len(digits), dtype=torch.long)
    for column in digits.unbind(1):
        value = value * BYTES + column
    return value
