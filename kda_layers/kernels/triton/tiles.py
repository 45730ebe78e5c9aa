"""Where a tile of whole rows lies."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(tile, rows, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(rows, columns, mask) of a tile of ROWS rows of D elements, at most BLOCK."""
    row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    return row, column, (row < rows) & (column < D)
