"""Rows times a weight matrix, which is read once; sums in fp32.

`row_kernel` has no tensor cores, as reading the weight bounds the time of one row; `tile_kernel` has them for up to 64
rows, to which it adds a residual.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def row_kernel(
    X, W, Norm, Residual, Y, x_stride, residual_stride, eps, rows, N, D,
    OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Y [rows, N] contiguous: OUTPUTS elements of a row for each program.

    Programs of the same outputs are neighbours, so that a weight comes from memory once for all rows. With OVERLAP the
    kernel starts while the one before it ends: it loads its first weights, and then waits for the inputs.
    """
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.cast(tl.program_id(0) % rows, tl.int64)
    output = tl.program_id(0) // rows * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < N
    weights = W + tl.cast(output, tl.int64)[:, None] * D
    column = tl.arange(0, BLOCK)
    w = tl.load(weights + column, mask=inside[:, None] & (column < D), other=0.0)
    if SWIGLU:
        u = tl.load(weights + tl.cast(N, tl.int64) * D + column, mask=inside[:, None] & (column < D), other=0.0)
        up = tl.zeros((OUTPUTS, BLOCK), tl.float32)
    if OVERLAP:
        gdc_wait()
    y = tl.zeros((OUTPUTS, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for step in tl.static_range(STEPS):
        column = step * BLOCK + tl.arange(0, BLOCK)
        if step:
            w = tl.load(weights + column, mask=inside[:, None] & (column < D), other=0.0)
            if SWIGLU:
                u = tl.load(weights + tl.cast(N, tl.int64) * D + column, mask=inside[:, None] & (column < D), other=0.0)
        x = tl.load(X + row * x_stride + column, mask=column < D, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(Norm + column, mask=column < D, other=0.0).to(tl.float32)
        y += w.to(tl.float32) * x
        if SWIGLU:
            up += u.to(tl.float32) * x
    total = tl.sum(y, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / D + eps)
        total *= scale
    if SWIGLU:
        total = total / (1 + tl.exp(-total)) * (tl.sum(up, 1) * scale)
    if RESIDUAL:
        total += tl.load(Residual + row * residual_stride + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row * N + output, total.to(Y.dtype.element_ty), mask=inside)


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
