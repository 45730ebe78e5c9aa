"""The masks of a model with KDA and softmax layers: one for each type of layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from kda_layers.modeling.inputs.arguments import takes_cache
from kda_layers.modeling.inputs.sequences import Layout, read_layout
from kda_layers.modeling.seams import CACHE, Cache, create_causal_mask, create_sliding_window_causal_mask

MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


def masks_by_type(
    config: PreTrainedConfig, inputs_embeds: Tensor, layout: Layout, cache: Cache | None
) -> dict[str, Any]:
    """Return the mask of each type of layer: padding [B, T] or None for KDA, transformers' masks for softmax layers.

    A dict of masks in the layout is returned as it is. Each mask is made with the index of a layer of its type, whose
    cache knows the lengths. Without the index, transformers 5.17 takes a KDA layer for one of full attention if other
    layers have sliding windows.
    """
    if isinstance(layout.attention_mask, dict):
        return layout.attention_mask
    kinds = config.layer_types[: config.num_hidden_layers]  # fewer where `generate` exits early
    # In a variant's configuration the field is a bool: projections with biases or without.
    biased = getattr(config, "attention_bias", None) == "key"
    functions = MASKS | ({"full_attention": create_key_mask} if biased else {})
    masks: dict[str, Any] = {"linear_attention": layout.padding}
    for kind in dict.fromkeys(kinds):
        if kind == "linear_attention":
            continue
        if not biased and _is_causal_alone(config, kind, inputs_embeds, layout, cache):
            masks[kind] = None
            continue
        masks[kind] = functions[kind](
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=layout.attention_mask,
            **{CACHE: cache},
            position_ids=layout.positions,  # None unless packed: transformers would read their values
            layer_idx=kinds.index(kind),
        )
    return masks


def _is_causal_alone(
    config: PreTrainedConfig, kind: str, inputs_embeds: Tensor, layout: Layout, cache: Cache | None
) -> bool:
    """Return True if `is_causal` of SDPA is all that is needed.

    transformers then makes no mask either, except while a CUDA graph is captured. With that mask, the captured step
    would run a slower SDPA kernel than the eager step and return other bits.
    """
    hides = any(part is not None for part in (layout.attention_mask, layout.cu_seqlens, layout.positions, cache))
    if hides or config._attn_implementation != "sdpa" or torch.compiler.is_compiling():
        return False
    return kind == "full_attention" or inputs_embeds.shape[1] < config.sliding_window


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


@takes_cache
def create_key_mask(
    config: PreTrainedConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    position_ids: Tensor | None = None,
    layer_idx: int = 0,
) -> Tensor | None:
    """Return the mask that `with_past` takes; called as transformers' mask functions are.

    Args:
        inputs_embeds: [B, T, D]; only its shape and device are read.
        attention_mask: [B, S], nonzero for real tokens, S counting those in the cache and these; a mask with 4
            dimensions is returned as it is.
        cache, layer_idx: the cache, before these tokens, and the layer that knows its lengths.
        config, position_ids: ignored.

    Returns:
        [1|B, 1, 1, S] bool, False for padding and for the empty slots of a static cache; None if nothing is hidden.

    Raises:
        ValueError: a mask of a wrong rank or size.
    """
    if attention_mask is not None and attention_mask.ndim == 4:
        return attention_mask
    B, T = inputs_embeds.shape[:2]
    slots, filled = T, T
    if cache is not None:
        slots, filled = cache.get_mask_sizes(T, layer_idx)[0], cache.get_seq_length(layer_idx) + T
    counted = not isinstance(filled, Tensor)  # a static cache counts on the device
    if attention_mask is None:
        if counted and slots == filled:
            return None
        return (torch.arange(slots, device=inputs_embeds.device) < filled)[None, None, None]
    least = filled if counted else T
    if attention_mask.ndim != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < least:
        raise ValueError(
            f"attention_mask must have shape [{B}, {least}] or 4 dimensions, got {list(attention_mask.shape)}"
        )
    mask = attention_mask.to(device=inputs_embeds.device, dtype=torch.bool)
    return pad(mask, (0, slots - mask.shape[1]))[:, None, None]
