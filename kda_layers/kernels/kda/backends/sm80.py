"""Our CUDA kernels on GPUs of compute capability 8.x (A100, RTX 30, 40): compiled in every test run, never run on one.

So flash-linear-attention comes first; ask for them by name.
"""

from __future__ import annotations

from ..cuda.backend import CudaBackend

BACKEND = CudaBackend("sm80", 5, (80, 86, 87, 89))
