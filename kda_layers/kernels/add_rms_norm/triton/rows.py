"""Forward and backward of sum = residual + x, y = sum / sqrt(mean(sum^2) + eps) * weight, computed in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton.tiles import place


@triton.jit
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


@triton.jit
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
