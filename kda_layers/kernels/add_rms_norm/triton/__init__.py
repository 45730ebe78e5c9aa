"""Triton kernels of add_rms_norm. Files with kernels import triton: they are imported where they are launched."""
