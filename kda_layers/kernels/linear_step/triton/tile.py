"""Up to 64 rows times a weight matrix, and a residual: tensor cores, the weight read once, sums in fp32."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def tile_kernel(
    X, W, Residual, Y, x_stride, residual_stride, rows, N, D,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Y [rows, N] contiguous: OUTPUTS elements of all rows, at most ROWS, for each program."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, output = tl.arange(0, ROWS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real, inside = row < rows, output < N
    weights = W + tl.cast(output, tl.int64)[:, None] * D
    inputs = X + tl.cast(row, tl.int64)[None, :] * x_stride
    y = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(0, D, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        w = tl.load(weights + column[None, :], mask=inside[:, None] & (column[None, :] < D), other=0.0)
        x = tl.load(inputs + column[:, None], mask=real[None, :] & (column[:, None] < D), other=0.0)
        y = tl.dot(w, x, y)
    where = inside[:, None] & real[None, :]
    y += tl.load(Residual + row[None, :] * residual_stride + output[:, None], mask=where, other=0.0).to(tl.float32)
    tl.store(Y + row[None, :] * N + output[:, None], y.to(Y.dtype.element_ty), mask=where)
