"""Forward and backward of the convolution with SiLU, each one launch for up to three tensors.

A program holds BLOCK_D channels of one tensor and walks over a strip of STRIP tokens. The inputs of the last tokens
stay in registers, so that each row is read once, but for the few around a strip: the kernels are bound by memory.
Rows are read four at a time to have several loads in flight.

With z_t = sum_lag w_lag x_{t - lag}, y = silu(z) and dz = dy silu'(z): dx_t = sum_lag w_lag dz_{t + lag} and
dw_lag = sum_t dz_t x_{t - lag}, lag = 0 .. W - 1. The backward computes z again. All sums are chains of explicit
multiply-adds: a token's result has the same bits wherever a strip or a sequence begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...declarations import arch_of
from ...triton_package import even_rows, on_device_of
from ..rows import column_sums
from .short_conv_rows import (
    ROWS,
    convolved,
    earlier_row,
    follow,
    history,
    load_row,
    load_rows,
    load_taps,
    next_sequence,
    one_of,
    place_of,
    scattered,
    sequence_of,
    store_taps,
    through_silu,
)

if TYPE_CHECKING:
    from ..short_conv import Inputs

TENSORS = 3  # that the kernels take
MOST_CHANNELS = 256  # of a program
WARP_CHANNELS = 128  # of a warp: loads of 8 bytes, for more warps with fewer registers each
FORWARD_STRIPS, BACKWARD_STRIPS = (64, 16, 4), (64, 16)  # tokens of a program; short unless long ones fill a GPU
PROGRAMS = 1024  # fill a GPU
FORWARD_LIMIT = {"maxnreg": 64}  # registers of a thread, an option for NVIDIA's GPUs alone


def forward(x: Inputs) -> list[Tensor]:
    """Return the outputs [B, T, D_i]."""
    call = _Call(x, FORWARD_STRIPS)
    ys = [t.new_empty(t.shape) for t in call.xs]
    call.launch(conv_forward_kernel, (call.xs,), (ys,), options=_forward_options(x.x0.device))
    return ys


def _forward_options(device: torch.device) -> dict[str, int]:
    """Return Triton's options for the forward on a device.

    On an H200, 8,192 tokens of 12,288 channels take 111 us with the limit of registers and 136 us without. Compiled for
    sm_80 with the limit, the kernel spills.
    """
    return FORWARD_LIMIT if arch_of(device) >= 90 and torch.version.hip is None else {}


def backward(x: Inputs, d_ys: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of the tensors and of the weight."""
    call = _Call(x, BACKWARD_STRIPS)
    d_xs = [t.new_empty(t.shape) for t in call.xs]
    partial = x.weight.new_empty((call.B * call.strips, *x.weight.mT.shape), dtype=torch.float32)
    call.launch(conv_backward_kernel, (call.xs, [even_rows(d) for d in d_ys]), (d_xs,), partial)
    return d_xs, column_sums(partial, x.weight)  # no atomics: one order of sums


def packed_state(x: Inputs, new: Tensor, rows: Tensor | None) -> None:
    """Write the states after packed sequences to new [N, D, .], or those of nonempty ones to new[rows], rows [N]."""
    call = _Call(x, FORWARD_STRIPS)
    assert x.cu_seqlens is not None
    programs, any_tensor = (x.cu_seqlens.shape[0] - 1) * call.blocks, call.xs[0]
    if not programs:
        return
    old, at = (any_tensor if t is None else t for t in (x.state, rows))
    with on_device_of(any_tensor):
        conv_state_kernel[(programs,)](
            *_three(call.xs, any_tensor), old, new, x.cu_seqlens, at, *_three([t.stride(1) for t in call.xs], 0),
            *old.stride(), *new.stride(), *call.widths, COLUMNS=new.shape[2], STATE=call.columns,
            ROWS_GIVEN=rows is not None, BLOCK_D=call.block, num_warps=1,
        )  # fmt: skip


