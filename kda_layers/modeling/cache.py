"""What a KDA layer keeps in transformers' own `Cache`, and the cache layers that add what the stock ones lack.

A KDA layer stores, per sequence, the last W inputs of its short convolution [N, D, W] and the recurrent state
[N, HV, V, K] in fp32: constant in length. transformers' `LinearAttentionLayer` holds both. `KDACacheLayer` can also
take tokens back (speculative decoding), and `KDAOnlyCacheLayer` counts tokens for models without softmax layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from kda_layers.kernels.contract import CHUNK
from kda_layers.kernels.op import kda, kda_step


class LayerState:
    """One layer's view of a cache (or of none) during one forward call."""

    def __init__(self, cache: Cache | None, layer_idx: int | None):
        self.layer = None
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
        self.started = self.layer.has_previous_state[0]

    def conv(self) -> Tensor | None:
        """[N, D, W] inputs of the short convolution before this call, or None at the start."""
        if not self.started:
            return None
        state, W = self.layer.conv_states[0], self.layer.conv_kernel_size[0]
        return torch.nn.functional.pad(state, (max(W - state.shape[-1], 0), 0))[..., -W:]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Tensor:
        """Output [B, T, HV, V] of the operator from the cached state on; the cache then holds the state after it.

        The gradient does not flow into or out of a cache.
        """
        if self.layer is None:
            return kda(q, k, v, g, beta, **options).o
        before = self.layer.recurrent_states[0] if self.started else None
        if self.layer.record_past:
            return self._attend_recorded(before, q, k, v, g, beta, **options)
        if before is not None and q.shape[1] == 1 and options["cu_seqlens"] is None and not torch.is_grad_enabled():
            return kda_step(q, k, v, g, beta, before, **options)
        # A copy, as autograd may keep the initial state, which the cache then overwrites.
        initial = before.clone() if before is not None and torch.is_grad_enabled() else before
        out = kda(q, k, v, g, beta, initial_state=initial, final_state=True, **options)
        self.layer.update_recurrent_state(out.final_state.detach())
        return out.o

    def _attend_recorded(self, before: Tensor | None, q: Tensor, *rest: Tensor, **options: Any) -> Tensor:
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
        inputs = [t.detach() for t in (q, *rest)]
        options = {n: t.detach() if isinstance(t, Tensor) else t for n, t in options.items()}
        T = q.shape[1]
        head = max(T // CHUNK - 1, 0) * CHUNK
        outputs, state = [], None if before is None else before.clone()
        if head:
            first = kda(*(t[:, :head] for t in inputs), initial_state=state, final_state=True, **options)
            outputs, state = [first.o], first.final_state

        def after(tokens: int, start: Tensor | None = state) -> Any:
            tail = (t[:, head : head + tokens] for t in inputs)
            return kda(*tail, initial_state=start, final_state=True, **options)

        out = after(T - head)
        self.layer.record(_Past(state, lambda tokens: after(tokens).final_state, T - head, complete=not head))
        self.layer.update_recurrent_state(out.final_state)
        return torch.cat([*outputs, out.o], 1)

    def store_conv(self, x: Tensor, conv_state: Tensor, cu_seqlens: Tensor | None, W: int) -> None:
        """Keeps the convolution's new state [N, D, W] after inputs x [B, T, D]."""
        if self.layer is None:
            return
        # While recording, the layer itself appends every input; otherwise it keeps the last W of what it is given.
        new = x.detach().mT if self.layer.record_past else conv_state.detach()
        self.layer.update_conv_state(new, conv_kernel_size=W)
        if isinstance(self.layer, KDAOnlyCacheLayer):
            self.layer.seen += x.shape[1]


class _Past(NamedTuple):
    """One recorded call: the state before its recorded tokens, and the state after the first m of them."""

    before: Tensor | None
    state_after: Callable[[int], Tensor]
    tokens: int
    complete: bool  # whether `tokens` are all tokens of the call


class KDACacheLayer(LinearAttentionLayer):
    """A linear-attention cache layer that can take tokens back exactly, after `activate_past_recording()`."""

    is_croppable = True  # a class attribute, which wins over the stock property

    def __init__(self, number_of_states: int = 1, **kwargs: Any):
        super().__init__(number_of_states, **kwargs)
        self.past: list[_Past] = []

    def record(self, past: _Past) -> None:
        self.past.append(past)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last |tokens_to_remove| tokens, and forgets the record; 0 only forgets."""
        remove = abs(int(tokens_to_remove))  # a tensor in transformers 5.17; int() keeps it unchanged
        if not self.record_past:
            raise RuntimeError("crop needs activate_past_recording() before the tokens that it takes back")
        left = remove
        while left:
            if not self.past or (left > self.past[-1].tokens and not self.past[-1].complete):
                raise RuntimeError(f"crop can take back at most {remove - left} recorded tokens here, got {remove}")
            last = self.past.pop()
            if left >= last.tokens:
                left, state = left - last.tokens, last.before
            else:
                left, state = 0, last.state_after(last.tokens - left)
            if state is None:
                self.recurrent_states[0].zero_()
                self.has_previous_state[0] = False
            else:
                self.recurrent_states[0].copy_(state)
        self.past = []
        W, conv = self.conv_kernel_size[0], self.conv_states[0]
        conv = conv[..., : conv.shape[-1] - remove]
        self.conv_states[0] = torch.nn.functional.pad(conv, (max(W - conv.shape[-1], 0), 0))[..., -W:].clone()

    def reset(self) -> None:
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
        self.seen = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("a KDA layer's cache holds no keys and values: use update_conv_state, update_recurrent_state")

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.seen -= abs(int(tokens_to_remove))

    def reset(self) -> None:
        super().reset()
        self.seen = 0

    offload, prefetch = LinearAttentionLayer.offload, LinearAttentionLayer.prefetch


def with_kda_layers(cache: Cache) -> Cache:
    """`cache` with its stock linear-attention layers replaced, in place, by ones that can crop (and count).

    Layers that hold a state already stay as they are. The counting kind is used only where no other layer counts:
    next to softmax layers transformers would size masks by it.
    """
    attention = any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
    kind = KDACacheLayer if attention else KDAOnlyCacheLayer
    for i, layer in enumerate(cache.layers):
        if type(layer) is LinearAttentionLayer and not any(layer.has_previous_state.values()):
            new = kind(layer.number_of_states)
            new.record_past = layer.record_past
            cache.layers[i] = new
    return cache


def cache_bytes(cache: Cache) -> int:
    """Bytes of every tensor that a cache holds."""
    total = 0
    for layer in cache.layers:
        tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            tensors += states.values()
        total += sum(t.numel() * t.element_size() for t in tensors if t is not None)
    return total
