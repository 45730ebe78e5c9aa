"""Qwen4: the gated delta nets of Qwen3.5 next to indexed softmax attention, and embeddings of n-grams."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_layers.modeling.swap.gated_delta import GatedDeltaFamily
from kda_layers.modeling.swap.in_place import prepare_layout


def prepare_masks(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Apply `prepare_layout`; a mask of scores becomes one mask per type of layer.

    Raises:
        ValueError: packed sequences in a model with embeddings of n-grams, which would span them.
    """
    kwargs, _, layout = prepare_layout(model, args, kwargs)
    if layout.cu_seqlens is not None and model.config.ple_layer_ids:
        raise ValueError(
            f"{type(model).__name__} must get one sequence in each row, got {layout.cu_seqlens.shape[0] - 1} packed "
            f"ones: its embeddings of n-grams, before layers {model.config.ple_layer_ids}, would span them"
        )
    mask = layout.attention_mask
    if isinstance(mask, Tensor) and mask.ndim == 4:
        mask = dict(indexed_attention=mask, linear_attention=layout.padding)
    return (), kwargs | {"attention_mask": mask}


FAMILY = GatedDeltaFamily(
    model_type="qwen4_exp",
    base_name="Qwen4ExpTextModel",
    stock_name="Qwen4ExpTextGatedDeltaNet",
    prepare_call=prepare_masks,
)
__getattr__ = FAMILY.layer_by_name
