"""States of a KDA layer in int8, for `kda_step`."""

from kda_layers.kernels.kda.int8_state import dequantize_state, quantize_state

__all__ = ["dequantize_state", "quantize_state"]
