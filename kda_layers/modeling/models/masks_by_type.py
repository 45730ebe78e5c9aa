"""The masks of a model with KDA and softmax layers: one for each type of layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from kda_layers.modeling.inputs.cache_argument import takes_cache
from kda_layers.modeling.inputs.packing import Layout, read_layout
from kda_layers.modeling.models.key_bias import create_key_mask
from kda_layers.modeling.seams import CACHE, Cache, create_causal_mask, create_sliding_window_causal_mask

MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


def masks_by_type(
    config: PreTrainedConfig, inputs_embeds: Tensor, layout: Layout, cache: Cache | None
) -> dict[str, Any]:
    """Return the mask of each type of layer: padding [B, T] or None for KDA, transformers' masks for softmax layers.

    Each mask is made with the index of a layer of its type, whose cache knows the lengths. Without the index,
    transformers 5.17 takes a KDA layer for one of full attention if other layers have sliding windows.
    """
    kinds = config.layer_types[: config.num_hidden_layers]  # fewer where `generate` exits early
    # In a variant's configuration the field is a bool: projections with biases or without.
    biased = getattr(config, "attention_bias", None) == "key"
    functions = MASKS | ({"full_attention": create_key_mask} if biased else {})
    return {"linear_attention": layout.padding} | {
        kind: functions[kind](
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=layout.attention_mask,
            **{CACHE: cache},
            position_ids=layout.positions,  # None unless packed: transformers would read their values
            layer_idx=kinds.index(kind),
        )
        for kind in dict.fromkeys(kinds)
        if kind != "linear_attention"
    }


def masks_of_engine(config: PreTrainedConfig, attention_mask: Tensor | dict[str, Tensor] | None) -> dict[str, Any]:
    """Return the mask of each type of layer that transformers' continuous batching made: one, or one of each type."""
    masks = attention_mask if isinstance(attention_mask, dict) else dict.fromkeys(config.layer_types, attention_mask)
    return masks | {"linear_attention": None}


@takes_cache
def masks_for_generate(
    config: PreTrainedConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    **_: Any,
) -> dict[str, Any] | None:
    """Return `masks_by_type` for generate, before a compiled forward that cannot read the values of a mask.

    None if no layer needs a mask: PEFT, which lengthens masks by a prompt's virtual tokens, takes no dict of None.
    """
    layout = read_layout(inputs_embeds, attention_mask, None, cache)
    if layout.cu_seqlens is not None:
        raise ValueError("attention_mask must hold one document in each row to generate, got packed documents")
    masks = masks_by_type(config, inputs_embeds, layout, cache)
    return masks if any(mask is not None for mask in masks.values()) else None
