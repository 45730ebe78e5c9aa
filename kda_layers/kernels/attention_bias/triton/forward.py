"""The forward kernel: a program holds a tile of queries and loops over the keys that they see.

Online softmax as in FlashAttention-2, arXiv 2307.08691: only the output and one number for each query leave the chip.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .parts import NO_BIAS, key_span, load_rows, scores, store_rows, tile_of


@triton.jit
def forward_kernel(
    Q, K, V, Bias, O, Lse, Tiles,
    q_strides, k_strides, v_strides, bias_strides,  # (batch, token, head), of the bias (batch, head, query, key)
    scale_log2, tiles, T, S, H,
    GROUP: tl.constexpr, BIAS_GROUP: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """O [B, T, H, D] contiguous, Lse [B, H, T]: log2 of the sum of exponents, +inf where there is nothing to sum."""
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles  # causal tiles with the most keys first
    b, h = (program // tiles // H).to(tl.int64), (program // tiles % H).to(tl.int64)
    first, begin, end = tile_of(Tiles, tile, T, BLOCK_M, PACKED)
    if first >= end:
        return
    shift, unmasked_end, last, key_end = key_span(first, begin, end, T, S, CAUSAL, PACKED, BLOCK_M, BLOCK_N)
    q = load_rows(Q + b * q_strides[0] + h * q_strides[2], q_strides[1], first, end, BLOCK_M, D, BLOCK_D, True)
    K += b * k_strides[0] + h // GROUP * k_strides[2]
    V += b * v_strides[0] + h // GROUP * v_strides[2]
    Bias += b * bias_strides[0] + h // BIAS_GROUP * bias_strides[1]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for masked in tl.static_range(2):  # tiles of keys that need no mask, then the others
        for col in range(unmasked_end if masked else begin, last if masked else unmasked_end, BLOCK_N):
            k = load_rows(K, k_strides[1], col, key_end, BLOCK_N, D, BLOCK_D, masked)
            s = scores(
                q, k, Bias, bias_strides, scale_log2, first, col, end, key_end, shift,
                BIAS, CAUSAL, BLOCK_M, BLOCK_N, masked,
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(s, 1))
            base = new_top
            if BIAS != NO_BIAS:  # without one, every query sees a finite score in its first tile
                base = tl.where(new_top == -float("inf"), 0.0, new_top)
            p = tl.exp2(s - base[:, None])
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None]
            v = load_rows(V, v_strides[1], col, key_end, BLOCK_N, D, BLOCK_D, masked)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
            top = new_top

    some = tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, top + tl.log2(some), float("inf"))
    acc = acc / some[:, None]
    store_rows(O + (b * T * H + h) * D, H * D, first, end, acc, BLOCK_M, D, BLOCK_D)
    rows = first + tl.arange(0, BLOCK_M)
    tl.store(Lse + (b * H + h) * T + rows, lse, mask=rows < end)
