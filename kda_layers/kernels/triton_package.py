"""Find Triton, which runs on CUDA or, for tests, in its interpreter on a CPU. Backends import it where they launch."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any

import torch
from torch import Tensor


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


def even_rows(t: Tensor) -> Tensor:
    """Return t [B, T, D] with contiguous rows at one stride, also across the batch: t itself if it is so."""
    B, T, D = t.shape
    evenly = B == 1 or t.stride(0) == T * t.stride(1)
    if evenly and (D == 1 or t.stride(2) == 1):
        return t
    return t.clone(memory_format=torch.contiguous_format)  # contiguous() leaves any stride where a size is 1
