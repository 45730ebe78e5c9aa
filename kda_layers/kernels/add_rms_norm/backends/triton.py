"""Triton kernels, one launch each way: any CUDA GPU, 16 bits and fp32; for tests also the interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...declarations import OneOf
from ...operator import once_differentiable
from ...row_tiles import RowTiles
from ...triton_package import TritonBackend, even_rows
from ..contract import Backend

PER_THREAD = 16  # elements of a row for a thread


class AddRMSNormBackend(TritonBackend, Backend):
    serves = {"dtype": OneOf(torch.bfloat16, torch.float16, torch.float32)}  # noqa: RUF012

    def normalise(self, residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return _AddRMSNorm.apply(residual, x, weight.contiguous(), eps)


class _AddRMSNorm(torch.autograd.Function):
    """(residual, x, weight, eps) -> (sum, y); keeps the sum, which the residual stream keeps anyway."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from ..triton.rows import norm_forward_kernel

        B, T, D = residual.shape
        base = even_rows(residual)
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
        from ..triton.rows import norm_backward_kernel

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


BACKEND = AddRMSNormBackend()
