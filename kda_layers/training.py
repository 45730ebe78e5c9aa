"""Training: a step in one CUDA graph, and the groups of an optimizer."""

from kda_layers import versions

versions.require_transformers("training")

# ruff: noqa: E402
from kda_layers.modeling.cuda_graphs.training_step import CapturedStep
from kda_layers.modeling.models.parameter_groups import parameter_groups

__all__ = ["CapturedStep", "parameter_groups"]
