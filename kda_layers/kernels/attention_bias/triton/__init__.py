"""Triton kernels of biased_attention. Files with kernels import triton: they are imported where they are launched."""
