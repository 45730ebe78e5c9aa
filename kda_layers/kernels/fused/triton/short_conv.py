"""Forward and backward of the convolution with SiLU, each one launch for up to three tensors.

A program holds BLOCK_D channels of one tensor and walks over a strip of STRIP tokens. The inputs of the last tokens
stay in registers, so that each row is read once, but for the few around a strip: the kernels are bound by memory.
Rows are read four at a time to have several loads in flight.

With z_t = sum_lag w_lag x_{t - lag}, y = silu(z) and dz = dy silu'(z): dx_t = sum_lag w_lag dz_{t + lag} and
dw_lag = sum_t dz_t x_{t - lag}, lag = 0 .. W - 1. The backward computes z again. All sums are chains of explicit
multiply-adds: a token's result has the same bits wherever a strip or a sequence begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...triton_package import even_rows, on_device_of
from ..rows import column_sums

if TYPE_CHECKING:
    from ..short_conv import Inputs

ROWS = tl.constexpr(4)  # rows that are read at a time
TENSORS = 3  # that the kernels take
MOST_CHANNELS = 256  # of a program
FORWARD_CHANNELS, BACKWARD_CHANNELS = 256, 128  # of a warp: loads of 16 bytes; fewer registers for each thread
FORWARD_STRIPS, BACKWARD_STRIPS = (64, 16, 4), (64, 16)  # tokens of a program; short unless long ones fill a GPU
PROGRAMS = 1024  # fill a GPU


def forward(x: Inputs) -> list[Tensor]:
    """Return the outputs [B, T, D_i]."""
    call = _Call(x, FORWARD_STRIPS)
    ys = [t.new_empty(t.shape) for t in call.xs]
    call.launch(conv_forward_kernel, FORWARD_CHANNELS, (call.xs,), (ys,))
    return ys


def backward(x: Inputs, d_ys: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of the tensors and of the weight."""
    call = _Call(x, BACKWARD_STRIPS)
    d_xs = [t.new_empty(t.shape) for t in call.xs]
    partial = x.weight.new_empty((call.B * call.strips, *x.weight.mT.shape), dtype=torch.float32)
    call.launch(conv_backward_kernel, BACKWARD_CHANNELS, (call.xs, [even_rows(d) for d in d_ys]), (d_xs,), partial)
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
            ROWS_GIVEN=rows is not None, BLOCK_D=call.block, num_warps=max(1, call.block // FORWARD_CHANNELS),
        )  # fmt: skip


