"""Our CUDA kernels on GPUs of compute capability 12.0 (RTX 50): compiled in every test run, never run on one.

So flash-linear-attention comes first; ask for them by name. They decode; the forward needs more shared memory.
"""

from __future__ import annotations

from ..cuda.backend import CudaBackend

BACKEND = CudaBackend("sm120", 4, (120,))
