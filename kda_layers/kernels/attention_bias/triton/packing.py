"""Which tiles packed sequences have, without reading their lengths on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def tile_table(cu_seqlens: Tensor, T: int, block: int) -> Tensor:
    """[tiles, 3] int32: each tile's first row, its sequence's first row and end; surplus tiles have no rows.

    As many as N sequences of T tokens in all can have at most. Offsets beyond T are cut, so that nothing is read there.
    """
    offsets = cu_seqlens.clamp(0, T).int()
    N = offsets.shape[0] - 1
    before = torch.nn.functional.pad(((offsets.diff() + block - 1) // block).cumsum(0, dtype=torch.int32), (1, 0))
    tile = torch.arange((T + (block - 1) * N) // block, device=offsets.device, dtype=torch.int32)
    sequence = torch.searchsorted(before, tile, right=True) - 1
    sequence = sequence.clamp(max=N - 1)
    begin, end = offsets[sequence], offsets[sequence + 1]
    return torch.stack((begin + (tile - before[sequence]) * block, begin, end), 1).contiguous()


def sequence_numbers(cu_seqlens: Tensor, T: int) -> Tensor:
    """[T] int32: which sequence each token belongs to."""
    tokens = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, tokens, right=True).int()
