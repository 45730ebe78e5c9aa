"""What a KDA layer keeps in transformers' own `Cache`, and the cache layers that add what the stock ones lack.

A KDA layer stores, per sequence, the last W inputs of its short convolution [N, D, W] and the recurrent state
[N, HV, V, K] in fp32: constant in length. transformers' `LinearAttentionLayer` holds both. `KDACacheLayer` can also
take tokens back (speculative decoding), and `KDAOnlyCacheLayer` counts tokens for models without softmax layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticCache,
)

from kda_layers.kernels.kda.contract import CHUNK
from kda_layers.kernels.kda.op import kda, kda_step
from kda_layers.kernels.short_conv.op import state_after


class LayerState:
    """One layer's view of a cache (or of none) during one forward call."""

    def __init__(self, cache: Cache | None, layer_idx: int | None, sequences: int):
        self.layer: Any = None
        self.started = False
        if cache is None:
            return
        if layer_idx is None:
            raise ValueError("layer_idx must be given to use past_key_values, got None")
        if layer_idx >= len(cache.layers) or not isinstance(cache.layers[layer_idx], LinearAttentionCacheLayerMixin):
            kind = type(cache.layers[layer_idx]).__name__ if layer_idx < len(cache.layers) else "no layer"
            raise ValueError(
                f"past_key_values must have a linear-attention layer at index {layer_idx}, got {kind}: make it with "
                "DynamicCache(config=config), where config.layer_types[layer_idx] is 'linear_attention'"
            )
        self.layer = cache.layers[layer_idx]
        make_writable(self.layer)
        self.started = self.layer.has_previous_state[0]
        if self.started and self.layer.conv_states[0].shape[0] != sequences:
            raise ValueError(
                f"past_key_values must hold as many sequences as the call, {sequences}, "
                f"got {self.layer.conv_states[0].shape[0]}"
            )

    @property
    def conv(self) -> Tensor | None:
        """[N, D, W] inputs of the short convolution before this call, or None at the start."""
        return self.layer.conv_states[0] if self.started else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Tensor:
        """Output [B, T, HV, V] of the operator from the cached state on; the cache then holds the state after it.

        The gradient does not flow into or out of a cache.
        """
        if self.layer is None:
            return kda(q, k, v, g, beta, **options).o
        before = self.layer.recurrent_states[0] if self.started else None
        if self.layer.record_past:
            return self._attend_recorded(before, q, k, v, g, beta, **options)
        if before is not None and options["cu_seqlens"] is None and _decodes(q):
            return kda_step(q, k, v, g, beta, before, **options)
        # A copy, as autograd may keep the initial state, which the cache then overwrites.
        initial = before.clone() if before is not None and torch.is_grad_enabled() else before
        out = kda(q, k, v, g, beta, initial_state=initial, final_state=True, **options)
        self.layer.update_recurrent_state(out.final_state.detach())
        return out.o

    def _attend_recorded(
        self, before: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> Tensor:
        """As `attend`, keeping what `KDACacheLayer.crop` needs to recompute the state after fewer tokens.

        Only the last 64 to 127 tokens of a long call are kept: far more than any drafting takes back.
        """
        if not isinstance(self.layer, KDACacheLayer):
            raise ValueError(
                "past_key_values records its past, which KDA layers can take back only in a KDACacheLayer: "
                "pass the cache through kda_layers.modeling.cache.with_kda_layers while it is empty"
            )
        if options["cu_seqlens"] is not None:
            raise ValueError("cu_seqlens must be None with a cache that records its past")
        inputs, head = (q, k, v, g, beta), max(q.shape[1] // CHUNK - 1, 0) * CHUNK
        outputs, state = [], None if before is None else before.clone()
        if head:
            first = kda(*(t[:, :head] for t in inputs), initial_state=state, final_state=True, **options)
            outputs, state = [first.o], first.final_state.detach()
        if before is not None and _decodes(q):
            outputs.append(kda_step(q, k, v, g, beta, before, **options))  # in place; `state` is its copy
        else:
            out = kda(*(t[:, head:] for t in inputs), initial_state=state, final_state=True, **options)
            self.layer.update_recurrent_state(out.final_state.detach())
            outputs.append(out.o)

        # Copies: a view would keep all of a long prompt alive.
        tail = [t[:, head:].detach().clone() for t in inputs]
        options = {n: t.detach() if isinstance(t, Tensor) else t for n, t in options.items()}
        self.head, self.recurrent_before_tail = head, state
        self.replay = lambda tokens: (
            kda(*(t[:, :tokens] for t in tail), initial_state=state, final_state=True, **options).final_state
        )
        return torch.cat(outputs, 1)

    def store_conv(self, conv_state: Tensor | None, inputs: Sequence[Tensor], mask: Tensor | None) -> None:
        """Keeps the convolution's new state [N, D, W] after inputs [B, T, D_i], of which those in mask [B, T] count."""
        if self.layer is None:
            return
        assert conv_state is not None
        if self.layer.record_past:
            self._record(torch.cat(tuple(inputs), -1).detach(), conv_state.shape[-1], mask)
        self.layer.update_conv_state(conv_state.detach())
        if isinstance(self.layer, KDAOnlyCacheLayer):
            self.layer.count(inputs[0])

    def _record(self, x: Tensor, W: int, mask: Tensor | None) -> None:
        replay, head, T = self.replay, self.head, x.shape[1]
        before_head, tail_mask = (None, None) if mask is None else (mask[:, :head], mask[:, head:])
        conv = None if self.conv is None else self.conv.clone()
        if head:
            conv = state_after(x[:, :head], W, conv, before_head).clone()
        tail = x[:, head:].clone()

        def states_after(tokens: int) -> tuple[Tensor, Tensor]:
            kept = None if tail_mask is None else tail_mask[:, :tokens]
            return replay(tokens), state_after(tail[:, :tokens], W, conv, kept)

        before = None if conv is None else (self.recurrent_before_tail, conv)
        self.layer.record(_Past(before, states_after, T - head, complete=not head))


def make_writable(layer: Any) -> None:
    """Replace states made under torch.inference_mode by copies outside of it, where torch refuses to write to them."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return
    for states in (layer.conv_states, layer.recurrent_states):
        if states[0] is not None and states[0].is_inference():
            states[0] = _at_a_fixed_address(states[0].clone())
    seen = getattr(layer, "seen", None)
    if isinstance(seen, Tensor) and seen.is_inference():
        layer.seen = _at_a_fixed_address(seen.clone())


def _at_a_fixed_address(t: Tensor) -> Tensor:
    """`t`, whose address torch.compile may rely on, as it does for the states of transformers' layers."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(t)
    return t


def _decodes(q: Tensor) -> bool:
    """Whether a call with queries q [B, T, H, K] and a state can update that in place, as decoding does."""
    return q.shape[1] == 1 and not torch.is_grad_enabled()


class _Past(NamedTuple):
    """One recorded call: the states before its recorded tokens, and those after the first m of them."""

    before: tuple[Tensor, Tensor] | None  # recurrent, of the convolution; None at the start
    states_after: Callable[[int], tuple[Tensor, Tensor]]
    tokens: int
    complete: bool  # whether `tokens` are all tokens of the call


class KDACacheLayer(LinearAttentionLayer):
    """A linear-attention cache layer that can take tokens back exactly, after `activate_past_recording()`."""

    is_croppable = True  # a class attribute, which wins over the stock property

    def __init__(self, number_of_states: int = 1, **kwargs: Any):
        super().__init__(number_of_states, **kwargs)
        self.past: list[_Past] = []

    def record(self, past: _Past) -> None:
        """Adds a call to the record, of which only the last 128 tokens or a little more are kept."""
        self.past.append(past)
        while sum(p.tokens for p in self.past[1:]) >= 2 * CHUNK:
            del self.past[0]

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """As the stock layer, but the record of the past is in `past`, so that the state never grows."""
        recording = self.record_past  # type: ignore[has-type]
        self.record_past = False
        try:
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        finally:
            self.record_past = recording

    def check_crop(self, tokens_to_remove: int) -> int:
        """Return how many tokens `crop` would take back; raise as it would."""
        left = -int(tokens_to_remove)  # a tensor in transformers 5.17
        if left < 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, got {-left}: to keep the first {-left} tokens, pass "
                f"{-left} - cache.get_seq_length()"
            )
        if not self.record_past:
            raise RuntimeError("crop needs activate_past_recording() before the tokens that it takes back")
        recorded = 0
        for past in reversed(self.past):
            recorded += past.tokens
            if not past.complete:
                break
        if left > recorded:
            raise RuntimeError(f"crop can take back at most {recorded} recorded tokens here, got {left}")
        return left

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens, and forget the record; 0 only forgets.

        Raises:
            ValueError: a positive number; RuntimeError: not recording, or more tokens than are recorded. Nothing is
                changed then.
        """
        left = self.check_crop(tokens_to_remove)
        make_writable(self)
        while left:
            past = self.past.pop()
            states = past.before if left >= past.tokens else past.states_after(past.tokens - left)
            left = max(left - past.tokens, 0)
            if left:
                continue
            if states is None:
                self.reset()
            else:
                self.recurrent_states[0].copy_(states[0])
                self.conv_states[0].copy_(states[1])
        self.past = []

    def reset(self) -> None:
        make_writable(self)
        super().reset()
        self.past = []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.past = []  # beams are never taken back


class KDAOnlyCacheLayer(KDACacheLayer, CacheLayerMixin):
    """A KDACacheLayer that also counts tokens, for models in which no softmax layer does."""

    is_sliding = False

    def __init__(self, number_of_states: int = 1, **kwargs: Any):
        CacheLayerMixin.__init__(self)
        KDACacheLayer.__init__(self, number_of_states)
        self.seen: Any = 0

    def count(self, x: Tensor) -> None:
        """Counts the tokens of x [B, T, ...]."""
        self.seen += x.shape[1]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("a KDA layer's cache holds no keys and values: use update_conv_state, update_recurrent_state")

    def get_seq_length(self) -> Any:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        seen = int(self.seen) + int(tokens_to_remove)
        super().crop(tokens_to_remove)
        self.reset_count(seen)

    def reset(self) -> None:
        super().reset()
        self.reset_count(0)

    def reset_count(self, seen: int) -> None:
        self.seen = seen

    offload, prefetch = LinearAttentionLayer.offload, LinearAttentionLayer.prefetch


class KDAOnlyStaticLayer(KDAOnlyCacheLayer):
    """A KDAOnlyCacheLayer of a static cache: it counts in a tensor on the device, as transformers' static layers do.

    A compiled decode step then has neither a new graph for a new count nor a count that stays as it was traced.
    """

    def count(self, x: Tensor) -> None:
        if not isinstance(self.seen, Tensor):
            self.seen = _at_a_fixed_address(torch.zeros((), dtype=torch.long, device=x.device))
        self.seen.add_(x.shape[1])

    def reset_count(self, seen: int) -> None:
        if isinstance(self.seen, Tensor):
            self.seen.fill_(seen)


def with_kda_layers(cache: Cache) -> Cache:
    """`cache` with its stock linear-attention layers replaced, in place, by ones that can crop (and count).

    Layers that hold a state already stay as they are. The counting kind is used only where no other layer counts:
    next to softmax layers transformers would size masks by it.
    """
    kind: type[KDACacheLayer] = KDAOnlyStaticLayer if isinstance(cache, StaticCache) else KDAOnlyCacheLayer
    if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        kind = KDACacheLayer
    for i, layer in enumerate(cache.layers):
        if type(layer) is LinearAttentionLayer and not any(layer.has_previous_state.values()):
            new = kind(layer.number_of_states)
            new.record_past = layer.record_past
            cache.layers[i] = new
            if not torch.compiler.is_compiling():
                vars(cache)["crop"] = partial(_crop, cache.layers)
    return cache


def _crop(layers: list[Any], tokens_to_remove: int) -> None:
    """`Cache.crop` of a cache with these layers, but no layer is cropped unless every KDA layer can be."""
    for layer in layers:
        if isinstance(layer, KDACacheLayer):
            layer.check_crop(tokens_to_remove)
    for layer in layers:
        layer.crop(tokens_to_remove)


def cache_bytes(cache: Cache) -> int:
    """Bytes of every tensor that a cache holds."""
    total = 0
    for layer in cache.layers:
        tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            tensors += states.values()
        total += sum(t.numel() * t.element_size() for t in tensors if t is not None)
    return total
