"""Softmax attention with a bias for each key, computed from the key's values: bias and cache.

Trainable Dynamic Mask Sparse Attention, arXiv 2508.02124, has this bias; `biased_attention` gives its full gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedConfig

from kda_layers.kernels.checks import accumulator_dtype
from kda_layers.modeling.seams import Cache, StaticLayer


def key_bias(dt: Tensor, A: Tensor) -> Tensor:
    """Return exp(A softplus(dt)) [..., heads] for dt [..., heads] and A [heads].

    It is rounded once, to the dtype of dt, which is that of the values: a cached bias then equals the one in training.
    """
    inner = accumulator_dtype(dt.dtype)
    # Not torch's softplus: under torch.compile its backward can return other strides than it announced.
    softplus = torch.logaddexp(dt.to(inner), torch.zeros((), dtype=inner, device=dt.device))
    return torch.exp(A.to(inner) * softplus).to(dt.dtype)


def with_past(
    k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, cache: Cache | None, layer_idx: int
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return keys, values and biases of the tokens in the cache and of these, for `biased_attention`.

    Args:
        k, v: [B, T, H_kv, D], of these tokens.
        bias: [B, T, H] or [B, T, H_kv], of these tokens.
        mask: False, or a negative number, where a key is hidden. [1|B, 1, 1, S] applies to all queries and adds
            causality; [1|B, 1, T, S] is the full mask and costs memory for T S scores.
        cache: updated; keeps the bias of past keys beside their values.
        layer_idx: index of the layer in the cache.

    Returns:
        k, v [B, S, H_kv, D]; bias [B, H or H_kv, 1|T, S], with the mask; True if the operator must add causality.
    """
    T, static = k.shape[1], False
    bias = bias.transpose(1, 2)[:, :, None]  # [B, H or H_kv, 1, T]
    if cache is not None:
        k, v, bias = _update(cache, layer_idx, k, v, bias)
        static = isinstance(cache.layers[layer_idx], StaticLayer)
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
    causal = mask is None or mask.shape[2] == 1
    if static and causal and T > 1:
        # A static cache ends with empty slots, but the operator lets the last query see the last key: rotate the slots
        # until the empty ones, which the mask hides, are in front.
        slots = torch.arange(k.shape[1], device=k.device)
        order = (slots + cache.get_seq_length(layer_idx)) % k.shape[1]
        k, v, bias = k.index_select(1, order), v.index_select(1, order), bias.index_select(3, order)
    return k, v, bias, causal


def _update(cache: Cache, layer_idx: int, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add k, v [B, T, H_kv, D] and bias [B, H or H_kv, 1, T] to a cache; return those of all its slots.

    The biases of a key head's queries are cached as further channels of its values. Whatever any class of cache does
    with values (growing, static buffers, beams, cropping, offloading) then applies to them too, and they are exact, as
    they have the values' dtype. Computing them again from all cached values, as transformers' Doge does, would cost
    each decode step the projection dt_proj of all past tokens.
    """
    H_kv, D = v.shape[2:]
    values = torch.cat((v.transpose(1, 2), rearrange(bias, "b (h g) 1 t -> b h t g", h=H_kv)), -1)
    held = getattr(cache.layers[layer_idx], "values", None) if layer_idx < len(cache.layers) else None
    if held is not None and held.numel() and held.shape[-1] != values.shape[-1]:
        raise ValueError(
            f"cache must hold values of {values.shape[-1]} channels in layer {layer_idx}, {D} and a key's "
            f"{values.shape[-1] - D} biases, got {held.shape[-1]}: it was filled by other layers, or initialised early"
        )
    k, values = cache.update(k.transpose(1, 2), values, layer_idx)
    bias = rearrange(values[..., D:], "b h s g -> b (h g) 1 s")
    return k.transpose(1, 2), values[..., :D].transpose(1, 2), bias


def refuse_weights(config: PreTrainedConfig, kwargs: dict[str, Any]) -> None:
    """Raise a ValueError if attention weights are requested: no tensor of their size exists."""
    if kwargs.get("output_attentions") or config.output_attentions:
        raise ValueError("output_attentions must be False: attention with a bias for each key never has its weights")
