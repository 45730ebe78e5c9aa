"""Triton kernels for one token to 64: any CUDA GPU for one or a few, in 16 bits and fp32; for tests the interpreter."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...cuda.arch import OVERLAPS
from ...declarations import OneOf, arch_of
from ...triton_package import TritonBackend, even_rows, on_device_of
from ..contract import Backend, Inputs, Problem, work_of

# Sizes tuned on an H200. A program of row_kernel: elements of the output, warps, and the most columns read at a time.
OUTPUTS, WARPS = 4, 4
MOST_COLUMNS = 2048
MOST_IDLE = 0.125  # share of the last columns' lanes that may be idle
# A program of tile_kernel: rows -> warps and stages.
TILES = {16: (2, 3), 32: (4, 4), 64: (4, 5)}
TILE_OUTPUTS, TILE_COLUMNS = 16, 256
TILE_ARCHS = (90, 100, 103)  # with the shared memory for its stages


class LinearStepBackend(TritonBackend, Backend):
    serves = {  # noqa: RUF012
        "dtype": OneOf(torch.bfloat16, torch.float16, torch.float32),
        "work": OneOf("row", "tile"),
    }

    def more_reasons(self, problem: Problem) -> list[str]:
        reasons = super().more_reasons(problem)
        if problem.work == "tile" and not reasons:
            archs, dtypes = OneOf(*TILE_ARCHS, prefix="sm_"), OneOf(torch.bfloat16, torch.float16)
            if problem.device == "cuda" and (refused := archs.refuses(problem.arch)):
                reasons.append(f"arch {refused} for a tile")
            if refused := dtypes.refuses(problem.dtype):
                reasons.append(f"dtype {refused} for a tile")
            if problem.device == "cpu" and problem.dtype == torch.bfloat16:
                reasons.append("dtype is bfloat16, which Triton's interpreter multiplies wrongly, needs float16")
        return reasons

    def apply(self, x: Inputs) -> Tensor:
        B, T, _ = x.x.shape
        y = x.x.new_empty((B, T, x.weight.shape[0] // (2 if x.swiglu else 1)))
        if y.numel() == 0:
            return y
        x = x._replace(
            x=even_rows(x.x), weight=x.weight.contiguous(),
            residual=None if x.residual is None else even_rows(x.residual),
            overlap=x.overlap and x.weight.is_contiguous() and arch_of(x.x.device) >= OVERLAPS,  # not behind its copy
        )  # fmt: skip
        with on_device_of(y):
            (_tile if work_of(x) == "tile" else _rows)(x, y)
        return y


def _rows(x: Inputs, y: Tensor) -> None:
    from ..triton.row import row_kernel

    B, T, N = y.shape
    D, block = x.x.shape[2], columns(x.x.shape[2], x.swiglu)
    row_kernel[(B * T * -(-N // OUTPUTS),)](
        x.x, x.weight, x.norm_weight, x.residual, y, x.x.stride(1),
        0 if x.residual is None else x.residual.stride(1), x.norm_eps, B * T, N, D,
        OUTPUTS=OUTPUTS, BLOCK=block, STEPS=-(-D // block), NORM=x.norm_weight is not None,
        RESIDUAL=x.residual is not None, SWIGLU=x.swiglu, OVERLAP=x.overlap, num_warps=WARPS, **_launch(x),
    )  # fmt: skip


def _tile(x: Inputs, y: Tensor) -> None:
    from ..triton.tile import tile_kernel

    assert x.residual is not None
    B, T, N = y.shape
    rows = next(n for n in TILES if n >= B * T)
    warps, stages = TILES[rows]
    tile_kernel[(-(-N // TILE_OUTPUTS),)](
        x.x, x.weight, x.residual, y, x.x.stride(1), x.residual.stride(1), B * T, N, x.x.shape[2],
        ROWS=rows, OUTPUTS=TILE_OUTPUTS, BLOCK=TILE_COLUMNS, STAGES=stages, OVERLAP=x.overlap, num_warps=warps,
        **_launch(x),
    )  # fmt: skip


def _launch(x: Inputs) -> dict[str, Any]:
    return {"launch_pdl": True} if x.overlap else {}


@functools.cache
def columns(D: int, swiglu: bool) -> int:
    """Columns of a weight with D of them that a program reads at a time, a power of two."""
    block = MOST_COLUMNS // (2 if swiglu else 1)
    while block > 256 and -D % block > MOST_IDLE * D:
        block //= 2
    return block


BACKEND = LinearStepBackend()
