"""Forward and backward of silu(gate) * up in fp32, rounded once; a program does a part of a row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu_forward_kernel(Gate, Up, Y, gate_stride, up_stride, D, blocks, BLOCK: tl.constexpr):
    """Y [rows, D] contiguous, of Gate and Up, whose rows lie a stride apart."""
    row, column = _place(blocks, BLOCK)
    inside = column < D
    gate = tl.load(Gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(Up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row * D + column, _multiply(gate, up).to(Y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    Gate, Up, DY, DGate, DUp, gate_stride, up_stride, dy_stride, D, blocks, OUTPUT: tl.constexpr, BLOCK: tl.constexpr
):
    """DGate and DUp [rows, D] contiguous. OUTPUT overwrites DY with Y, which gets the bits of the forward."""
    row, column = _place(blocks, BLOCK)
    inside = column < D
    gate = tl.load(Gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(Up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(DY + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-gate))
    d_gate = dy * up * (s * tl.fma(gate, 1 - s, 1.0))
    tl.store(DGate + row * D + column, d_gate.to(DGate.dtype.element_ty), mask=inside)
    tl.store(DUp + row * D + column, (dy * (gate * s)).to(DUp.dtype.element_ty), mask=inside)
    if OUTPUT:
        tl.store(DY + row * dy_stride + column, _multiply(gate, up).to(DY.dtype.element_ty), mask=inside)


@triton.jit
def _multiply(gate, up):
    """silu(gate) * up; one expression, so that all kernels round it alike."""
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def _place(blocks, BLOCK: tl.constexpr):
    """(row, columns) of this program."""
    program = tl.program_id(0)
    return tl.cast(program // blocks, tl.int64), program % blocks * BLOCK + tl.arange(0, BLOCK)
