"""Triton kernels of gated_norm. Files with kernels import triton: they are imported where they are launched."""
