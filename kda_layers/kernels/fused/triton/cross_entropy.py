"""Losses of rows of logits, and the gradient of the logits in their place: three passes, 6 bytes a logit in bf16.

And the product of a gradient with the loss' own, in place.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def loss_kernel(
    Logits, Targets, Losses, row_stride, vocab_size, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program has one row. Losses in fp32; a row whose target is `ignore_index` has loss and gradient 0.

    The loss of a target outside of the vocabulary is NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    Logits += row * row_stride
    target = tl.load(Targets + row)
    columns = tl.arange(0, BLOCK)
    if target == ignore_index:
        tl.store(Losses + row, 0.0)
        if GRADIENT:
            for first in range(0, vocab_size, BLOCK):
                at = first + columns
                zeros = tl.zeros([BLOCK], Logits.dtype.element_ty)
                tl.store(Logits + at, zeros, mask=at < vocab_size)
        return

    top = tl.full([BLOCK], -float("inf"), tl.float32)  # a maximum and a sum for each lane, reduced once at the end
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab_size, BLOCK):
        at = first + columns
        x = tl.load(Logits + at, mask=at < vocab_size, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, x)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.exp(x - base)
        top = new_top
    row_top = tl.max(top, 0)
    log_total = tl.log(tl.sum(total * tl.exp(top - row_top), 0))
    known = (target >= 0) & (target < vocab_size)
    of_target = tl.load(Logits + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(Losses + row, log_total - (of_target - row_top))
    if GRADIENT:
        for first in range(0, vocab_size, BLOCK):
            at = first + columns
            x = tl.load(Logits + at, mask=at < vocab_size, other=0.0).to(tl.float32)
            p = tl.exp(x - row_top - log_total)
            tl.store(Logits + at, tl.where(at == target, p - 1.0, p).to(Logits.dtype.element_ty), mask=at < vocab_size)


def loss_rows(logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, gradient: bool) -> None:
    """Launch the kernel on logits [n, vocab_size], targets and losses [n]."""
    rows, vocab_size = logits.shape
    block = min(4096, triton.next_power_of_2(vocab_size))
    loss_kernel[(rows,)](
        logits, targets, losses, logits.stride(0), vocab_size, ignore_index, GRADIENT=gradient, BLOCK=block, num_warps=8
    )


@triton.jit
def scale_kernel(X, Factor, elements, BLOCK: tl.constexpr):
    """X [elements] times the one element of Factor, in fp32, in place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < elements, other=0.0).to(tl.float32) * tl.load(Factor).to(tl.float32)
    tl.store(X + at, x.to(X.dtype.element_ty), mask=at < elements)


def scale(x: Tensor, factor: Tensor) -> None:
    """Multiply a contiguous x by the one element of `factor`."""
    block = 2048
    if x.numel():
        scale_kernel[(triton.cdiv(x.numel(), block),)](x, factor, x.numel(), BLOCK=block, num_warps=8)
