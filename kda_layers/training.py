"""Training: a step in one CUDA graph, alone or in a Trainer, and the groups of an optimizer."""

from typing import TYPE_CHECKING, Any

from kda_layers import versions

versions.require_transformers("training")

# ruff: noqa: E402
from kda_layers.modeling.cuda_graphs.training_step import CapturedStep
from kda_layers.modeling.models.parameter_groups import parameter_groups

if TYPE_CHECKING:
    from kda_layers.modeling.cuda_graphs.trainer import CapturedTrainer as CapturedTrainer

__all__ = ["CapturedStep", "CapturedTrainer", "parameter_groups"]


def __getattr__(name: str) -> Any:
    if name == "CapturedTrainer":  # Trainer takes seconds to import
        from kda_layers.modeling.cuda_graphs.trainer import CapturedTrainer

        return CapturedTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
