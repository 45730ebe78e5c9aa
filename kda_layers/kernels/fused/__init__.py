"""Operators around a layer's core, one file each, and the mechanism that makes them operators of the registry."""

from . import add_rms_norm, gated_norm, linear_cross_entropy, linear_step, short_conv, swiglu

__all__ = ["add_rms_norm", "gated_norm", "linear_cross_entropy", "linear_step", "short_conv", "swiglu"]
