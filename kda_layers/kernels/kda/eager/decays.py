"""Decays within a chunk by binary anchoring, and numbers that are flushed to zero."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..contract import CHUNK


def flush_decay(x: Tensor) -> None:
    """Zero decay products below sqrt(the smallest normal number), 1e-19 in fp32, far below its rounding.

    A CPU takes some hundred cycles for a denormal number; products of two factors that are kept cannot be denormal.
    """
    torch.threshold_(x, math.sqrt(torch.finfo(x.dtype).tiny), 0.0)


def flush(x: Tensor) -> None:
    """Zero the elements of x that are close to denormal."""
    torch.hardshrink(x, 2.0**24 * torch.finfo(x.dtype).tiny, out=x)


def halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """First and second halves [rows, 64 / 2h, h, D] of the aligned blocks of 2h tokens of x [rows, 64, D]."""
    x = x.view(x.shape[0], CHUNK // (2 * h), 2, h, x.shape[2])
    return x[:, :, 0], x[:, :, 1]


def levels(token_decay: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(h, p, s) for h = 1, 2, ... 64: p decays from the start of the token's block of h tokens to the token, s from
    the token to the block's end. Both are updated in place between two yields."""
    p, s = token_decay.clone(), torch.ones_like(token_decay)
    h = 1
    while h < CHUNK:
        yield h, p, s
        (p_first, p_second), (s_first, _) = halves(p, h), halves(s, h)
        first, second = p_first[:, :, -1:].clone(), p_second[:, :, -1:].clone()
        p_second.mul_(first)
        s_first.mul_(second)
        flush_decay(p)
        flush_decay(s)
        h *= 2
    yield h, p, s
