"""Triton kernels of short_conv. Files with kernels import triton: they are imported where they are launched."""
