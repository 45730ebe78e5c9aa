"""The states of one layer in the slots of a serving engine's pool during one step, and the operators on them.

An engine holds the states of all requests, each in its own slot, and runs steps of any sequences among them. `Slots`
describes one step; the model passes it to KDA layers in place of a cache (`SlotState`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.kda.contract import NO_SLOT
from ...kernels.kda.int8_state import dequantize_state, quantize_state
from ...kernels.kda.op import kda_prefill, kda_step


class Slots:
    """The sequences of one step and the slots of their states, which are 0 before a sequence's first token. Nothing
    here is read by the host.

    Attributes:
        cu_seqlens: [N + 1] offsets of the packed sequences.
        index: [N] int64, the slot of each sequence; -1 for padding, whose states are not kept.
        one_each: True if each sequence has one token, so that N = T.
    """

    def __init__(
        self,
        pools: Mapping[int, tuple[Tensor, ...]],
        cu_seqlens: Tensor,
        index: Tensor,
        one_each: bool,
        spare: int,
    ):
        """Describe a step.

        Args:
            pools: for each layer the states of its convolution [slots, D, W], its recurrent states [slots, HV, V, K]
                and, if they are int8, the scales of their rows [slots, HV, V]; slots may have any stride.
            cu_seqlens, index, one_each: see the class.
            spare: a slot of no sequence, which may be overwritten.
        """
        self.pools, self.cu_seqlens, self.index, self.one_each = pools, cu_seqlens, index, one_each
        self.read, self.written = (torch.where(index < 0, slot, index) for slot in (0, spare))


@dataclass(frozen=True)
class PooledState:
    """The pools of one layer for a decode step of a token in each slot, with what its plan asks of `LayerState`."""

    conv: Tensor  # [slots, D, W]
    recurrent: Tensor  # [slots, HV, V, K]
    index: Tensor  # [N], the slots
    cached: ClassVar[bool] = True
    recording: ClassVar[bool] = False

    def count(self, x: Tensor) -> None:
        """Do nothing: the engine counts tokens."""


class SlotState:
    """The states of one layer in the slots of a step, with what the layer asks of `LayerState`."""

    cached, recording = True, False

    def __init__(self, slots: Slots, layer_idx: int):
        self.slots, self.one_each = slots, slots.one_each
        self._conv_pool, self.pool, *scales = slots.pools[layer_idx]
        self.scales: Tensor | None = scales[0] if scales else None

    @property
    def conv(self) -> Tensor:
        """[N, D, W] inputs of the short convolution before this step, a copy."""
        return self._conv_pool.index_select(0, self.slots.read)

    @property
    def step(self) -> PooledState:
        """The states for a kernel that updates them in their slots."""
        return PooledState(self._conv_pool, self.pool, self.slots.index)

    @property
    def conv_into(self) -> tuple[Tensor, Tensor]:
        """The pool of the convolution's states, and the slots that the states after this step are written to."""
        return self._conv_pool, self.slots.written

    def write_conv(self, state: Tensor | None, x: Tensor) -> None:
        """Do nothing: the state is in its slot (`conv_into`), and the engine counts the tokens x."""

    def attend(self, inputs: Sequence[Tensor], options: dict[str, Any], recompute: dict[str, Any]) -> Tensor:
        """Run the operator on q, k, v, g, beta of packed sequences and update the states in their slots; return o."""
        slots, pool = self.slots, self.pool
        if not slots.one_each:
            q, k, v, g, beta = inputs
            if self.scales is not None:
                return self._prefill_int8(inputs, self.scales, options)
            return kda_prefill(q, k, v, g, beta, pool, state_indices=slots.index, **options).o
        q, k, v, g, beta = (t.transpose(0, 1) for t in inputs)
        options = options | dict(cu_seqlens=None, state_scale=self.scales)
        return kda_step(q, k, v, g, beta, pool, state_indices=slots.index, **options).transpose(0, 1)

    def _prefill_int8(self, inputs: Sequence[Tensor], scales: Tensor, options: dict[str, Any]) -> Tensor:
        """`attend` by `kda_prefill`, which takes no int8 states, on copies of the step's states in fp32."""
        q, k, v, g, beta = inputs
        slots, pool, sequences = self.slots, self.pool, torch.arange(len(self.slots.index), device=q.device)
        states = dequantize_state(pool.index_select(0, slots.read), scales.index_select(0, slots.read))
        rows = sequences.masked_fill(slots.index < 0, NO_SLOT)
        o = kda_prefill(q, k, v, g, beta, states, state_indices=rows, **options).o
        for of_slots, t in zip((pool, scales), quantize_state(states), strict=True):
            of_slots.index_copy_(0, slots.written, t)
        return o