class _Call:
    """The arguments that the kernels of one call share."""

    def __init__(self, x: Inputs, strips: Sequence[int]):
        self.xs = [even_rows(t) for t in x.xs]
        self.weight, self.state, self.offsets = x.weight.contiguous(), x.state, x.cu_seqlens
        (self.B, self.T), self.columns = x.x0.shape[:2], 0 if x.state is None else x.state.shape[2]
        widths = [t.shape[2] for t in self.xs]
        self.widths = widths + [0] * (TENSORS - len(widths))
        self.block = min(MOST_CHANNELS, max(32, 1 << (max(widths) - 1).bit_length()))
        self.blocks = sum(-(-width // self.block) for width in widths)
        *long, short = strips
        self.strip = next((n for n in long if self.B * -(-self.T // n) * self.blocks >= PROGRAMS), short)
        self.strips = -(-self.T // self.strip)

    def launch(
        self,
        kernel: Any,
        warp_channels: int,
        read: tuple[Sequence[Tensor], ...],
        written: tuple[Sequence[Tensor], ...],
        *more: Tensor,
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
                STRIP=self.strip, BLOCK_D=self.block, num_warps=max(1, self.block // warp_channels),
            )  # fmt: skip


def _three(group: Sequence[Any], rest: Any) -> list[Any]:
    return [*group, *[rest] * (TENSORS - len(group))]


@triton.jit(do_not_specialize=["N"])  # Triton 3.6 fails on one packed token with a state if N is the constant 1
def conv_forward_kernel(
    X0, X1, X2, Y0, Y1, Y2, Weight, State, Offsets,
    x0_stride, x1_stride, x2_stride, n_stride, d_stride, w_stride,  # of a token; of the state [N, D, STATE]
    D0, D1, D2, T, N, strips,
    W: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr, STRIP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Y_i [B, T, D_i] contiguous, of X_i, whose rows lie a stride apart; Weight [D0 + D1 + D2, W] contiguous."""
    tensor, local, channel, width, strip, b = _place(D0, D1, D2, strips, BLOCK_D)
    inside = local < width
    X = _of(tensor, X0, X1, X2) + local
    Y = _of(tensor, Y0, Y1, Y2) + local
    stride = tl.cast(_of(tensor, x0_stride, x1_stride, x2_stride), tl.int64)
    X += tl.cast(b, tl.int64) * T * stride
    Y += tl.cast(b, tl.int64) * T * width
    State += channel * d_stride
    w0, w1, w2, w3 = _taps(Weight, channel, inside, W)

    first = strip * STRIP
    n, begin, end = _sequence(Offsets, first, T, N, b, PACKED)
    x1, x2, x3 = _history(X, stride, State, n_stride, w_stride, first, begin, n, local, width, W, STATE, BLOCK_D)
    for t0 in range(first, tl.minimum(first + STRIP, T), ROWS):
        rows = _rows(X, stride, t0, T, local, width)
        for i in tl.static_range(ROWS):
            t = t0 + i
            x = rows[i]
            n, begin, end, x1, x2, x3 = _follow(
                X, stride, State, n_stride, w_stride, Offsets, N, t, n, begin, end, x1, x2, x3, local, width,
                W, PACKED, STATE, BLOCK_D,
            )  # fmt: skip
            z = _convolved(x, x1, x2, x3, w0, w1, w2, w3, W)
            y = z / (1 + tl.exp(-z))
            some = tl.where(t < T, width, 0)
            tl.store(Y + tl.cast(t, tl.int64) * width, y.to(Y0.dtype.element_ty), mask=local < some)
            x1, x2, x3 = x, x1, x2


@triton.jit
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
    tensor, local, channel, width, strip, b = _place(D0, D1, D2, strips, BLOCK_D)
    inside = local < width
    X = _of(tensor, X0, X1, X2) + local
    DY = _of(tensor, DY0, DY1, DY2) + local
    DX = _of(tensor, DX0, DX1, DX2) + local
    stride = tl.cast(_of(tensor, x0_stride, x1_stride, x2_stride), tl.int64)
    dy_stride = tl.cast(_of(tensor, dy0_stride, dy1_stride, dy2_stride), tl.int64)
    X += tl.cast(b, tl.int64) * T * stride
    DY += tl.cast(b, tl.int64) * T * dy_stride
    DX += tl.cast(b, tl.int64) * T * width
    State += channel * d_stride
    w0, w1, w2, w3 = _taps(Weight, channel, inside, W)

    first = strip * STRIP
    last = tl.minimum(first + STRIP, T)
    n, begin, end = _sequence(Offsets, first, T, N, b, PACKED)
    x1, x2, x3 = _history(X, stride, State, n_stride, w_stride, first, begin, n, local, width, W, STATE, BLOCK_D)
    zeros = tl.zeros([BLOCK_D], tl.float32)
    a1, a2, a3, dw0, dw1, dw2, dw3 = zeros, zeros, zeros, zeros, zeros, zeros, zeros
    for t0 in range(first, first + STRIP, ROWS):
        rows = _rows(X, stride, t0, T, local, width)
        d_rows = _rows(DY, dy_stride, t0, T, local, width)
        for i in tl.static_range(ROWS):
            t = t0 + i
            x = rows[i]
            n, begin, end, x1, x2, x3 = _follow(
                X, stride, State, n_stride, w_stride, Offsets, N, t, n, begin, end, x1, x2, x3, local, width,
                W, PACKED, STATE, BLOCK_D,
            )  # fmt: skip
            dz = _through_silu(_convolved(x, x1, x2, x3, w0, w1, w2, w3, W), d_rows[i])
            dw0, dw1 = tl.fma(dz, x, dw0), tl.fma(dz, x1, dw1)
            dw2, dw3 = tl.fma(dz, x2, dw2), tl.fma(dz, x3, dw3)
            dx, a1, a2, a3 = _scattered(dz, a1, a2, a3, w0, w1, w2, w3, t - begin, W, PACKED)
            at = t - (W - 1)
            some = tl.where(at >= first, tl.where(at < last, width, 0), 0)
            tl.store(DX + tl.cast(at, tl.int64) * width, dx.to(DX0.dtype.element_ty), mask=local < some)
            x1, x2, x3 = x, x1, x2
    for i in tl.static_range(W - 1):
        t = first + STRIP + i
        x = _row(X, stride, t, T, local, width)
        n, begin, end, x1, x2, x3 = _follow(
            X, stride, State, n_stride, w_stride, Offsets, N, t, n, begin, end, x1, x2, x3, local, width,
            W, PACKED, STATE, BLOCK_D,
        )  # fmt: skip
        z = _convolved(x, x1, x2, x3, w0, w1, w2, w3, W)
        dz = _through_silu(z, _row(DY, dy_stride, t, T, local, width))
        dx, a1, a2, a3 = _scattered(dz, a1, a2, a3, w0, w1, w2, w3, t - begin, W, PACKED)
        at = t - (W - 1)
        some = tl.where(at < last, width, 0)
        tl.store(DX + tl.cast(at, tl.int64) * width, dx.to(DX0.dtype.element_ty), mask=local < some)
        x1, x2, x3 = x, x1, x2
    D = D0 + D1 + D2
    Partial += (tl.cast(b, tl.int64) * strips + strip) * W * D + channel
    _store_taps(Partial, D, dw0, dw1, dw2, dw3, inside, W)


@triton.jit
def conv_state_kernel(
    X0, X1, X2, State, New, Offsets, Rows, x0_stride, x1_stride, x2_stride,
    n_stride, d_stride, w_stride, new_n_stride, new_d_stride, new_w_stride,  # of the states [.., D, .]
    D0, D1, D2, COLUMNS: tl.constexpr, STATE: tl.constexpr, ROWS_GIVEN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """New[Rows[n]] (New[n] if not ROWS_GIVEN), the last inputs of sequence n, its State[n] before the first."""
    tensor, local, channel, width, n, _ = _place(D0, D1, D2, 2147483647, BLOCK_D)
    inside = local < width
    stride = tl.cast(_of(tensor, x0_stride, x1_stride, x2_stride), tl.int64)
    X = _of(tensor, X0, X1, X2) + local
    begin, end = tl.load(Offsets + n).to(tl.int32), tl.load(Offsets + n + 1).to(tl.int32)
    row = tl.cast(n, tl.int64)
    if ROWS_GIVEN:
        row = tl.load(Rows + n).to(tl.int64)
    New += row * new_n_stride + channel * new_d_stride
    State += channel * d_stride
    if (end > begin) | (not ROWS_GIVEN):  # most sequences of an engine's step are empty
        for i in tl.static_range(COLUMNS):
            x = _earlier(X, stride, State, n_stride, w_stride, end - COLUMNS + i, begin, n, local, width, STATE)
            tl.store(New + i * new_w_stride, x.to(New.dtype.element_ty), mask=inside)


@triton.jit
def _place(D0, D1, D2, strips, BLOCK_D: tl.constexpr):
    """(tensor, its channels, their place among all channels, its width, strip, batch row) of this program."""
    blocks0, blocks1, blocks2 = tl.cdiv(D0, BLOCK_D), tl.cdiv(D1, BLOCK_D), tl.cdiv(D2, BLOCK_D)
    blocks = blocks0 + blocks1 + blocks2
    program = tl.program_id(0)
    block, strip, b = program % blocks, program // blocks % strips, program // blocks // strips
    tensor = (block >= blocks0).to(tl.int32) + (block >= blocks0 + blocks1).to(tl.int32)
    local = (block - _of(tensor, 0, blocks0, blocks0 + blocks1)) * BLOCK_D + tl.arange(0, BLOCK_D)
    return tensor, local, local + _of(tensor, 0, D0, D0 + D1), _of(tensor, D0, D1, D2), strip, b


@triton.jit
def _of(tensor, a, b, c):
    """a, b or c for the tensor 0, 1 or 2."""
    return tl.where(tensor == 0, a, tl.where(tensor == 1, b, c))


@triton.jit
def _taps(Weight, channel, inside, W: tl.constexpr):
    """The taps of lags 0 to 3 in fp32; those from W on are not used."""
    Weight += channel * W
    w0 = tl.load(Weight + (W - 1), mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(Weight + (W - 2), mask=inside, other=0.0).to(tl.float32)
    w2, w3 = w1, w1
    if W > 2:
        w2 = tl.load(Weight + (W - 3), mask=inside, other=0.0).to(tl.float32)
    if W > 3:
        w3 = tl.load(Weight + (W - 4), mask=inside, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def _store_taps(Partial, D, dw0, dw1, dw2, dw3, inside, W: tl.constexpr):
    """Write the gradients of the taps of lags 0 to W - 1, each D elements before the one of the lag before."""
    tl.store(Partial + (W - 1) * D, dw0, mask=inside)
    tl.store(Partial + (W - 2) * D, dw1, mask=inside)
    if W > 2:
        tl.store(Partial + (W - 3) * D, dw2, mask=inside)
    if W > 3:
        tl.store(Partial + (W - 4) * D, dw3, mask=inside)


@triton.jit
def _row(X, stride, t, T, local, width):
    """Row t in fp32, zeros from T on."""
    return tl.load(X + t * stride, mask=local < tl.where(t < T, width, 0), other=0.0).to(tl.float32)


@triton.jit
def _rows(X, stride, t, T, local, width):
    """Rows t to t + 3."""
    r0, r1 = _row(X, stride, t, T, local, width), _row(X, stride, t + 1, T, local, width)
    r2, r3 = _row(X, stride, t + 2, T, local, width), _row(X, stride, t + 3, T, local, width)
    return r0, r1, r2, r3


@triton.jit
def _sequence(Offsets, t, T, N, b, PACKED: tl.constexpr):
    """(number, begin, end) of the sequence of token t, by binary search if PACKED."""
    n, begin, end = b, t * 0, T
    if PACKED:
        n, above = t * 0, t * 0 + N  # an N of 1 is a constant to Triton, which a loop cannot change
        while above - n > 1:
            middle = (n + above) // 2
            begins_before = tl.load(Offsets + middle) <= t
            n = tl.where(begins_before, middle, n)
            above = tl.where(begins_before, above, middle)
        begin, end = _bounds(Offsets, n, N)
    return n, begin, end


@triton.jit
def _follow(
    X, stride, State, n_stride, w_stride, Offsets, N, t, n, begin, end, x1, x2, x3, local, width,
    W: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(number, begin, end, last three inputs) of the sequence of token t, which may begin with t if PACKED."""
    if PACKED:  # noqa: SIM102  (a constant to Triton, and t is not)
        if t >= end:
            n = tl.minimum(n + 1, N - 1)
            while (n < N - 1) & (tl.load(Offsets + n + 1) <= t):  # empty sequences
                n += 1
            begin, end = _bounds(Offsets, n, N)
            x1, x2, x3 = _history(X, stride, State, n_stride, w_stride, t, begin, n, local, width, W, STATE, BLOCK_D)
    return n, begin, end, x1, x2, x3


@triton.jit
def _bounds(Offsets, n, N):
    """(begin, end) of sequence n; the last one has no end, so that no sequence follows it."""
    begin, end = tl.load(Offsets + n).to(tl.int32), tl.load(Offsets + n + 1).to(tl.int32)
    return begin, tl.where(n < N - 1, end, 2147483647)


@triton.jit
def _history(
    X, stride, State, n_stride, w_stride, t, begin, n, local, width,
    W: tl.constexpr, STATE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The rows t - 1, t - 2 and t - 3 of a sequence, from the state or zeros before its begin; zeros from lag W on."""
    x1, x2, x3 = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    x1 = _earlier(X, stride, State, n_stride, w_stride, t - 1, begin, n, local, width, STATE)
    if W > 2:
        x2 = _earlier(X, stride, State, n_stride, w_stride, t - 2, begin, n, local, width, STATE)
    if W > 3:
        x3 = _earlier(X, stride, State, n_stride, w_stride, t - 3, begin, n, local, width, STATE)
    return x1, x2, x3


@triton.jit
def _earlier(X, stride, State, n_stride, w_stride, t, begin, n, local, width, STATE: tl.constexpr):
    """Row t of a sequence, from the state or zeros before its begin."""
    some = tl.where(t >= tl.maximum(begin, 0), width, 0)
    x = tl.load(X + t * stride, mask=local < some, other=0.0).to(tl.float32)
    if STATE:
        column = STATE + t - begin
        some = tl.where((t < begin) & (column >= 0), width, 0)
        State += tl.cast(n, tl.int64) * n_stride + column * w_stride
        x += tl.load(State, mask=local < some, other=0.0).to(tl.float32)
    return x


@triton.jit
def _convolved(x, x1, x2, x3, w0, w1, w2, w3, W: tl.constexpr):
    """z, the oldest input first."""
    if W == 4:
        z = tl.fma(x1, w1, tl.fma(x2, w2, x3 * w3))
    elif W == 3:
        z = tl.fma(x1, w1, x2 * w2)
    else:
        z = x1 * w1
    return tl.fma(x, w0, z)


@triton.jit
def _through_silu(z, dy):
    """Dy silu'(z)."""
    s = 1 / (1 + tl.exp(-z))
    return dy * (s * tl.fma(z, 1 - s, 1.0))


@triton.jit
def _scattered(dz, a1, a2, a3, w0, w1, w2, w3, back, W: tl.constexpr, PACKED: tl.constexpr):
    """(dx of the token W - 1 before, the sums of dx of the last three tokens) with dz added, `back` tokens at most."""
    b1 = tl.fma(w1, dz, a1)
    b2 = tl.fma(w2, dz, a2)
    b3 = tl.fma(w3, dz, a3)
    if PACKED:
        b1 = tl.where(back >= 1, b1, a1)
        b2 = tl.where(back >= 2, b2, a2)
        b3 = tl.where(back >= 3, b3, a3)
    if W == 4:
        dx = b3
    elif W == 3:
        dx = b2
    else:
        dx = b1
    return dx, w0 * dz, b1, b2
