"""The states of KDA layers in the cache of transformers' continuous batching, and what the engine lacks for them.

This file is imported by `enable_continuous_batching` alone: it needs names that older transformers do not have.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kda_layers.kernels.kda.contract import CHUNK, NO_SLOT
from kda_layers.modeling.checks import stored_dtype
from kda_layers.modeling.layer.slots import Slots
from kda_layers.modeling.models.configuration_kda import KDAFields
from kda_layers.modeling.seams import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    CacheAllocator,
    FullAttentionCacheAllocator,
    find_head_dim,
    stream_context,
)
from kda_layers.modeling.serving.continuous_batching import wraps
from kda_layers.modeling.serving.latent_allocator import as_planned, has_latents, latent_page
from kda_layers.modeling.serving.prefixes import Prefixes
from kda_layers.modeling.swap.families import IN_PLACE

logger = logging.getLogger("kda_layers")
KDA = "linear_attention"
ALIGNMENT = 128  # bytes, of each layer's states and their parts
DEFAULT_TOKENS = 32_768  # of all layers, which the cache has room for on a CPU


class StateAllocator(CacheAllocator):
    """Gives each request one block, its slot, for the states of all KDA layers, whatever its length.

    A slot is given before a request's first token, cleared then, and returned after its last. The engine's forks copy
    complete blocks. Further slots hold the states of prefixes (`Prefixes`).

    Attributes:
        stream: of the steps; None for the current one. Slots are cleared and copied there: after the steps before, and
            before all that uses them later.
    """

    stream: Any = None

    supports_block_sharing = True  # of prefixes, by copies
    supports_block_table = True  # a row of it is the slot
    layer_type = KDA
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
        check_config(config)
        (H, K), (HV, V), W = *heads_of(config), config.linear_conv_kernel_dim
        kept = stored_dtype(getattr(config, "linear_state_dtype", "float32"), cache_dtype)
        # Of one layer in a slot: what of `Slots.pools`, its dtype and shape.
        self.parts: list[tuple[torch.dtype, tuple[int, ...]]] = [(cache_dtype, (2 * H * K + HV * V, W))]
        self.parts += [(kept, (HV, V, K))] + [(torch.float32, (HV, V))] * (kept == torch.int8)
        needed = sum(map(_aligned_bytes, self.parts))
        # The engine hands out sectors, of the least common multiple of all blocks' sizes. It is a block here, if
        # rounded up to a multiple of a block of keys and values; otherwise it may be gigabytes.
        if has_latents(config):
            page = latent_page(config, cache_dtype, page_size)
        else:
            page = FullAttentionCacheAllocator.get_bytes_per_page(
                num_key_value_heads, find_head_dim(config), cache_dtype, page_size
            )
        blocks = [page * config.layer_types.count(kind) for kind in (FULL_ATTENTION, SLIDING_ATTENTION)]
        unit, layers = math.lcm(ALIGNMENT, *filter(None, blocks)), len(layer_indices)
        unit = math.lcm(ALIGNMENT, unit // math.gcd(unit, layers))
        self._before_cache_tensor_init(
            index=index,
            layer_indices=layer_indices,
            tokens_per_page=1,
            bytes_per_page=-(-needed // unit) * unit,
            allow_block_sharing=allow_block_sharing,
        )
        pages = page_size if FULL_ATTENTION in config.layer_types else 1
        self.ledger = self.prefixes = Prefixes(self, math.lcm(CHUNK, pages))

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        """Make views [slots, ...] of every layer's states; slots are strided by a block."""
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.spare = self.blocks_per_sector  # in the second sector, which nobody reads
        self.write_trash_index = NO_SLOT  # of padding tokens
        self.pools: dict[int, tuple[Tensor, ...]] = {}
        for i, layer_idx in enumerate(self.layer_indices):
            page = self._copy_view[:, i * self.bytes_per_page : (i + 1) * self.bytes_per_page]
            ends = itertools.accumulate(map(_aligned_bytes, self.parts))
            self.pools[layer_idx] = tuple(
                page[:, end - _aligned_bytes(part) :][:, : _bytes(part)].view(part[0]).unflatten(1, part[1])
                for part, end in zip(self.parts, ends, strict=True)
            )

    def step(
        self,
        position_ids: Tensor,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        write_index: Sequence[Tensor],
        block_table: Tensor | None = None,
        **_: Any,
    ) -> Slots:
        """Return the slots of a step from the keywords by which the engine calls a model.

        A padded step has sequences of length 0 and, after all sequences, tokens of none. These become one more sequence
        without a slot.

        Args:
            position_ids: [1, T], counted from the start of each request.
            cu_seq_lens_q: [N + 1] int32 offsets; the last may be less than T.
            max_length_q: length of the longest sequence; 1 if the step is made of block tables.
            write_index: for each allocator [T] int64, here the slot of each token's request, -1 at padding.
            block_table: [allocators, N, blocks] int32, here the slot in the first column, -1 at padding; None if
                write_index is used.
        """
        T, N = position_ids.shape[1], cu_seq_lens_q.shape[0] - 1
        if block_table is not None or (max_length_q == 1 and N == T):
            slots = write_index[self.index] if block_table is None else block_table[self.index, :, 0].long()
            offsets = torch.arange(T + 1, dtype=cu_seq_lens_q.dtype, device=cu_seq_lens_q.device)
            return Slots(self.pools, offsets, slots, True, self.spare)
        offsets = torch.cat((cu_seq_lens_q, cu_seq_lens_q.new_full((1,), T)))
        first = torch.cat((cu_seq_lens_q[:-1], cu_seq_lens_q.new_full((1,), T)))
        # One more token, as empty sequences may begin after the last one.
        slots = torch.nn.functional.pad(write_index[self.index], (0, 1), value=NO_SLOT)[first]
        empty = torch.nn.functional.pad(cu_seq_lens_q.diff() == 0, (0, 1), value=True)
        return Slots(self.pools, offsets, slots.masked_fill(empty, NO_SLOT), False, self.spare)

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return int(not self.block_table.get(request_id))

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        if not self.block_table.get(request_id):
            (slot,) = self.block_table[request_id] = self.pool.get_free_blocks(self.index, 1)
            with stream_context(self.stream):
                self._copy_view[slot].zero_()

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self.prefixes.forget(request_id)
        super().free_blocks(request_id, no_cache)

    def count_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        return 0  # a fork has a slot of its own

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Do nothing: states are kept as `Prefixes` plans them."""

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the states of all layers from one slot to another."""
        with stream_context(self.stream):
            self._copy_view[target].copy_(self._copy_view[source])

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return 0  # no keys

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return []

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return self.block_table[request_id] * query_length

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        block_table.fill_(self.block_table[request_id][0])  # faster than one element; no other column is read

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError("a KDA layer has no keys and values to update: it reads and writes its states in `Slots`")

    def get_cache_for_block_table(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        raise ValueError("a KDA layer has no keys and values: it reads and writes its states in `Slots`")


def _bytes(part: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return math.prod(part[1]) * part[0].itemsize


def _aligned_bytes(part: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return -(-_bytes(part) // ALIGNMENT) * ALIGNMENT


def default_blocks(page_size: int) -> int:
    """Return `num_blocks` on a CPU where neither it nor `max_memory_percent` is given.

    The engine would take 60 % of all memory, and use most of it for masks [1, 1, max_batch_tokens, tokens in cache].
    """
    return -(-DEFAULT_TOKENS // page_size)


def has_states(config: Any) -> bool:
    """Return True for the (text) configuration of a model with linear-attention layers."""
    return KDA in (getattr(config, "layer_types", None) or ())


def heads_of(config: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return number and width of the heads of q and k, and of the values, in layers of linear attention."""
    if hasattr(config, "linear_num_key_heads"):  # gated delta nets
        H, K = config.linear_num_key_heads, config.linear_key_head_dim
    else:
        H, K = config.linear_num_heads, config.linear_head_dim
    # Configurations of transformers' own KDA models have no heads and widths of values alone.
    return (H, K), (getattr(config, "linear_num_value_heads", H), getattr(config, "linear_value_head_dim", K))


def check_config(config: Any) -> None:
    """Raise a ValueError unless the engine can serve models of this configuration, which has KDA layers."""
    kind = f"a {config.model_type} model"
    others = [k for k in config.layer_types if k not in (KDA, FULL_ATTENTION, SLIDING_ATTENTION)]
    if others:
        what = "keys of its indexer besides" if others[0] == "indexed_attention" else "something else"
        raise ValueError(
            f"continuous batching does not serve {kind}: transformers' paged cache has room for keys and values, and "
            f"{others[0]} keeps {what}. Use generate"
        )
    if not (isinstance(config, KDAFields) or config.model_type.removesuffix("_text") in IN_PLACE):
        raise ValueError(
            f"continuous batching does not serve {kind}: its linear-attention layers are not those of kda_layers. "
            "Use generate"
        )
    if getattr(config, "attention_bias", None) == "key":
        raise ValueError(
            "continuous batching does not serve attention_bias='key': transformers' paged cache has no place for the "
            "bias of a key. Use generate"
        )


@wraps("PagedAttentionCache.__init__")
def finish_cache(
    init: Callable[..., None], self: Any, config: Any, continuous_batching_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Check a cache with states, and derive what does not hold for them."""
    options = continuous_batching_config
    if not has_states(config):
        return init(self, config, options, *args, **kwargs)
    config = as_planned(config)
    # The engine then restores a request as of one token earlier, and computes that token again.
    if options.use_async_batching and options.cpu_offload_space != 0:
        raise ValueError(
            f"cpu_offload_space must be 0 with use_async_batching=True, got {options.cpu_offload_space}: a state "
            "cannot take a token back. Set use_async_batching=False in ContinuousBatchingConfig to keep it"
        )
    try:
        init(self, config, options, *args, **kwargs)
    except MemoryError as error:
        if options.num_blocks != default_blocks(options.page_size):
            raise
        logger.warning("no memory for the default num_blocks=%d, the engine chooses: %s", options.num_blocks, error)
        init(self, config, replace(options, num_blocks=None), *args, **kwargs)
    allocators = self.cache_allocators
    if self.num_sectors < len(allocators):
        raise ValueError(
            f"the cache must hold a slot and keys and values of at least one request, {len(allocators)} parts of "
            f"{self.bytes_per_sector} bytes, got room for {self.num_sectors}: raise num_blocks (now "
            f"{options.num_blocks}) or max_memory_percent of ContinuousBatchingConfig"
        )
    others = [a for kind, a in allocators.items() if kind != KDA]
    # A state is read in one piece. Reading it is not limited, while transformers would count the tokens before.
    if not others:
        self.read_cache_limit = 0
    elif len(others) == 1 and others[0].layer_type == SLIDING_ATTENTION:
        self.read_cache_limit = others[0].sliding_window
    if self.max_blocks_per_request and all(a.supports_block_table for a in others):
        pages = [a.tokens_per_page for a in others]
        self.max_decode_fast_path_length = min(pages) * self.max_blocks_per_request if pages else sys.maxsize
    states = allocators[KDA]
    logger.info("states of at most %d requests, %d bytes each", states.num_blocks, states.bytes_per_block)


@wraps("PagedAttentionCache.search_prefix_match")
def match_prefix(search: Callable[..., int], self: Any, request_id: str, prompt_ids: list[int]) -> int:
    """Begin a request of a model with KDA layers with the longest prefix whose pages and states are both there."""
    states = self.cache_allocators.get(KDA)
    if states is None or not self.use_prefix_sharing:
        return search(self, request_id, prompt_ids)
    return states.prefixes.match(self, request_id, prompt_ids)


@wraps("ContinuousBatchingIOs._setup_static_tensors")
def add_static_tensors(setup: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Make the tensors of KDA layers, too: the engine names full and sliding attention only."""
    setup(self, *args, **kwargs)
    if KDA not in self.cache.cache_allocators:
        return
    rows = self.max_requests_per_batch + 1
    self.cumulative_seqlens_k[KDA] = torch.zeros(rows, dtype=torch.int32, device=self.device)
    self.total_seqlen_k[KDA] = self.max_length_k[KDA] = 0
    if len(self.cache.cache_allocators) == 1:  # for no layer, though the engine would fill a mask for each request
        self.attention_mask = None
    if self.attention_mask is not None:  # of no keys
        size = (1, 1, self.cache.max_batch_tokens, 0)
        self.attention_mask[KDA] = torch.empty(size, dtype=self.model_dtype, device=self.device)
