"""A Triton kernel for a token or a few: any CUDA GPU, 16 bits and fp32; for tests also the interpreter."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from ...declarations import OneOf, arch_of
from ...triton_package import TritonBackend, even_rows
from ..contract import Backend, Inputs

# Elements of the output and warps of a program, and the most columns that it reads at a time, tuned on an H200.
OUTPUTS, WARPS = 4, 4
MOST_COLUMNS = 2048
MOST_IDLE = 0.125  # share of the last columns' lanes that may be idle
OVERLAPS = 90  # compute capability from which on a kernel can start before the one before it has ended


class LinearStepBackend(TritonBackend, Backend):
    serves = {"dtype": OneOf(torch.bfloat16, torch.float16, torch.float32)}  # noqa: RUF012

    def apply(self, x: Inputs) -> Tensor:
        from ..triton.row import row_kernel

        B, T, D = x.x.shape
        N = x.weight.shape[0] // (2 if x.swiglu else 1)
        y = x.x.new_empty((B, T, N))
        if B * T * N == 0:
            return y
        row, residual = even_rows(x.x), None if x.residual is None else even_rows(x.residual)
        block, overlap = columns(D, x.swiglu), x.overlap and arch_of(row.device) >= OVERLAPS
        options: dict[str, Any] = {"launch_pdl": True} if overlap else {}
        with torch.cuda.device(row.device) if row.is_cuda else contextlib.nullcontext():
            row_kernel[(B * T, -(-N // OUTPUTS))](
                row, x.weight.contiguous(), x.norm_weight, residual, y, row.stride(1),
                0 if residual is None else residual.stride(1), x.norm_eps, N, D,
                OUTPUTS=OUTPUTS, BLOCK=block, STEPS=-(-D // block), NORM=x.norm_weight is not None,
                RESIDUAL=residual is not None, SWIGLU=x.swiglu, OVERLAP=overlap, num_warps=WARPS, **options,
            )  # fmt: skip
        return y


@functools.cache
def columns(D: int, swiglu: bool) -> int:
    """Columns of a weight with D of them that a program reads at a time, a power of two."""
    block = MOST_COLUMNS // (2 if swiglu else 1)
    while block > 256 and -D % block > MOST_IDLE * D:
        block //= 2
    return block


BACKEND = LinearStepBackend()
