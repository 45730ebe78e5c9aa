"""States of KDA layers in the slots of a pool, as a serving engine keeps them: the second source of states of a layer.

A cache of transformers holds the states of one batch. An engine holds those of all requests, each in a slot of its own,
and runs steps of any sequences among them. `Slots` describes one step; the model passes it to KDA layers in place of a
cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Slots:
    """The sequences of one step and the slots of their states. Nothing here is read by the host.

    Attributes:
        cu_seqlens: [N + 1] offsets of the packed sequences.
        index: [N] int64, the slot of each sequence; -1 for padding, whose states are 0 and are not kept.
        one_each: True if each sequence has one token, so that N = T.
    """

    def __init__(
        self,
        pools: Mapping[int, tuple[Tensor, Tensor]],
        cu_seqlens: Tensor,
        index: Tensor,
        fresh: Tensor,
        one_each: bool,
        spare: int,
    ):
        """Describe a step.

        Args:
            pools: for each layer the states of its convolution [slots, D, W] and its recurrent states
                [slots, HV, V, K]; slots may have any stride.
            cu_seqlens, index, one_each: see the class.
            fresh: [N] bool, True for sequences that start here: what their slots hold is from another request.
            spare: a slot of no sequence, which may be overwritten.
        """
        self.pools, self.cu_seqlens, self.index, self.one_each = pools, cu_seqlens, index, one_each
        padding = index < 0
        self.empty = fresh | padding
        self.read = index.clamp(min=0)
        self.written = torch.where(padding, spare, index)
        self.cleared = torch.where(self.empty & ~padding, index, spare)


def read_slots(
    *,
    cache: Any,
    position_ids: Tensor,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    write_index: Sequence[Tensor],
    block_table: Tensor | None = None,
    **_: Any,
) -> Slots | None:
    """Return the slots of a model's call by transformers' continuous batching, None for a model without KDA layers."""
    allocator = cache.cache_allocators.get("linear_attention")
    if allocator is None:
        return None
    return allocator.step(position_ids, cu_seq_lens_q, max_length_q, write_index, block_table)


class SlotState:
    """The states of one layer in the slots of a step, with what the layer asks of `state.LayerState`."""

    cached, recording = True, False

    def __init__(self, slots: Slots, layer_idx: int):
        self.slots = slots
        self._conv_pool, self.pool = slots.pools[layer_idx]

    @property
    def conv(self) -> Tensor:
        """[N, D, W] inputs of the short convolution before this step, a copy."""
        return self._gather(self._conv_pool)

    def write_conv(self, state: Tensor, x: Tensor) -> None:
        """Store the states of the convolution [N, D, W]; the engine counts the tokens x."""
        self._conv_pool.index_copy_(0, self.slots.written, state.to(self._conv_pool.dtype))

    def clear(self) -> None:
        """Set the recurrent states of sequences that start here to 0: the operator reads the pool itself."""
        self.pool.index_fill_(0, self.slots.cleared, 0)

    def _gather(self, pool: Tensor) -> Tensor:
        states = pool.index_select(0, self.slots.read)
        # Filled, not multiplied: what the last request left there may be NaN.
        return states.masked_fill_(self.slots.empty.view(-1, *[1] * (pool.ndim - 1)), 0)