class _Call:
    """The arguments that the kernels of one call share."""

    def __init__(self, x: Inputs, strips: Sequence[int]):
        self.xs = [even_rows(t) for t in x.xs]
        self.weight, self.state, self.offsets = x.weight.contiguous(), x.state, x.cu_seqlens
        (self.B, self.T), self.columns = x.x0.shape[:2], 0 if x.state is None else x.state.shape[2]
        widths = [t.shape[2] for t in self.xs]
        self.widths = widths + [0] * (TENSORS - len(widths))
        self.block, self.blocks = _blocks(widths)
        *long, short = strips
        self.strip = next((n for n in long if self.B * -(-self.T // n) * self.blocks >= PROGRAMS), short)
        self.strips = -(-self.T // self.strip)

    def launch(
        self,
        kernel: Any,
        read: tuple[Sequence[Tensor], ...],
        written: tuple[Sequence[Tensor], ...],
        *more: Tensor,
        options: Mapping[str, int] | None = None,
    ) -> None:
        """Launch `kernel` with a program for each batch row, strip and block of channels of a tensor."""
        programs = self.B * self.strips * self.blocks
        if not programs:
            return
        any_tensor = self.xs[0]  # in the place of those that the kernel does not read
        tensors = [t for group in (*read, *written) for t in _three(group, any_tensor)]
        strides = [n for group in read for n in _three([t.stride(1) for t in group], 0)]
        state = any_tensor if self.state is None else self.state
        offsets = any_tensor if self.offsets is None else self.offsets
        N = self.B if self.offsets is None else offsets.shape[0] - 1
        with on_device_of(any_tensor):
            kernel[(programs,)](
                *tensors, self.weight, state, offsets, *more, *strides, *state.stride(), *self.widths, self.T, N,
                self.strips, W=self.weight.shape[1], PACKED=self.offsets is not None, STATE=self.columns,
                STRIP=self.strip, BLOCK_D=self.block, num_warps=max(1, self.block // WARP_CHANNELS), **(options or {}),
            )  # fmt: skip


def _blocks(widths: Sequence[int]) -> tuple[int, int]:
    """Return the channels per block, and the number of blocks of tensors with these widths."""
    block = min(MOST_CHANNELS, max(32, 1 << (max(widths) - 1).bit_length()))
    return block, sum(-(-width // block) for width in widths)


def tokens_of_strips(channels: int) -> list[int]:
    """Return one T of an input [1, T, channels] for each strip length of the forward."""
    *long, _ = FORWARD_STRIPS
    return [1, *(strip * -(-PROGRAMS // _blocks([channels])[1]) for strip in long)]


def _three(group: Sequence[Any], rest: Any) -> list[Any]:
    return [*group, *[rest] * (TENSORS - len(group))]


# Compiled once for any number of tokens. Triton 3.6 fails on one packed token with a state if N is the constant 1.
@triton.jit(do_not_specialize=["T", "N", "strips"])
def conv_forward_kernel(
    X0, X1, X2, Y0, Y1, Y2, Weight, State, Offsets,
    x0_stride, x1_stride, x2_stride, n_stride, d_stride, w_stride,  # of a token; of the state [N, D, STATE]
    D0, D1, D2, T, N, strips,
    W: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr, STRIP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Y_i [B, T, D_i] contiguous, of X_i, whose rows lie a stride apart; Weight [D0 + D1 + D2, W] contiguous."""
    tensor, local, channel, width, strip, b = place_of(D0, D1, D2, strips, BLOCK_D)
    inside = local < width
    X = one_of(tensor, X0, X1, X2) + local
    Y = one_of(tensor, Y0, Y1, Y2) + local
    stride = tl.cast(one_of(tensor, x0_stride, x1_stride, x2_stride), tl.int64)
    X += tl.cast(b, tl.int64) * T * stride
    Y += tl.cast(b, tl.int64) * T * width
    State += channel * d_stride
    w0, w1, w2, w3 = load_taps(Weight, channel, inside, W)

    first = strip * STRIP
    last = tl.minimum(first + STRIP, T)
    n, begin, end = sequence_of(Offsets, first, T, N, b, PACKED)
    t = first
    while t < last:  # for each sequence: a branch in every row would split their loads
        x1, x2, x3 = history(X, stride, State, n_stride, w_stride, t, begin, n, local, width, W, STATE, BLOCK_D)
        stop = tl.minimum(end, last)
        for t0 in range(t, stop, ROWS):
            rows = load_rows(X, stride, t0, stop, local, width)
            for i in tl.static_range(ROWS):
                z = convolved(rows[i], x1, x2, x3, w0, w1, w2, w3, W)
                y = z / (1 + tl.exp(-z))
                some = tl.where(t0 + i < stop, width, 0)
                tl.store(Y + tl.cast(t0 + i, tl.int64) * width, y.to(Y0.dtype.element_ty), mask=local < some)
                x1, x2, x3 = rows[i], x1, x2
        t = stop
        if PACKED:  # noqa: SIM102  (a constant to Triton, and t is not)
            if t < last:
                n, begin, end = next_sequence(Offsets, N, t, n)


@triton.jit(do_not_specialize=["T", "N", "strips"])
def conv_backward_kernel(
    X0, X1, X2, DY0, DY1, DY2, DX0, DX1, DX2, Weight, State, Offsets, Partial,
    x0_stride, x1_stride, x2_stride, dy0_stride, dy1_stride, dy2_stride, n_stride, d_stride, w_stride,
    D0, D1, D2, T, N, strips,
    W: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr, STRIP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """DX_i [B, T, D_i] contiguous; Partial fp32 [B * strips, W, D0 + D1 + D2], each strip's part of Weight's gradient.

    The walk goes W - 1 tokens beyond the strip, whose dz reach back into it. a1, a2 and a3 are the sums so far of dx of
    the last three tokens.
    """
    tensor, local, channel, width, strip, b = place_of(D0, D1, D2, strips, BLOCK_D)
    inside = local < width
    X = one_of(tensor, X0, X1, X2) + local
    DY = one_of(tensor, DY0, DY1, DY2) + local
    DX = one_of(tensor, DX0, DX1, DX2) + local
    stride = tl.cast(one_of(tensor, x0_stride, x1_stride, x2_stride), tl.int64)
    dy_stride = tl.cast(one_of(tensor, dy0_stride, dy1_stride, dy2_stride), tl.int64)
    X += tl.cast(b, tl.int64) * T * stride
    DY += tl.cast(b, tl.int64) * T * dy_stride
    DX += tl.cast(b, tl.int64) * T * width
    State += channel * d_stride
    w0, w1, w2, w3 = load_taps(Weight, channel, inside, W)

    first = strip * STRIP
    last = tl.minimum(first + STRIP, T)
    n, begin, end = sequence_of(Offsets, first, T, N, b, PACKED)
    x1, x2, x3 = history(X, stride, State, n_stride, w_stride, first, begin, n, local, width, W, STATE, BLOCK_D)
    zeros = tl.zeros([BLOCK_D], tl.float32)
    a1, a2, a3, dw0, dw1, dw2, dw3 = zeros, zeros, zeros, zeros, zeros, zeros, zeros
    for t0 in range(first, first + STRIP, ROWS):
        rows = load_rows(X, stride, t0, T, local, width)
        d_rows = load_rows(DY, dy_stride, t0, T, local, width)
        for i in tl.static_range(ROWS):
            t = t0 + i
            x = rows[i]
            n, begin, end, x1, x2, x3 = follow(
                X, stride, State, n_stride, w_stride, Offsets, N, t, n, begin, end, x1, x2, x3, local, width,
                W, PACKED, STATE, BLOCK_D,
            )  # fmt: skip
            dz = through_silu(convolved(x, x1, x2, x3, w0, w1, w2, w3, W), d_rows[i])
            dw0, dw1 = tl.fma(dz, x, dw0), tl.fma(dz, x1, dw1)
            dw2, dw3 = tl.fma(dz, x2, dw2), tl.fma(dz, x3, dw3)
            dx, a1, a2, a3 = scattered(dz, a1, a2, a3, w0, w1, w2, w3, t - begin, W, PACKED)
            at = t - (W - 1)
            some = tl.where(at >= first, tl.where(at < last, width, 0), 0)
            tl.store(DX + tl.cast(at, tl.int64) * width, dx.to(DX0.dtype.element_ty), mask=local < some)
            x1, x2, x3 = x, x1, x2
    for i in tl.static_range(W - 1):
        t = first + STRIP + i
        x = load_row(X, stride, t, T, local, width)
        n, begin, end, x1, x2, x3 = follow(
            X, stride, State, n_stride, w_stride, Offsets, N, t, n, begin, end, x1, x2, x3, local, width,
            W, PACKED, STATE, BLOCK_D,
        )  # fmt: skip
        z = convolved(x, x1, x2, x3, w0, w1, w2, w3, W)
        dz = through_silu(z, load_row(DY, dy_stride, t, T, local, width))
        dx, a1, a2, a3 = scattered(dz, a1, a2, a3, w0, w1, w2, w3, t - begin, W, PACKED)
        at = t - (W - 1)
        some = tl.where(at < last, width, 0)
        tl.store(DX + tl.cast(at, tl.int64) * width, dx.to(DX0.dtype.element_ty), mask=local < some)
        x1, x2, x3 = x, x1, x2
    D = D0 + D1 + D2
    Partial += (tl.cast(b, tl.int64) * strips + strip) * W * D + channel
    store_taps(Partial, D, dw0, dw1, dw2, dw3, inside, W)


@triton.jit
def conv_state_kernel(
    X0, X1, X2, State, New, Offsets, Rows, x0_stride, x1_stride, x2_stride,
    n_stride, d_stride, w_stride, new_n_stride, new_d_stride, new_w_stride,  # of the states [.., D, .]
    D0, D1, D2, COLUMNS: tl.constexpr, STATE: tl.constexpr, ROWS_GIVEN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """New[Rows[n]] (New[n] if not ROWS_GIVEN), the last inputs of sequence n, its State[n] before the first."""
    tensor, local, channel, width, n, _ = place_of(D0, D1, D2, 2147483647, BLOCK_D)
    inside = local < width
    stride = tl.cast(one_of(tensor, x0_stride, x1_stride, x2_stride), tl.int64)
    X = one_of(tensor, X0, X1, X2) + local
    begin, end = tl.load(Offsets + n).to(tl.int32), tl.load(Offsets + n + 1).to(tl.int32)
    row = tl.cast(n, tl.int64)
    if ROWS_GIVEN:
        row = tl.load(Rows + n).to(tl.int64)
    New += row * new_n_stride + channel * new_d_stride
    State += channel * d_stride
    if (end > begin) | (not ROWS_GIVEN):  # most sequences of an engine's step are empty
        for i in tl.static_range(COLUMNS):
            x = earlier_row(X, stride, State, n_stride, w_stride, end - COLUMNS + i, begin, n, local, width, STATE)
            tl.store(New + i * new_w_stride, x.to(New.dtype.element_ty), mask=inside)
