"""Triton kernels of swiglu. Files with kernels import triton: they are imported where they are launched."""
