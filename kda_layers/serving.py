"""Continuous batching by the engine of transformers, and speculative decoding."""

from kda_layers import versions

versions.require_transformers("serving")

# ruff: noqa: E402
from kda_layers.modeling.serving.continuous_batching import enable_continuous_batching
from kda_layers.modeling.swap.swap import enable_speculative_decoding

__all__ = ["enable_continuous_batching", "enable_speculative_decoding"]
