"""Compact an expanded bias for the backends, and pass its gradient back to the tensor that was expanded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def compact(bias: Tensor) -> Tensor:
    """Return the bias with size 1 in place of every leading dimension that is expanded (stride 0), differentiable."""
    dims = tuple(d for d in range(3) if bias.shape[d] > 1 and bias.stride(d) == 0)
    if not dims:
        return bias
    base = _base(bias)
    if base is None:
        return _Compact.apply(bias, dims)
    size = [1 if d in dims else n for d, n in enumerate(bias.shape)]
    return base.as_strided(size, bias.stride(), bias.storage_offset())


def _base(bias: Tensor) -> Tensor | None:
    """The tensor that the bias is an expanded view of, if the gradient may bypass the view: nothing reads it there."""
    if torch.compiler.is_compiling() or not bias.requires_grad or bias.is_leaf or not bias._is_view():
        return None  # tensors have no _base while compiling
    base, is_read = bias._base, bias.retains_grad or bias._backward_hooks
    return base if base is not None and not is_read and base.requires_grad and base.dtype == bias.dtype else None


class _Compact(torch.autograd.Function):
    """Give every element of the expanded bias an equal part of the sum, as one element with stride 0.

    The backward of the expansion adds the parts up again, and no tensor of the expanded size is ever in memory. The
    parts may underflow in fp16.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, dims: tuple[int, ...]) -> Tensor:
        ctx.shape, ctx.copies = bias.shape, 1
        for d in dims:
            ctx.copies *= bias.shape[d]
            bias = bias.narrow(d, 0, 1)
        return bias

    @staticmethod
    def backward(ctx: Any, d_bias: Tensor) -> Any:
        return (d_bias / ctx.copies).expand(ctx.shape), None
