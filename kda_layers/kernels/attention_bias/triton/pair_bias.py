"""The gradient of a bias for each query and key: `pair_kernel` recomputes the scores, a tile at a time.

A program owns a tile of the bias and sums over the batch rows and heads that share it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .parts import PER_PAIR, load_bias, load_rows


@triton.jit
def pair_kernel(
    Q, K, V, Bias, DO, Lse, Delta, DBias, Sequences,
    q_strides, k_strides, v_strides, bias_strides,
    scale_log2, T, S, H, batch, heads,  # batch, heads: how many share a bias
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """DBias, contiguous, of the shape and dtype of the bias; Sequences [T]: the number of each token's sequence."""
    program = tl.program_id(0)
    across, down = tl.cdiv(S, BLOCK_N), tl.cdiv(T, BLOCK_M)
    row, col = program // across % down * BLOCK_M, program % across * BLOCK_N
    share = (program // across // down).to(tl.int64)  # which [T, S] of the bias
    bias_heads = H // heads
    bias_b, bias_h = share // bias_heads, share % bias_heads
    rows, cols = row + tl.arange(0, BLOCK_M)[:, None], col + tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < T) & (cols < S)
    seen, some = inside, True
    if CAUSAL:
        seen = seen & (cols <= rows + S - T)
        some = col <= row + BLOCK_M - 1 + S - T
    if PACKED:
        seen = seen & (
            tl.load(Sequences + rows, mask=rows < T, other=0) == tl.load(Sequences + cols, mask=cols < S, other=0)
        )
    Bias += bias_b * bias_strides[0] + bias_h * bias_strides[1]
    ds = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if some:
        bias = load_bias(Bias, bias_strides, row, col, T, S, BLOCK_M, BLOCK_N, PER_PAIR, True)
        for i in range(0, batch * heads):
            b, h = bias_b * batch + i // heads, bias_h * heads + i % heads
            q = load_rows(Q + b * q_strides[0] + h * q_strides[2], q_strides[1], row, T, BLOCK_M, D, BLOCK_D, True)
            do = load_rows(DO + (b * T * H + h) * D, H * D, row, T, BLOCK_M, D, BLOCK_D, True)
            k_head = K + b * k_strides[0] + h // GROUP * k_strides[2]
            v_head = V + b * v_strides[0] + h // GROUP * v_strides[2]
            k = load_rows(k_head, k_strides[1], col, S, BLOCK_N, D, BLOCK_D, True)
            v = load_rows(v_head, v_strides[1], col, S, BLOCK_N, D, BLOCK_D, True)
            at = (b * H + h) * T + row + tl.arange(0, BLOCK_M)
            lse = tl.load(Lse + at, mask=row + tl.arange(0, BLOCK_M) < T, other=float("inf"))
            delta = tl.load(Delta + at, mask=row + tl.arange(0, BLOCK_M) < T, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2 + bias
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            # Masked last: a tile may hold tokens of several sequences, and what one does not see may be NaN.
            ds += tl.where(seen, tl.exp2(s - lse[:, None]) * (dp - delta[:, None]), 0.0)
    at = DBias + share * T * S + tl.cast(row, tl.int64) * S + (tl.arange(0, BLOCK_M)[:, None] * S + cols)
    tl.store(at, ds.to(DBias.dtype.element_ty), mask=inside)
