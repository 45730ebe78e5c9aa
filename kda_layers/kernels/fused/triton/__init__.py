"""Parts of Triton kernels of several operators. Files here import triton: only kernels import them."""
