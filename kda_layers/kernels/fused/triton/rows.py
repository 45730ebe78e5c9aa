"""Kernels over whole rows, computed in fp32: forward and backward of two norms, and sums of partial gradients.

The norms are sum = residual + x, y = sum / sqrt(mean(sum^2) + eps) * weight, and
y = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate), with SILU times the gate once more.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def norm_forward_kernel(
    Residual, X, Weight, Total, Y, residual_stride, x_stride, eps, ADD: tl.constexpr, rows, D,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Total and Y [rows, D] contiguous; without ADD, X is not read and Total not written."""
    row, column, inside = place(tl.program_id(0), rows, D, ROWS, BLOCK)
    x = tl.load(Residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(X + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = x.to(Total.dtype.element_ty)
        tl.store(Total + row * D + column, total, mask=inside)
        x = total.to(tl.float32)
    weight = tl.load(Weight + column, mask=column < D, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
    tl.store(Y + row * D + column, (x * rstd * weight).to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    Total, DY, DTotal, Weight, DX, total_stride, dy_stride, dtotal_stride, eps, ADD: tl.constexpr,
    Partial, rows, D, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """DX [rows, D] contiguous, to which ADD adds DTotal; Partial [programs, D]: each program's gradient of Weight.

    Recomputes the reciprocal deviations: with the other sum over a row it is free. The next tiles are on the way.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(Weight + column, mask=column < D, other=0.0).to(tl.float32)
    d_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        row, column, inside = place(tile, rows, D, ROWS, BLOCK)
        x = tl.load(Total + row * total_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            d_total = tl.load(DTotal + row * dtotal_stride + column, mask=inside, other=0.0).to(tl.float32)
        wdy = weight * dy
        rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
        projection = tl.sum(wdy * x, 1, keep_dims=True) / D * rstd
        rstd = tl.where(row < rows, rstd, 0.0)  # infinite without a row if eps is 0
        normalised = x * rstd
        dx = (wdy - normalised * projection) * rstd
        if ADD:
            dx += d_total
        tl.store(DX + row * D + column, dx.to(DX.dtype.element_ty), mask=inside)
        d_weight += dy * normalised
    column = tl.arange(0, BLOCK)
    tl.store(Partial + program * D + column, tl.sum(d_weight, 0), mask=column < D)


@triton.jit(do_not_specialize=["heads", "rows"])
def gated_norm_forward_kernel(
    X, Gate, Weight, Y, gate_stride, heads, eps, SILU: tl.constexpr, rows, D, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """X and Y [rows, D] contiguous, perhaps one tensor; so are `heads` rows of Gate, the next ones gate_stride away."""
    row, column, inside = place(tl.program_id(0), rows, D, ROWS, BLOCK)
    at = row * D + column
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    token = tl.cast(row, tl.int32) // heads
    gate_at = tl.cast(token, tl.int64) * gate_stride + (row - token * heads) * D + column
    gate = tl.load(Gate + gate_at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(Weight + column, mask=column < D, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
    y = x * rstd * weight / (1 + tl.exp(-gate))
    if SILU:
        y *= gate
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gated_norm_backward_kernel(
    X, Gate, DY, Weight, DX, DGate, eps, SILU: tl.constexpr, Partial, rows, D, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """As in the forward; Partial [programs, D] gets each program's gradient of Weight."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(Weight + column, mask=column < D, other=0.0).to(tl.float32)
    d_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        row, column, inside = place(tile, rows, D, ROWS, BLOCK)
        at = row * D + column
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(Gate + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        s = 1 / (1 + tl.exp(-gate))
        d_normed = dy * s  # gradient of the norm's output
        if SILU:
            d_normed *= gate
        wd = weight * d_normed
        rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
        projection = tl.sum(wd * x, 1, keep_dims=True) / D * rstd
        rstd = tl.where(row < rows, rstd, 0.0)  # infinite there if eps is 0
        normalised = x * rstd
        tl.store(DX + at, ((wd - normalised * projection) * rstd).to(DX.dtype.element_ty), mask=inside)
        d_gate = weight * dy * normalised * s * (1 + gate * (1 - s)) if SILU else wd * normalised * (1 - s)
        tl.store(DGate + at, d_gate.to(DGate.dtype.element_ty), mask=inside)
        d_weight += d_normed * normalised
    column = tl.arange(0, BLOCK)
    tl.store(Partial + program * D + column, tl.sum(d_weight, 0), mask=column < D)


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


@triton.jit
def place(tile, rows, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(rows, columns, mask) of a tile of ROWS rows of D elements, at most BLOCK."""
    row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    return row, column, (row < rows) & (column < D)
