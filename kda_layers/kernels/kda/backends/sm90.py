"""Our CUDA kernels on Hopper GPUs (H100, H200)."""

from __future__ import annotations

from ..cuda.backend import CudaBackend

BACKEND = CudaBackend("sm90", 20, (90,))
