"""The tiles of packed sequences, found without reading their lengths on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def tile_table(cu_seqlens: Tensor, T: int, block: int) -> Tensor:
    """[tiles, 3] int32: each tile's first row, its sequence's first row and end; surplus tiles have no rows.

    The table has room for the most tiles that N sequences of T tokens in all can have. Offsets are clamped to T, so
    that nothing beyond it is read.
    """
    offsets = cu_seqlens.clamp(0, T).int()
    N = offsets.shape[0] - 1
    before = torch.nn.functional.pad(((offsets.diff() + block - 1) // block).cumsum(0, dtype=torch.int32), (1, 0))
    tile = torch.arange((T + (block - 1) * N) // block, device=offsets.device, dtype=torch.int32)
    sequence = (torch.searchsorted(before, tile, right=True) - 1).clamp(max=N - 1)
    begin, end = offsets[sequence], offsets[sequence + 1]
    return torch.stack((begin + (tile - before[sequence]) * block, begin, end), 1).contiguous()


def sequence_numbers(cu_seqlens: Tensor, T: int) -> Tensor:
    """[T] int32: the number of each token's sequence, from 1 on."""
    tokens = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, tokens, right=True).int()
