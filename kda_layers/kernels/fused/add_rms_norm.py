"""An addition to the residual stream and the RMSNorm of the sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..operator import once_differentiable
from ..triton_package import even_rows
from .mechanism import Fused, Triton
from .rows import RowTiles

PER_THREAD = 16  # elements of a row for a thread


class _AddRMSNorm(torch.autograd.Function):
    """(residual, x, weight, eps) -> (sum, y), one launch each way; keeps the sum, which the stream keeps anyway."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from .triton.rows import norm_forward_kernel

        B, T, D = residual.shape
        base, weight = even_rows(residual), weight.contiguous()
        added = base if x is None else even_rows(x)  # not read without x
        total = residual if x is None else residual.new_empty(residual.shape)
        y = residual.new_empty(residual.shape)
        RowTiles(B * T, D, PER_THREAD).launch(
            norm_forward_kernel, base, added, weight, total, y, base.stride(1), added.stride(1), eps, x is not None
        )
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return total, y  # autograd makes a view of a returned input

    @staticmethod
    @once_differentiable("add_rms_norm")
    def backward(ctx: Any, d_total: Tensor | None, d_y: Tensor | None) -> tuple[Tensor | None, ...]:
        from .triton.rows import norm_backward_kernel

        if d_y is None:
            return d_total, d_total if ctx.needs_input_grad[1] else None, None, None
        total, weight = ctx.saved_tensors
        B, T, D = total.shape
        read = [even_rows(t) for t in (total, d_y, d_y if d_total is None else d_total)]
        d_x = total.new_empty(total.shape)
        strides = (t.stride(1) for t in read)
        d_weight = RowTiles(B * T, D, PER_THREAD).launch_summing(
            weight, norm_backward_kernel, *read, weight, d_x, *strides, ctx.eps, d_total is not None
        )
        return d_x, d_x if ctx.needs_input_grad[1] else None, d_weight, None


def _fits(residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> bool:
    others = (weight,) if x is None else (weight, x)
    alike = all(t.dtype == residual.dtype and t.device == residual.device for t in others)
    return (
        alike and residual.ndim == 3 and weight.shape == residual.shape[2:] and (x is None or x.shape == residual.shape)
    )


ADD_RMS_NORM = Fused("add_rms_norm", "add rms norm", Triton(_AddRMSNorm.apply), tensors=3, fits=_fits)


@ADD_RMS_NORM.plain
def add_rms_norm(
    residual: Tensor, x: Tensor | None, weight: Tensor, eps: float, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return residual + x and its RMSNorm over the last dimension, differentiable.

    Args:
        residual: [B, T, D], any float dtype.
        x: as residual, or None to normalise the residual alone. torch.compile, torch.func, and tensors of another rank
            or class or unlike each other get the plain form, which broadcasts and raises as PyTorch does.
        weight: [D].
        eps: added to the mean of squares.
        backend: name of a backend, used if it serves this call; None chooses.

    Returns:
        (sum, y), both [B, T, D]. The sum is rounded to its dtype before it is normalised. For x=None it is `residual`
        itself or a view of it: if the stream goes on from there, the backward adds its gradient in the norm's kernel.

    Raises:
        RuntimeError: a second derivative of a fused kernel; shapes that PyTorch cannot broadcast.
    """
    total = residual if x is None else residual + x
    return total, torch.nn.functional.rms_norm(total, weight.shape, weight, eps)
