"""Parts of Triton kernels of several operators. Files here import triton: only kernels import them."""

from ...compilers import wait

wait()  # before the first kernel is compiled
