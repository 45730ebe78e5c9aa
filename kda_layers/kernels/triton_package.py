"""Base class of backends that launch Triton kernels, on CUDA or, for tests, on a CPU by Triton's interpreter.

Triton is imported at the first launch.
"""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from . import torch_private
from .declarations import AtLeast, Backend, OneOf

FLOATS = OneOf(torch.bfloat16, torch.float16, torch.float32)


def is_installed() -> bool:
    """True if triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def interprets() -> bool:
    """True if Triton's interpreter runs kernels on a CPU (TRITON_INTERPRET=1)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def on_device_of(t: Tensor) -> Any:
    """Context in which kernels are launched on the device of `t`."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


class RepeatedLaunch:
    """Launches of a Triton kernel on one device that differ only in the addresses of tensors.

    Triton specialises on every argument, and looking up the compiled kernel takes longer than launching it. Here only
    the alignment of the addresses is checked, which compiled code relies on.
    """

    def __init__(self, kernel: Any, grid: int, rest: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Prepare launches.

        Args:
            kernel: takes the tensors of a call, then `rest`.
            grid: number of programs.
            rest: numbers and constants, in the kernel's order.
            options: of Triton, such as num_warps.
        """
        self._kernel, self._grid, self._rest, self._options = kernel, (grid, 1, 1), rest, options
        self._compiled: Any = None  # for addresses aligned to 16 bytes

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the current stream of the tensors' device."""
        first, aligned = tensors[0], True
        assert first is not None
        if first.is_cuda and torch_private.current_device() != first.device.index:
            with torch.cuda.device(first.device):
                return self(*tensors)
        for t in tensors:
            if t is not None and t.data_ptr() & 15:
                aligned = False
        if aligned and self._compiled is not None:
            self._compiled[self._grid](*tensors, *self._rest)
            return None
        compiled = self._kernel[self._grid](*tensors, *self._rest, **self._options)  # None in the interpreter
        if aligned:
            self._compiled = compiled
        return None


def even_rows(t: Tensor) -> Tensor:
    """Return t [B, T, D] with contiguous rows at one stride, also across the batch: t itself if it is so."""
    B, T, D = t.shape
    evenly = B == 1 or t.stride(0) == T * t.stride(1)
    if evenly and (D == 1 or t.stride(2) == 1):
        return t
    return t.clone(memory_format=torch.contiguous_format)  # contiguous() leaves any stride where a size is 1


class OnTriton(Backend):
    """Triton kernels of this package: any CUDA GPU, 16 bits and fp32; for tests also Triton's interpreter."""

    name = "triton"
    serves = {"dtype": FLOATS}  # noqa: RUF012

    @property
    def priority(self) -> int:  # type: ignore[override]
        """20, or -10 without a GPU: Triton's interpreter serves only calls that name the backend."""
        return 20 if torch.cuda.is_available() else -10

    def more_reasons(self, problem: Any) -> list[str]:
        reasons = []
        if problem.device == "cuda" and (refused := AtLeast(80, "sm_").refuses(problem.arch)):
            reasons.append(f"arch {refused}")
        if problem.device not in ("cuda", "cpu"):
            reasons.append(f"device is {problem.device}, needs cuda")
        elif not is_installed():
            reasons.append("triton is not installed")
        elif problem.device == "cpu" and not interprets():
            reasons.append("device is cpu, needs cuda")
        return reasons
