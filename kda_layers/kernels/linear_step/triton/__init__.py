"""Triton kernels of linear_step. Files with kernels import triton: they are imported where they are launched."""
