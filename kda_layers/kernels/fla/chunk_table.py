"""Which chunks packed sequences have, without reading their lengths on the host."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64  # tokens, as its kernels are called


def table_rows(T: int, N: int) -> int:
    """How many chunks N sequences of T tokens in all can have at most."""
    return (T + (CHUNK - 1) * N) // CHUNK


def chunk_table(cu_seqlens: Tensor | None, T: int) -> list[Tensor]:
    """For packed sequences: [(sequence, chunk in it) of every chunk, each sequence's first chunk]; else nothing.

    Surplus rows name a chunk behind the end of the last sequence, of which flash-linear-attention's kernels read and
    write nothing.
    """
    if cu_seqlens is None:
        return []
    first = torch.nn.functional.pad(((cu_seqlens.diff() + CHUNK - 1) // CHUNK).cumsum(0), (1, 0))
    N = first.shape[0] - 1
    rows = torch.arange(table_rows(T, N), device=first.device)
    sequence = (torch.searchsorted(first, rows, right=True) - 1).clamp(max=N - 1)
    table = torch.stack((sequence, rows - first[sequence]), 1)
    return [table.to(cu_seqlens.dtype), first.to(cu_seqlens.dtype)]
