"""The backward kernels: `query_kernel` for dq, `key_kernel` for dk, dv and the gradient of a bias for each key,
`pair_kernel` for that of a bias for each query and key.

With p = exp(s - lse), ds = p (do v^T - delta), delta = rowsum(o do): dq = scale ds k, dk = scale ds^T q, dv = p^T do,
dbias = ds summed over what the bias is broadcast in. FlashAttention-2, arXiv 2307.08691, section 3.1.2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .parts import PER_KEY, PER_PAIR, key_span, load_bias, load_rows, scores, store_rows, tile_of


@triton.jit
def query_kernel(
    Q, K, V, Bias, O, DO, Lse, Delta, DQ, Tiles,
    q_strides, k_strides, v_strides, bias_strides,
    scale, scale_log2, tiles, T, S, H,
    GROUP: tl.constexpr, BIAS_GROUP: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """DQ [B, T, H, D], and Delta [B, H, T] for the kernels after it, from contiguous O and DO.

    A program holds a tile of queries, as in the forward kernel.
    """
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles
    b, h = (program // tiles // H).to(tl.int64), (program // tiles % H).to(tl.int64)
    first, begin, end = tile_of(Tiles, tile, T, BLOCK_M, PACKED)
    if first >= end:
        return
    shift, unmasked_end, last, key_end = key_span(first, begin, end, T, S, CAUSAL, PACKED, BLOCK_M, BLOCK_N)
    rows = first + tl.arange(0, BLOCK_M)
    heads = (b * T * H + h) * D
    do = load_rows(DO + heads, H * D, first, end, BLOCK_M, D, BLOCK_D, True)
    o = load_rows(O + heads, H * D, first, end, BLOCK_M, D, BLOCK_D, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(Delta + (b * H + h) * T + rows, delta, mask=rows < end)
    lse = tl.load(Lse + (b * H + h) * T + rows, mask=rows < end, other=float("inf"))
    q = load_rows(Q + b * q_strides[0] + h * q_strides[2], q_strides[1], first, end, BLOCK_M, D, BLOCK_D, True)
    K += b * k_strides[0] + h // GROUP * k_strides[2]
    V += b * v_strides[0] + h // GROUP * v_strides[2]
    Bias += b * bias_strides[0] + h // BIAS_GROUP * bias_strides[1]
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for masked in tl.static_range(2):  # tiles of keys that need no mask, then the others
        for col in range(unmasked_end if masked else begin, last if masked else unmasked_end, BLOCK_N):
            k = load_rows(K, k_strides[1], col, key_end, BLOCK_N, D, BLOCK_D, masked)
            v = load_rows(V, v_strides[1], col, key_end, BLOCK_N, D, BLOCK_D, masked)
            s = scores(
                q, k, Bias, bias_strides, scale_log2, first, col, end, key_end, shift,
                BIAS, CAUSAL, BLOCK_M, BLOCK_N, masked,
            )  # fmt: skip
            p = tl.exp2(s - lse[:, None])
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    store_rows(DQ + heads, H * D, first, end, dq * scale, BLOCK_M, D, BLOCK_D)


@triton.jit
def key_kernel(
    Q, K, V, Bias, DO, Lse, Delta, DK, DV, DBias, Tiles,
    q_strides, k_strides, v_strides, bias_strides,
    scale, scale_log2, tiles, T, S, H_KV,
    GROUP: tl.constexpr, BIAS_GROUP: tl.constexpr, BIAS: tl.constexpr, BIAS_GRAD: tl.constexpr, PER_HEAD: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """DK, DV [B, S, H_KV, D] and, with BIAS_GRAD, DBias fp32 [B, H, S] (PER_HEAD) or [B, H_KV, S].

    A program holds a tile of keys of one key head and loops over the queries that see it, head by head of its group
    and tile by tile: sums over queries and over the group stay in registers and have one order.
    """
    program = tl.program_id(0)
    tile = program % tiles  # causal tiles with the most queries first
    b, h_kv = (program // tiles // H_KV).to(tl.int64), (program // tiles % H_KV).to(tl.int64)
    first, begin, end = tile_of(Tiles, tile, S, BLOCK_N, PACKED)
    if first >= end:
        return
    query_end, shift = end, 0
    if not PACKED:
        query_end, shift = T, S - T
    # Tiles of queries: masked ones from `low` on, then unmasked ones to unmasked_end, then a masked one.
    low, unmasked_begin = begin, begin
    unmasked_end = begin + (query_end - begin) // BLOCK_M * BLOCK_M
    if CAUSAL:
        low = begin + tl.maximum(first - shift - begin, 0) // BLOCK_M * BLOCK_M
        unmasked_begin = begin + tl.maximum(first + BLOCK_N - 1 - shift - begin + BLOCK_M - 1, 0) // BLOCK_M * BLOCK_M
        unmasked_begin = tl.minimum(unmasked_begin, tl.cdiv(query_end - begin, BLOCK_M) * BLOCK_M + begin)
        unmasked_end = tl.maximum(unmasked_end, unmasked_begin)
    masked_end = unmasked_begin + tl.maximum(query_end - unmasked_end, 0)

    cols = first + tl.arange(0, BLOCK_N)
    k = load_rows(K + b * k_strides[0] + h_kv * k_strides[2], k_strides[1], first, end, BLOCK_N, D, BLOCK_D, True)
    v = load_rows(V + b * v_strides[0] + h_kv * v_strides[2], v_strides[1], first, end, BLOCK_N, D, BLOCK_D, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    db = tl.zeros([BLOCK_N], tl.float32)
    H = H_KV * GROUP
    for h in range(h_kv * GROUP, h_kv * GROUP + GROUP):
        q_head = Q + b * q_strides[0] + h * q_strides[2]
        do_head = DO + (b * T * H + h) * D
        stats = (b * H + h) * T
        bias_head = Bias + b * bias_strides[0] + h // BIAS_GROUP * bias_strides[1]
        bias = tl.zeros([BLOCK_N], tl.float32)
        if BIAS == PER_KEY:
            bias = load_bias(bias_head, bias_strides, first, first, end, end, BLOCK_M, BLOCK_N, BIAS, True)
            bias = tl.reshape(bias, [BLOCK_N])
        for unmasked in tl.static_range(2):  # the masked tiles first
            for at in range(unmasked_begin if unmasked else low, unmasked_end if unmasked else masked_end, BLOCK_M):
                row = at if unmasked else tl.where(at < unmasked_begin, at, at + unmasked_end - unmasked_begin)
                dk, dv, db = _key_step(
                    q_head, do_head, Lse + stats, Delta + stats, k, v, bias_head, bias, q_strides, bias_strides,
                    dk, dv, db, scale_log2, H * D, row, first, query_end, end, shift,
                    BIAS, BIAS_GRAD, CAUSAL, D, BLOCK_D, BLOCK_M, BLOCK_N, not unmasked,
                )  # fmt: skip
        if BIAS_GRAD and PER_HEAD:
            tl.store(DBias + (b * H + h) * S + cols, db, mask=cols < end)
            db = tl.zeros([BLOCK_N], tl.float32)
    if BIAS_GRAD and not PER_HEAD:
        tl.store(DBias + (b * H_KV + h_kv) * S + cols, db, mask=cols < end)
    heads = (b * S * H_KV + h_kv) * D
    store_rows(DK + heads, H_KV * D, first, end, dk * scale, BLOCK_N, D, BLOCK_D)
    store_rows(DV + heads, H_KV * D, first, end, dv, BLOCK_N, D, BLOCK_D)


@triton.jit
def _key_step(
    Q, DO, Lse, Delta, k, v, Bias, bias, q_strides, bias_strides, dk, dv, db, scale_log2, do_stride, row, col, row_end,
    key_end, shift,
    BIAS: tl.constexpr, BIAS_GRAD: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(dk, dv, db) with the tile of queries from `row` on added to them.

    Scores are [BLOCK_N, BLOCK_M] here: sums over queries are sums of rows, and no MMA needs p transposed. Queries from
    row_end on have lse = +inf and do = 0, so that p and ds are 0. Keys from key_end on get undefined sums, in rows that
    are not stored.
    """
    rows = row + tl.arange(0, BLOCK_M)
    q = load_rows(Q, q_strides[1], row, row_end, BLOCK_M, D, BLOCK_D, MASKED)
    do = load_rows(DO, do_stride, row, row_end, BLOCK_M, D, BLOCK_D, MASKED)
    inside = rows < row_end
    lse = tl.load(Lse + rows, mask=inside, other=float("inf")) if MASKED else tl.load(Lse + rows)
    s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale_log2
    if BIAS == PER_KEY:
        s += bias[:, None]
    elif BIAS == PER_PAIR:
        s += tl.trans(load_bias(Bias, bias_strides, row, col, row_end, key_end, BLOCK_M, BLOCK_N, BIAS, True))
    p = tl.exp2(s - lse[None, :])
    if MASKED and CAUSAL:
        p = tl.where(col + tl.arange(0, BLOCK_N)[:, None] <= rows[None, :] + shift, p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    delta = tl.load(Delta + rows, mask=inside, other=0.0) if MASKED else tl.load(Delta + rows)
    dp = tl.dot(v, tl.trans(do), input_precision="ieee")
    ds = p * (dp - delta[None, :])
    if BIAS_GRAD:
        db += tl.sum(ds, 1)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv, db


@triton.jit
def pair_kernel(
    Q, K, V, Bias, DO, Lse, Delta, DBias, Sequences,
    q_strides, k_strides, v_strides, bias_strides,
    scale_log2, T, S, H, batch, heads,  # batch, heads: how many share a bias
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """DBias, contiguous, of the shape and dtype of the bias; Sequences [T]: the number of each token's sequence.

    A program owns a tile of the bias, computes the scores again and sums over the batch rows and heads that share it.
    """
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
