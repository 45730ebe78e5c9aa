"""Forward and backward of y = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate), computed in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton.tiles import place


@triton.jit
def gated_norm_forward_kernel(X, Gate, Weight, Y, eps, rows, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """All but Weight [D] are [rows, D] and contiguous."""
    row, column, inside = place(tl.program_id(0), rows, D, ROWS, BLOCK)
    at = row * D + column
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(Gate + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(Weight + column, mask=column < D, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
    tl.store(Y + at, (x * rstd * weight / (1 + tl.exp(-gate))).to(Y.dtype.element_ty), mask=inside)


@triton.jit
def gated_norm_backward_kernel(
    X, Gate, DY, Weight, DX, DGate, eps, Partial, rows, D, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """As above; Partial [programs, D] gets each program's gradient of Weight."""
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
        wd = weight * d_normed
        rstd = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
        projection = tl.sum(wd * x, 1, keep_dims=True) / D * rstd
        rstd = tl.where(row < rows, rstd, 0.0)  # infinite there if eps is 0
        normalised = x * rstd
        tl.store(DX + at, ((wd - normalised * projection) * rstd).to(DX.dtype.element_ty), mask=inside)
        d_gate = wd * normalised * (1 - s)
        tl.store(DGate + at, d_gate.to(DGate.dtype.element_ty), mask=inside)
        d_weight += d_normed * normalised
    column = tl.arange(0, BLOCK)
    tl.store(Partial + program * D + column, tl.sum(d_weight, 0), mask=column < D)
