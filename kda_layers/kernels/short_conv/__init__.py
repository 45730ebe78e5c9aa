"""Depthwise causal convolution with SiLU."""
