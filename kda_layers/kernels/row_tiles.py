"""Tiles of whole rows for Triton kernels that normalise rows, and the sums over all rows that their backwards need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .triton_package import on_device_of

TILE = 2048  # elements of a tile: one row, or several narrow ones
PER_THREAD = 16  # elements of a thread: loads of 16 bytes, and few enough registers for 16 warps on an SM
MOST_WARPS = 16
SUMMING = 528  # programs of a kernel that sums over rows: four for each SM of an H200. Fixed, for the order of sums


class RowTiles:
    """Launches of one operator's kernels on `rows` rows of D elements."""

    def __init__(self, rows: int, D: int):
        self.rows, self.D = rows, D
        self.block = 1 << max(D - 1, 0).bit_length()
        self.rows_per_tile = max(1, TILE // self.block)
        self.warps = min(MOST_WARPS, max(1, self.block * self.rows_per_tile // (32 * PER_THREAD)))
        self.tiles = -(-rows // self.rows_per_tile) if D else 0

    def launch(self, kernel: Any, *args: Any) -> None:
        """Launch `kernel`, whose first argument is a tensor, with a program for each tile."""
        self._launch(self.tiles, kernel, *args)

    def launch_summing(self, weight: Tensor, kernel: Any, *args: Any) -> Tensor:
        """Launch `kernel` with several tiles for each program; return the gradient of `weight` [D], a sum over rows.

        The kernel's last pointer is [programs, D] in fp32, the programs' sums, which are added in a fixed order.
        """
        programs = min(self.tiles, SUMMING)
        partial = weight.new_empty((programs, self.D), dtype=torch.float32)
        self._launch(programs, kernel, *args, partial)
        return partial.sum(0).to(weight.dtype)

    def _launch(self, programs: int, kernel: Any, *args: Any) -> None:
        if programs:
            with on_device_of(args[0]):
                kernel[(programs,)](
                    *args, self.rows, self.D, ROWS=self.rows_per_tile, BLOCK=self.block, num_warps=self.warps
                )
