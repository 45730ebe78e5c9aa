"""Rows, taps and sequences in the kernels of short_conv.py."""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(4)  # rows that are read at a time


@triton.jit
def place_of(D0, D1, D2, strips, BLOCK_D: tl.constexpr):
    """(tensor, its channels, their place among all channels, its width, strip, batch row) of this program."""
    blocks0, blocks1, blocks2 = tl.cdiv(D0, BLOCK_D), tl.cdiv(D1, BLOCK_D), tl.cdiv(D2, BLOCK_D)
    blocks = blocks0 + blocks1 + blocks2
    program = tl.program_id(0)
    block, strip, b = program % blocks, program // blocks % strips, program // blocks // strips
    tensor = (block >= blocks0).to(tl.int32) + (block >= blocks0 + blocks1).to(tl.int32)
    local = (block - one_of(tensor, 0, blocks0, blocks0 + blocks1)) * BLOCK_D + tl.arange(0, BLOCK_D)
    return tensor, local, local + one_of(tensor, 0, D0, D0 + D1), one_of(tensor, D0, D1, D2), strip, b


@triton.jit
def one_of(tensor, a, b, c):
    """a, b or c for the tensor 0, 1 or 2."""
    return tl.where(tensor == 0, a, tl.where(tensor == 1, b, c))


@triton.jit
def load_taps(Weight, channel, inside, W: tl.constexpr):
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
def store_taps(Partial, D, dw0, dw1, dw2, dw3, inside, W: tl.constexpr):
    """Write the gradients of the taps of lags 0 to W - 1, each D elements before the one of the lag before."""
    tl.store(Partial + (W - 1) * D, dw0, mask=inside)
    tl.store(Partial + (W - 2) * D, dw1, mask=inside)
    if W > 2:
        tl.store(Partial + (W - 3) * D, dw2, mask=inside)
    if W > 3:
        tl.store(Partial + (W - 4) * D, dw3, mask=inside)


@triton.jit
def load_row(X, stride, t, T, local, width):
    """Row t in fp32, zeros from T on."""
    return tl.load(X + t * stride, mask=local < tl.where(t < T, width, 0), other=0.0).to(tl.float32)


@triton.jit
def load_rows(X, stride, t, T, local, width):
    """Rows t to t + 3."""
    r0, r1 = load_row(X, stride, t, T, local, width), load_row(X, stride, t + 1, T, local, width)
    r2, r3 = load_row(X, stride, t + 2, T, local, width), load_row(X, stride, t + 3, T, local, width)
    return r0, r1, r2, r3


@triton.jit
def sequence_of(Offsets, t, T, N, b, PACKED: tl.constexpr):
    """(number, begin, end) of the sequence of token t, by binary search if PACKED."""
    n, begin, end = b, t * 0, T
    if PACKED:
        n, above = t * 0, t * 0 + N  # an N of 1 is a constant to Triton, which a loop cannot change
        while above - n > 1:
            middle = (n + above) // 2
            begins_before = tl.load(Offsets + middle) <= t
            n = tl.where(begins_before, middle, n)
            above = tl.where(begins_before, above, middle)
        begin, end = bounds_of(Offsets, n, N)
    return n, begin, end


@triton.jit
def follow(
    X, stride, State, n_stride, w_stride, Offsets, N, t, n, begin, end, x1, x2, x3, local, width,
    W: tl.constexpr, PACKED: tl.constexpr, STATE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(number, begin, end, last three inputs) of the sequence of token t, which may begin with t if PACKED."""
    if PACKED:  # noqa: SIM102  (a constant to Triton, and t is not)
        if t >= end:
            n, begin, end = next_sequence(Offsets, N, t, n)
            x1, x2, x3 = history(X, stride, State, n_stride, w_stride, t, begin, n, local, width, W, STATE, BLOCK_D)
    return n, begin, end, x1, x2, x3


@triton.jit
def next_sequence(Offsets, N, t, n):
    """(number, begin, end) of the sequence after sequence n that begins with t, past empty ones."""
    n = tl.minimum(n + 1, N - 1)
    while (n < N - 1) & (tl.load(Offsets + n + 1) <= t):
        n += 1
    begin, end = bounds_of(Offsets, n, N)
    return n, begin, end


@triton.jit
def bounds_of(Offsets, n, N):
    """(begin, end) of sequence n; the last one has no end, so that no sequence follows it."""
    begin, end = tl.load(Offsets + n).to(tl.int32), tl.load(Offsets + n + 1).to(tl.int32)
    return begin, tl.where(n < N - 1, end, 2147483647)


@triton.jit
def history(
    X, stride, State, n_stride, w_stride, t, begin, n, local, width,
    W: tl.constexpr, STATE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The rows t - 1, t - 2 and t - 3 of a sequence, from the state or zeros before its begin; zeros from lag W on."""
    x1, x2, x3 = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    x1 = earlier_row(X, stride, State, n_stride, w_stride, t - 1, begin, n, local, width, STATE)
    if W > 2:
        x2 = earlier_row(X, stride, State, n_stride, w_stride, t - 2, begin, n, local, width, STATE)
    if W > 3:
        x3 = earlier_row(X, stride, State, n_stride, w_stride, t - 3, begin, n, local, width, STATE)
    return x1, x2, x3


@triton.jit
def earlier_row(X, stride, State, n_stride, w_stride, t, begin, n, local, width, STATE: tl.constexpr):
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
def convolved(x, x1, x2, x3, w0, w1, w2, w3, W: tl.constexpr):
    """z, the oldest input first."""
    if W == 4:
        z = tl.fma(x1, w1, tl.fma(x2, w2, x3 * w3))
    elif W == 3:
        z = tl.fma(x1, w1, x2 * w2)
    else:
        z = x1 * w1
    return tl.fma(x, w0, z)


@triton.jit
def through_silu(z, dy):
    """Dy silu'(z)."""
    s = 1 / (1 + tl.exp(-z))
    return dy * (s * tl.fma(z, 1 - s, 1.0))


@triton.jit
def scattered(dz, a1, a2, a3, w0, w1, w2, w3, back, W: tl.constexpr, PACKED: tl.constexpr):
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
