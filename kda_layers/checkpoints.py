"""Weights in the names and files of other projects, and the classes of converted models.

`KDALlamaConfig`, `KDALlamaModel`, `KDALlamaForCausalLM`, and those of the other families that `convert_attention`
converts, are here for the code that is saved with a checkpoint: its imports are part of the checkpoint's format.
"""

from typing import TYPE_CHECKING, Any

from kda_layers import versions

versions.require_transformers("checkpoints")

# ruff: noqa: E402
from kda_layers.modeling.checkpoints.weights import export_kda_weights, kda_layer_options, load_kda_weights

if TYPE_CHECKING:
    from kda_layers.modeling.checkpoints.fla_checkpoint import convert_fla_checkpoint

__all__ = ["convert_fla_checkpoint", "export_kda_weights", "kda_layer_options", "load_kda_weights"]


def __getattr__(name: str) -> Any:
    """Import on first use what imports models, which takes a second."""
    if name == "convert_fla_checkpoint":
        from kda_layers.modeling.checkpoints import fla_checkpoint

        return fla_checkpoint.convert_fla_checkpoint
    if name.startswith("KDA"):
        from kda_layers.modeling.models import VARIANTS, variant

        ours = tuple(config.removesuffix("Config") for config in VARIANTS.values())
        if name.startswith(ours) and hasattr(variant, name):
            return getattr(variant, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
