"""Launches of Triton kernels over tiles of whole rows, and the sums over rows, in a fixed order, of their backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..triton_package import on_device_of

TILE = 2048  # elements of a tile: one row, or several narrow ones
MOST_WARPS = 16
# A kernel that sums over rows has two programs for each SM of an H200, fixed for the order of sums, and so many tiles
# on the way.
SUMMING, STAGES = 264, 3
READ = 3  # tensors of tiles that such a kernel reads
MOST_SHARED = 97 * 1024  # bytes of shared memory for the tiles on the way: what any GPU from sm_80 on has
# Tile of a program of column_sums; its columns are one L2 line. torch.sum launches too few blocks for so few columns:
# 6.4 instead of 2.6 us for [264, 2048] on an H200.
SUM_COLUMNS, SUM_ROWS, SUM_WARPS = 32, 128, 8


class RowTiles:
    """Launches of one operator's kernels on `rows` rows of D elements.

    `per_thread` elements of a tile are a thread's: 8 or more are loaded 16 bytes at a time.
    """

    def __init__(self, rows: int, D: int, per_thread: int):
        self.rows, self.D = rows, D
        self.block = 1 << max(D - 1, 0).bit_length()
        self.rows_per_tile = max(1, TILE // self.block)
        self.warps = min(MOST_WARPS, max(1, self.block * self.rows_per_tile // (32 * per_thread)))
        self.tiles = -(-rows // self.rows_per_tile) if D else 0

    def launch(self, kernel: Any, *args: Any) -> None:
        """Launch `kernel`, whose first argument is a tensor, with a program for each tile."""
        self._launch(self.tiles, kernel, args, {})

    def launch_summing(self, weight: Tensor, kernel: Any, *args: Any) -> Tensor:
        """Launch `kernel` with several tiles for each program; return the gradient of `weight` [D], a sum over rows.

        The kernel's last pointer is [programs, D] in fp32, the programs' sums, which are added in a fixed order.
        """
        programs = min(self.tiles, SUMMING)
        partial = weight.new_empty((programs, self.D), dtype=torch.float32)
        self._launch(programs, kernel, (*args, partial), {"STAGES": self.stages(args[0].element_size())})
        return column_sums(partial, weight)

    def stages(self, itemsize: int) -> int:
        """STAGES, or 1 where the tiles on the way, of elements of `itemsize` bytes, do not fit in shared memory."""
        return STAGES if (STAGES - 1) * READ * self.rows_per_tile * self.block * itemsize <= MOST_SHARED else 1

    def _launch(self, programs: int, kernel: Any, args: tuple[Any, ...], constants: dict[str, int]) -> None:
        if programs:
            constants |= {"ROWS": self.rows_per_tile, "BLOCK": self.block, "num_warps": self.warps}
            with on_device_of(args[0]):
                kernel[(programs,)](*args, self.rows, self.D, **constants)


def column_sums(parts: Tensor, weight: Tensor) -> Tensor:
    """Sum fp32 `parts` over their first dimension, in a fixed order.

    Args:
        parts: [P, D], or [P, W, D]
        weight: [D], or [D, W]

    Returns:
        The sums in the shape and dtype of `weight`.
    """
    from .triton.rows import column_sums_kernel

    total, (D, W) = weight.new_empty(weight.shape), (*weight.shape, 1)[:2]
    if D * W:
        with on_device_of(parts):
            column_sums_kernel[(-(-D * W // SUM_COLUMNS),)](
                parts, total, parts.shape[0], D, W, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=SUM_WARPS
            )
    return total
