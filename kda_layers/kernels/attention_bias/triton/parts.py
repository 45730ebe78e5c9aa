"""What the kernels share: tiles of rows, loads, and the bias of a tile of scores. All scores are in log2 units."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-3.0e38)
NO_BIAS, PER_KEY, PER_PAIR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def tile_of(Tiles, tile, length, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """(first row, first row of its sequence, end of its sequence); of packed sequences from a table of them."""
    if PACKED:
        first, begin, end = tl.load(Tiles + 3 * tile), tl.load(Tiles + 3 * tile + 1), tl.load(Tiles + 3 * tile + 2)
    else:
        first, begin, end = tile * BLOCK, tile * 0, length
    return first, begin, end


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
    """Writes the rows of x [BLOCK, BLOCK_D] before `end`, rounded to what is stored there."""
    rows, d = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    at = Base + tl.cast(first, tl.int64) * stride + (rows * stride + d)
    tl.store(at, x.to(Base.dtype.element_ty), mask=(first + rows < end) & (d < D))


@triton.jit
def load_bias(
    Bias, t_stride, s_stride, row, col, row_end, col_end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The bias of a tile of scores from (row, col) on, [1, BLOCK_N] PER_KEY or [BLOCK_M, BLOCK_N] PER_PAIR.

    Only PER_KEY has no need of masks in tiles that are not MASKED: whole tiles of keys meet tails of queries.
    """
    cols = tl.arange(0, BLOCK_N)[None, :]
    at = Bias + tl.cast(col, tl.int64) * s_stride + cols * s_stride
    seen = col + cols < col_end
    if KIND == PER_PAIR:
        rows = tl.arange(0, BLOCK_M)[:, None]
        at += tl.cast(row, tl.int64) * t_stride + rows * t_stride
        seen = seen & (row + rows < row_end)
    bias = tl.load(at, mask=seen, other=0.0) if MASKED or KIND == PER_PAIR else tl.load(at)
    bias = bias.to(tl.float32)
    # The least finite numbers, with which masks hide keys, stay finite: queries that see nothing else see all alike.
    return tl.where(bias == -float("inf"), bias, tl.maximum(bias * LOG2_E, LEAST))
