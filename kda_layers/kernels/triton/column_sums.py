"""Column sums of a matrix with few rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def column_sums_kernel(Partial, Y, rows, D, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum Partial fp32 [rows, W, D] over its rows, in a fixed order, to Y [D, W]."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < D * W
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, rows, ROWS):
        at = tl.cast(first + row, tl.int64)
        total += tl.load(Partial + at * (D * W) + column[None, :], mask=(at < rows) & inside[None, :], other=0.0)
    tl.store(Y + column % D * W + column // D, tl.sum(total, 0).to(Y.dtype.element_ty), mask=inside)
