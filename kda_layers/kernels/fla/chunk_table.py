"""The chunks of packed sequences, found without reading their lengths on the host."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64  # tokens; the chunk size that flash-linear-attention's kernels are called with


def table_rows(T: int, N: int) -> int:
    """The most chunks that N sequences of T tokens in all can have."""
    return (T + (CHUNK - 1) * N) // CHUNK


def chunk_table(cu_seqlens: Tensor | None, T: int) -> list[Tensor]:
    """Return [(sequence, chunk in it) of every chunk, each sequence's first chunk]; [] without packed sequences.

    Surplus rows name a chunk beyond the end of the last sequence, for which the kernels read and write nothing.
    """
    if cu_seqlens is None:
        return []
    first = torch.nn.functional.pad(((cu_seqlens.diff() + CHUNK - 1) // CHUNK).cumsum(0), (1, 0))
    N = first.shape[0] - 1
    rows = torch.arange(table_rows(T, N), device=first.device)
    sequence = (torch.searchsorted(first, rows, right=True) - 1).clamp(max=N - 1)
    table = torch.stack((sequence, rows - first[sequence]), 1)
    return [table.to(cu_seqlens.dtype), first.to(cu_seqlens.dtype)]
