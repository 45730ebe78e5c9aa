"""Pages of latents in the cache of transformers' continuous batching, for softmax layers with latent attention (MLA).

This file is imported by `enable_continuous_batching` alone: it needs names that older transformers do not have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_layers.modeling.seams import FullAttentionCacheAllocator


class LatentAllocator(FullAttentionCacheAllocator):
    """Gives pages that hold of each token its latent and the positional part of its key, one of each for all heads.

    That is what transformers' layers cache; they expand it to the keys and values of all heads in each call. Pages of
    the engine's own allocator hold keys and values of every head, both of one width.
    """

    supports_block_table = False  # flash attention would read keys and values from the pages
    rows_per_token = 1

    def __init__(
        self,
        index: int,
        config: Any,
        num_key_value_heads: int,
        cache_dtype: torch.dtype,
        page_size: int,
        layer_indices: list[int],
        allow_block_sharing: bool,
    ):
        """Compute sizes; the arguments are those of the engine's other allocators."""
        self.widths, self.cache_dtype = [config.kv_lora_rank, config.qk_rope_head_dim], cache_dtype
        self._before_cache_tensor_init(
            index=index,
            layer_indices=layer_indices,
            tokens_per_page=page_size,
            bytes_per_page=latent_page(config, cache_dtype, page_size),
            allow_block_sharing=allow_block_sharing,
        )

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        """Make views [tokens of all layers, kv_lora_rank + qk_rope_head_dim], which begin with a layer's first page."""
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        rows = cache_tensor.view(self.cache_dtype).view(-1, sum(self.widths))
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, rows, pool)
        self.rows = {layer: rows[i * self.tokens_per_page :] for i, layer in enumerate(self.layer_indices)}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, read_index: Tensor, write_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store the latents [T, 1, kv_lora_rank] and positional keys [T, 1, qk_rope_head_dim] of a step's tokens.

        Return both [S, 1, ...] of the S tokens at `read_index`; of the step's own if that is empty: no request has
        earlier ones.
        """
        rows = self.rows[layer_idx]
        rows.index_copy_(0, write_index, torch.cat((key_states, value_states), -1)[:, 0])
        if read_index.numel() == 0:
            return key_states, value_states
        latents, keys = rows.index_select(0, read_index)[:, None].split(self.widths, -1)
        return latents, keys


def has_latents(config: Any) -> bool:
    """Return True for the (text) configuration of a model with latent attention beside KDA layers."""
    kinds = getattr(config, "layer_types", None) or ()
    return "linear_attention" in kinds and getattr(config, "kv_lora_rank", None) is not None


def latent_page(config: Any, dtype: torch.dtype, page_size: int) -> int:
    """Return the bytes of one layer's page of `page_size` tokens."""
    return page_size * (int(config.kv_lora_rank) + int(config.qk_rope_head_dim)) * dtype.itemsize


def with_latents(stock: Any) -> Callable[..., Any]:
    """Return what makes the allocator of full attention: a `LatentAllocator` where it fits, otherwise a `stock` one."""

    def make(*, config: Any, **kwargs: Any) -> Any:
        return (LatentAllocator if has_latents(config) else stock)(config=config, **kwargs)

    make.supports_block_table = stock.supports_block_table  # type: ignore[attr-defined]
    return make


def as_planned(config: Any) -> Any:
    """Return the configuration by which the engine plans its memory: it counts 2 * heads * head_dim for a token.

    That is what a token's latents take. Expanded, which is only during a call, a token takes its keys and values and
    the product that they are cut from. The engine counts two tensors of `num_attention_heads` for that.
    """
    if not has_latents(config):
        return config
    planned = copy.copy(config)
    expanded = 2 * (config.qk_nope_head_dim + config.v_head_dim) + config.qk_rope_head_dim
    planned.num_key_value_heads = 1
    planned.head_dim = -(-max(config.kv_lora_rank + config.qk_rope_head_dim, expanded) // 2)
    return planned
