"""Our CUDA kernels on data-centre Blackwell GPUs (B200, GB300): compiled in every test run, never run on one."""

from __future__ import annotations

from ..cuda.backend import CudaBackend

BACKEND = CudaBackend("sm100", 30, (100, 103))
