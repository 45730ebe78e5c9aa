"""One layer's states in a cache during one forward call: read, write, and record them to take tokens back.

A KDA layer keeps, per sequence, the last W inputs of its short convolution [N, D, W] and the recurrent state
[N, HV, V, K] in fp32, whatever the length.

Cache layers are recognised by their attributes, because their base classes are those of transformers, which is not
imported here: `recurrent_states` of its linear-attention layers, `record` and `count` of ours (`cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .slots import Slots, SlotState

if TYPE_CHECKING:
    from transformers.cache_utils import Cache


class Past(NamedTuple):
    """One recorded call: the states before its recorded tokens, and a function that recomputes later ones."""

    before: tuple[Tensor, Tensor] | None  # recurrent, convolution; None at the start
    states_after: Callable[[int], tuple[Tensor, Tensor]]  # of the first m recorded tokens
    tokens: int
    complete: bool  # True if `tokens` are all tokens of the call


def make_writable(layer: Any) -> None:
    """Clone states that were made under torch.inference_mode: torch refuses to update these outside of it."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return
    for states in (layer.conv_states, layer.recurrent_states):
        if states[0] is not None and states[0].is_inference():
            states[0] = at_a_fixed_address(states[0].clone())
    seen = getattr(layer, "seen", None)
    if isinstance(seen, Tensor) and seen.is_inference():
        layer.seen = at_a_fixed_address(seen.clone())


def at_a_fixed_address(t: Tensor) -> Tensor:
    """Return `t` marked as a tensor whose address torch.compile may rely on, as transformers marks its states."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(t)
    return t


class LayerState:
    """The states of layer `layer_idx` in a cache, or nothing without a cache.

    Attributes:
        cached: False without a cache; nothing can be written then.
        recording: True if the cache can be asked to take tokens back.
        conv: [N, D, W] inputs of the short convolution before this call; None at the start.
        recurrent: [N, HV, V, K] recurrent state; None at the start.

    Raises:
        ValueError: a cache without layer_idx, without a linear-attention layer there, or with another number of rows.
    """

    def __init__(self, cache: Cache | None, layer_idx: int | None, sequences: int):
        self.cached, self.recording = cache is not None, False
        self.conv: Tensor | None = None
        self.recurrent: Tensor | None = None
        if cache is None:
            return
        if layer_idx is None:
            raise ValueError("layer_idx must be given to use cache, got None")
        if layer_idx >= len(cache.layers) or not hasattr(cache.layers[layer_idx], "recurrent_states"):
            kind = type(cache.layers[layer_idx]).__name__ if layer_idx < len(cache.layers) else "no layer"
            raise ValueError(
                f"cache must have a linear-attention layer at index {layer_idx}, got {kind}: make it with "
                "DynamicCache(config=config), where config.layer_types[layer_idx] is 'linear_attention'"
            )
        self._layer: Any = cache.layers[layer_idx]
        make_writable(self._layer)
        self.recording = self._layer.record_past
        if not self._layer.has_previous_state[0]:
            return
        self.conv, self.recurrent = self._layer.conv_states[0], self._layer.recurrent_states[0]
        if self.conv.shape[0] != sequences:
            raise ValueError(f"cache must hold as many sequences as the call, {sequences}, got {self.conv.shape[0]}")

    def write_recurrent(self, state: Tensor) -> None:
        """Store the recurrent state [N, HV, V, K]; no gradient flows out of a cache."""
        self._layer.update_recurrent_state(state.detach())
        self.recurrent = self._layer.recurrent_states[0]

    def write_conv(self, state: Tensor, x: Tensor) -> None:
        """Store the convolution's state [N, D, W] and count the tokens of x [B, T, ...], which end the call."""
        self._layer.update_conv_state(state.detach())
        self.count(x)

    def count(self, x: Tensor) -> None:
        """Count the tokens of x [B, T, ...], of a call that updates the states in place."""
        if hasattr(self._layer, "count"):
            self._layer.count(x)

    def check_can_record(self, cu_seqlens: Tensor | None) -> None:
        """Raise a ValueError unless the call can be recorded."""
        if not hasattr(self._layer, "record"):
            raise ValueError(
                "cache records its past, which KDA layers can take back only in a KDACacheLayer: "
                "pass the cache through kda_layers.modeling.layer.cache.with_kda_layers while it is empty"
            )
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens must be None with a cache that records its past")

    def record(self, past: Past) -> None:
        """Record a call, so that the cache can take its last tokens back."""
        self._layer.record(past)


def read_state(cache: Cache | Slots | None, layer_idx: int | None, sequences: int) -> Any:
    """Return the states of a layer in a cache (`LayerState`), or in the slots of a serving engine (`SlotState`).

    Raises:
        ValueError: as `LayerState`; slots of another number of sequences.
    """
    if not isinstance(cache, Slots):
        return LayerState(cache, layer_idx, sequences)
    if layer_idx not in cache.pools or sequences != cache.index.shape[0]:
        raise ValueError(
            f"slots must hold layer {layer_idx} and as many sequences as the call, {sequences}, got layers "
            f"{sorted(cache.pools)} and {cache.index.shape[0]} sequences: pass their cu_seqlens"
        )
    return SlotState(cache, layer_idx)
