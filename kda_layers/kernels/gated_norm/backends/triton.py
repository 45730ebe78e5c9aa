"""Triton kernels, one launch each way: any CUDA GPU, 16 bits and fp32; rounds once. For tests also the interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...declarations import OneOf
from ...operator import once_differentiable
from ...row_tiles import RowTiles
from ...triton_package import TritonBackend
from ..contract import Backend, Plain

PER_THREAD = 8  # elements of a tile for a thread


class GatedNormBackend(TritonBackend, Backend):
    serves = {"dtype": OneOf(torch.bfloat16, torch.float16, torch.float32)}  # noqa: RUF012

    def normalise(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, plain: Plain | None) -> Tensor:
        return _GatedNorm.apply(x.contiguous(), gate.contiguous(), weight.contiguous(), eps)


class _GatedNorm(torch.autograd.Function):
    """(x, gate, weight, eps) -> y; keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        from ..triton.rows import gated_norm_forward_kernel

        y = torch.empty_like(x)
        _tiles(x).launch(gated_norm_forward_kernel, x, gate, weight, y, eps)
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable("gated_rms_norm")
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        from ..triton.rows import gated_norm_backward_kernel

        x, gate, weight = ctx.saved_tensors
        d_x, d_gate = torch.empty_like(x), torch.empty_like(gate)
        d_weight = _tiles(x).launch_summing(
            weight, gated_norm_backward_kernel, x, gate, d_y.contiguous(), weight, d_x, d_gate, ctx.eps
        )
        return d_x, d_gate, d_weight, None


def _tiles(x: Tensor) -> RowTiles:
    return RowTiles(x.shape[:-1].numel(), x.shape[-1], PER_THREAD)


BACKEND = GatedNormBackend()
