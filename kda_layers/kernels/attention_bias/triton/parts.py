"""Parts that the kernels share: tiles of rows, loads, and a tile of scores. All scores are in log2 units."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-3.0e38)
NO_BIAS, PER_KEY, PER_PAIR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def tile_of(Tiles, tile, length, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """(first row, first row of its sequence, end of its sequence), read from the table `Tiles` if PACKED."""
    if PACKED:
        first, begin, end = tl.load(Tiles + 3 * tile), tl.load(Tiles + 3 * tile + 1), tl.load(Tiles + 3 * tile + 2)
    else:
        first, begin, end = tile * BLOCK, tile * 0, length
    return first, begin, end


@triton.jit
def key_span(
    first, begin, end, T, S,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(shift, end of the tiles of keys that need no mask, end of all that the queries see, end of the sequence's keys).

    Query i sees the keys up to i + shift.
    """
    key_end, shift = end, 0
    if not PACKED:
        key_end, shift = S, S - T
    unmasked_end = begin + (key_end - begin) // BLOCK_N * BLOCK_N
    last = key_end
    if CAUSAL:
        unmasked_end = begin + (first + shift + 1 - begin) // BLOCK_N * BLOCK_N
        last = tl.minimum(first + BLOCK_M, end) + shift
    return shift, unmasked_end, last, key_end


@triton.jit
def load_rows(
    Base, stride, first, end, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):
    """[BLOCK, BLOCK_D]: the rows from `first` on; zeros beyond D and, where MASKED, from `end` on."""
    rows, d = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    at = Base + tl.cast(first, tl.int64) * stride + (rows * stride + d)
    if MASKED:
        x = tl.load(at, mask=(first + rows < end) & (d < D), other=0.0)
    elif D < BLOCK_D:
        x = tl.load(at, mask=d < D, other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def store_rows(Base, stride, first, end, x, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write the rows of x [BLOCK, BLOCK_D] before `end`, in the dtype of Base."""
    rows, d = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    at = Base + tl.cast(first, tl.int64) * stride + (rows * stride + d)
    tl.store(at, x.to(Base.dtype.element_ty), mask=(first + rows < end) & (d < D))


@triton.jit
def load_bias(
    Bias, strides, row, col, row_end, col_end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The bias of a tile of scores from (row, col) on, [1, BLOCK_N] PER_KEY or [BLOCK_M, BLOCK_N] PER_PAIR.

    PER_PAIR always masks: a tile that is not MASKED has no tail of keys, but may have a tail of queries.
    """
    cols = tl.arange(0, BLOCK_N)[None, :]
    at = Bias + tl.cast(col, tl.int64) * strides[3] + cols * strides[3]
    seen = col + cols < col_end
    if KIND == PER_PAIR:
        rows = tl.arange(0, BLOCK_M)[:, None]
        at += tl.cast(row, tl.int64) * strides[2] + rows * strides[2]
        seen = seen & (row + rows < row_end)
    bias = tl.load(at, mask=seen, other=0.0) if MASKED or KIND == PER_PAIR else tl.load(at)
    bias = bias.to(tl.float32)
    # Masks hide keys with the least finite number, which stays finite: a query that sees only those weighs them alike.
    return tl.where(bias == -float("inf"), bias, tl.maximum(bias * LOG2_E, LEAST))


@triton.jit
def scores(
    q, k, Bias, bias_strides, scale_log2, row, col, row_end, key_end, shift,
    BIAS: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The scores of a tile from (row, col) on, [BLOCK_M, BLOCK_N]; where MASKED, -inf for keys that are not seen."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if BIAS != NO_BIAS:
        s += load_bias(Bias, bias_strides, row, col, row_end, key_end, BLOCK_M, BLOCK_N, BIAS, MASKED)
    if MASKED:
        cols = col + tl.arange(0, BLOCK_N)[None, :]
        seen = cols < key_end
        if CAUSAL:
            seen = seen & (cols <= row + tl.arange(0, BLOCK_M)[:, None] + shift)
        s = tl.where(seen, s, -float("inf"))
    return s
