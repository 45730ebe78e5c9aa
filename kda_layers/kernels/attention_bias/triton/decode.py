"""Attention of one query, as in a decode step: split over the keys, then combined (Flash-Decoding, Dao et al. 2023).

A split has a fixed number of keys, and one that sees no key has weight 0, so that results depend neither on the batch
nor on empty slots at the end of a cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .parts import LEAST, LOG2_E, NO_BIAS, load_rows


@triton.jit
def split_kernel(
    Q, K, V, Bias, Parts, Top, Sum,
    q_strides, k_strides, v_strides, bias_strides,  # (batch, token, head), of the bias (batch, head, query, key)
    scale_log2, splits, S, H_KV,
    GROUP: tl.constexpr, BIAS_GROUP: tl.constexpr, BIAS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_G query heads of a key head over BLOCK_N keys.

    Parts [B, H, splits, D], Top, Sum [B, H, splits] fp32: the mean of values, the highest score, and the sum of
    exponentials relative to it. Where a query sees no key of a split, Top is -inf and the others are not written.
    """
    tiles: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    split, rest = tl.program_id(0) % splits, tl.program_id(0) // splits
    g, first = rest % tiles * BLOCK_G + tl.arange(0, BLOCK_G), split * BLOCK_N
    b, h_kv = (rest // tiles // H_KV).to(tl.int64), (rest // tiles % H_KV).to(tl.int64)
    cols, d = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    h, heads = h_kv * GROUP + g, g < GROUP
    at = (b * H_KV * GROUP + h) * splits + split
    hidden = tl.where(heads[:, None] & (cols < S)[None, :], 0.0, -float("inf"))
    if BIAS != NO_BIAS:
        place = Bias + b * bias_strides[0] + (h // BIAS_GROUP * bias_strides[1])[:, None]
        place += cols.to(tl.int64)[None, :] * bias_strides[3]
        bias = tl.load(place, mask=hidden == 0, other=-float("inf")).to(tl.float32)
        hidden = tl.where(bias == -float("inf"), bias, tl.maximum(bias * LOG2_E, LEAST))
    seen = tl.max(hidden, 1) > -float("inf")
    if tl.max(seen.to(tl.int32), 0) > 0:
        q_head = Q + b * q_strides[0] + h[:, None] * q_strides[2]
        q = tl.load(q_head + d[None, :], mask=heads[:, None] & (d < D)[None, :], other=0.0)
        k = load_rows(K + b * k_strides[0] + h_kv * k_strides[2], k_strides[1], first, S, BLOCK_N, D, BLOCK_D, True)
        v = load_rows(V + b * v_strides[0] + h_kv * v_strides[2], v_strides[1], first, S, BLOCK_N, D, BLOCK_D, True)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2 + hidden
        top = tl.max(s, 1)
        top = tl.where(top == -float("inf"), 0.0, top)
        p = tl.exp2(s - top[:, None])
        total = tl.sum(p, 1)  # at least 1, or NaN, which the output has to show
        o = tl.dot(p.to(v.dtype), v, input_precision="ieee") / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(Top + at, tl.where(seen, top, -float("inf")), mask=heads)
        tl.store(Sum + at, total, mask=heads & seen)
        tl.store(Parts + at[:, None] * D + d[None, :], o, mask=(heads & seen)[:, None] & (d < D)[None, :])
    else:
        tl.store(Top + at, -float("inf"), mask=heads)


@triton.jit
def combine_kernel(Parts, Top, Sum, O, Lse, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr):
    """Combine the splits of one query: O [B, 1, H, D], Lse [B, H, 1], +inf where the query sees no key."""
    row = tl.program_id(0).to(tl.int64)  # b H + h
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    base = -float("inf")
    for first in range(0, splits, BLOCK_S):
        top = tl.load(Top + row * splits + first + s, mask=first + s < splits, other=-float("inf"))
        base = tl.maximum(base, tl.max(top, 0))
    base = tl.where(base == -float("inf"), 0.0, base)
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    for first in range(0, splits, BLOCK_S):
        place = row * splits + first + s
        top = tl.load(Top + place, mask=first + s < splits, other=-float("inf"))
        seen = top != -float("inf")
        weight = tl.exp2(top - base) * tl.load(Sum + place, mask=seen, other=0.0)
        o = tl.load(Parts + (place * D)[:, None] + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)
        acc += tl.sum(weight[:, None] * o, 0)
        total += tl.sum(weight, 0)
    some = tl.where(total == 0, 1.0, total)
    tl.store(O + row * D + d, (acc / some).to(O.dtype.element_ty), mask=d < D)
    tl.store(Lse + row, tl.where(total == 0, float("inf"), base + tl.log2(some)))
