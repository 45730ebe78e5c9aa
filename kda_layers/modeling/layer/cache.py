"""Cache layers for KDA, with what the linear-attention layer of transformers lacks.

`LinearAttentionLayer` holds the state of the short convolution [N, D, W] and the recurrent state [N, HV, V, K], of
constant length. `KDACacheLayer` can also take tokens back (speculative decoding), and `KDAOnlyCacheLayer` counts tokens
for models without softmax layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kda_layers.kernels.kda.contract import CHUNK
from kda_layers.modeling.layer.states import Past, States, at_a_fixed_address, make_writable, write_recurrent
from kda_layers.modeling.seams import Cache, CacheLayerMixin, LinearAttentionLayer, StaticCache


class KDACacheLayer(LinearAttentionLayer):
    """A linear-attention cache layer that can take tokens back exactly after `activate_past_recording()`.

    The tokens of a short recorded call wait: the states advance by them when they are read, or by fewer in `crop`.
    """

    is_croppable = True  # replaces the stock property

    def __init__(self, number_of_states: int = 1, **kwargs: Any):
        self.waiting: Past | None = None  # of the instance: torch.compile guards on no default of the class
        super().__init__(number_of_states, **kwargs)
        self.past: list[Past] = []

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """The states of the convolution [N, D, W] after all tokens."""
        self._settle()
        return self._conv_states

    @conv_states.setter
    def conv_states(self, states: dict[int, Tensor | None]) -> None:
        self._conv_states = states

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """The recurrent states [N, HV, V, K] after all tokens."""
        self._settle()
        return self._recurrent_states

    @recurrent_states.setter
    def recurrent_states(self, states: dict[int, Tensor | None]) -> None:
        self._recurrent_states = states

    def activate_past_recording(self) -> None:
        """Record calls from now on: what was recorded before others that were not is forgotten."""
        if not self.record_past:
            self.past = []
        super().activate_past_recording()

    def wait(self, past: Past) -> None:
        """Take the last call, whose tokens the states do not have yet."""
        self.waiting = past

    def _settle(self) -> None:
        """Advance the states by the tokens that wait; the record then has the call, and one copy of the states."""
        if self.waiting is not None:
            self._advance()

    @torch.compiler.disable
    def _advance(self) -> None:
        past, self.waiting = self.waiting, None
        assert past is not None
        try:
            make_writable(self)
            before = _copy(self._states()) if self.record_past and not self.past else None
            self._store(past.advance(self._states(), past.tokens))
        except BaseException:
            self.waiting = past
            raise
        if self.record_past:
            self.record(past._replace(before=before, follows=bool(self.past)))

    def record(self, past: Past) -> None:
        """Add a call to the record, which keeps the last 128 tokens or a little more."""
        self.past.append(past)
        while sum(p.tokens for p in self.past[1:]) >= 2 * CHUNK:
            if self.past[1].follows:
                before = self._states_after(0, self.past[0].tokens)
                self.past[1] = self.past[1]._replace(before=before, follows=False)
            del self.past[0]

    def _states(self) -> States:
        recurrent, conv = self._recurrent_states[0], self._conv_states[0]
        assert recurrent is not None
        assert conv is not None
        return recurrent, conv

    def _store(self, states: States) -> None:
        for kept, new in zip(self._states(), states, strict=True):
            if kept.dtype == torch.int8:
                write_recurrent(self, new, torch.int8)
            elif kept is not new:
                kept.copy_(new)

    def _states_after(self, call: int, tokens: int) -> States | None:
        """Return the states after the first tokens of a recorded call; None at the start."""
        first = call
        while self.past[first].follows:
            first -= 1
        states = _copy(self.past[first].before)
        for past in self.past[first:call]:
            states = past.advance(states, past.tokens)
        return self.past[call].advance(states, tokens) if tokens else states

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Update as the stock layer does; the past is recorded in `past`, so that the state never grows.

        Other states than the first are of other modules, as Qwen4's embeddings of n-grams, and do grow until `crop`.
        """
        recording = self.record_past  # type: ignore[has-type]
        self.record_past = recording and state_idx > 0
        try:
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        finally:
            self.record_past = recording

    @property
    def is_filled(self) -> bool:
        """True once the layer has held a state: an early exit leaves the later layers' caches empty."""
        return self._conv_states.get(0) is not None

    def check_crop(self, tokens_to_remove: int) -> int:
        """Return the number of tokens that `crop` would take back, or raise its errors."""
        left = -int(tokens_to_remove)  # a tensor in transformers 5.17
        if left < 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, got {-left}: to keep the first {-left} tokens, pass "
                f"{-left} - cache.get_seq_length()"
            )
        if not self.is_filled:
            return 0
        if not self.record_past:
            raise RuntimeError("crop needs activate_past_recording() before the tokens that it takes back")
        recorded, waiting = 0, [] if self.waiting is None else [self.waiting]
        for past in reversed(self.past + waiting):
            recorded += past.tokens
            if not past.complete:
                break
        if left > recorded:
            raise RuntimeError(f"crop can take back at most {recorded} recorded tokens here, got {left}")
        return left

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens and clear the record; 0 only clears it, as in an empty layer.

        Raises:
            ValueError: a positive number.
            RuntimeError: not recording, or more tokens than are recorded. Nothing is changed then.
        """
        left = removed = self.check_crop(tokens_to_remove)
        waiting, self.waiting = self.waiting, None
        make_writable(self)
        if waiting is not None:
            if left < waiting.tokens:
                self._store(waiting.advance(self._states(), waiting.tokens - left))
            left = max(left - waiting.tokens, 0)
        if left:
            call = len(self.past)
            while left > 0:
                call -= 1
                left -= self.past[call].tokens
            states = self._states_after(call, -left)
            if states is None:
                self.reset()
            else:
                self._store(states)
        for i in range(1, self.number_of_states):
            if (conv := self._conv_states[i]) is not None:
                end = conv.shape[-1] - removed
                self._conv_states[i] = conv[..., max(end - self.conv_kernel_size[i], 0) : end]
        self.past = []

    def reset(self) -> None:
        self.waiting = None
        make_writable(self)
        super().reset()
        self.past = []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.past = []  # beams are never taken back


def _copy(states: States | None) -> States | None:
    return None if states is None else (states[0].clone(), states[1].clone())


class TokenCount:
    """The number of tokens of a cache layer, counted by the host: a replayed step of a CUDA graph counts beside it."""

    def __init__(self) -> None:
        self.tokens = 0


class KDAOnlyCacheLayer(KDACacheLayer, CacheLayerMixin):
    """A `KDACacheLayer` that also counts tokens, for models without a softmax layer to count them."""

    is_sliding = False

    def __init__(self, number_of_states: int = 1, on_device: bool = False, counts: bool = True, **kwargs: Any):
        """Create an empty layer.

        Args:
            number_of_states: as in `KDACacheLayer`.
            on_device: True to count in a device tensor, as transformers' static layers do: a compiled decode step is
                then neither recompiled for each count nor specialised to the count at tracing.
            counts: False for a layer behind the one that counts for all layers of a static cache, as each count on the
                device is a launch.
        """
        CacheLayerMixin.__init__(self)
        KDACacheLayer.__init__(self, number_of_states)
        self.counter: Any = TokenCount()  # or a tensor, once tokens are counted on the device
        self.on_device, self.counts = on_device, counts

    @property
    def seen(self) -> Any:
        """The number of tokens, a tensor if it is counted on the device."""
        return self.counter.tokens if isinstance(self.counter, TokenCount) else self.counter

    def count(self, x: Tensor) -> None:
        """Count the tokens of x [B, T, ...]."""
        if self.counts and self.on_device:
            if not isinstance(self.counter, Tensor):
                self.counter = at_a_fixed_address(torch.zeros((), dtype=torch.long, device=x.device))
            self.counter.add_(x.shape[1])
        elif self.counts:
            self.counter.tokens += x.shape[1]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("a KDA layer's cache holds no keys and values: use update_conv_state, update_recurrent_state")

    def get_seq_length(self) -> Any:
        if not self.counts:
            raise ValueError("the first layer of a static cache counts its tokens: cache.get_seq_length()")
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        seen = int(self.seen) - self.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        self._set_count(seen)

    def reset(self) -> None:
        super().reset()
        self._set_count(0)

    def _set_count(self, seen: int) -> None:
        if isinstance(self.counter, Tensor):
            self.counter.fill_(seen)
        else:
            self.counter.tokens = seen if self.counts else 0

    offload, prefetch = LinearAttentionLayer.offload, LinearAttentionLayer.prefetch


class CropsAllOrNone(Cache):
    """A cache whose `crop` changes no layer if a KDA layer cannot be cropped."""

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.layers:
            if isinstance(layer, KDACacheLayer):
                layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)


class KDADynamicCache(CropsAllOrNone, DynamicCache):
    """A DynamicCache with KDA layers."""


class KDAStaticCache(CropsAllOrNone, StaticCache):
    """A StaticCache with KDA layers."""


# Classes, as transformers' exporter cannot describe a method in the instance's __dict__.
CROPPING: dict[type[Cache], type[Cache]] = {DynamicCache: KDADynamicCache, StaticCache: KDAStaticCache}


def with_kda_layers(cache: Cache) -> Cache:
    """Replace the stock linear-attention layers of `cache` by ones that can crop (and count); return it.

    A DynamicCache or StaticCache becomes one whose `crop` is all or none; other classes crop layer by layer.
    Layers that already hold a state stay. Layers that count are used only if no other layer does: next to softmax
    layers, transformers would derive the sizes of masks from them.

    Raises:
        TypeError: what is no cache of transformers.
    """
    if not isinstance(cache, Cache):
        raise TypeError(
            f"cache must be a Cache of transformers, such as DynamicCache(config=...), got {type(cache).__name__}"
        )
    counted = any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
    layer_class = KDACacheLayer if counted else KDAOnlyCacheLayer
    static = not counted and isinstance(cache, StaticCache)
    options: dict[str, Any] = dict(on_device=True) if static else {}
    for i, layer in enumerate(cache.layers):
        if type(layer) is LinearAttentionLayer and not any(layer.has_previous_state.values()):
            new = layer_class(layer.number_of_states, **options)
            if static:
                options["counts"] = False  # of later layers
            new.record_past = layer.record_past
            cache.layers[i] = new
            if not torch.compiler.is_compiling():
                cache.__class__ = CROPPING.get(type(cache), type(cache))
    return cache


def cache_bytes(cache: Cache) -> int:
    """Return the size in bytes of all tensors in a cache, also of what it keeps to take tokens back."""
    total = 0
    for layer in cache.layers:
        tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        ours = isinstance(layer, KDACacheLayer)  # reading its states would advance them
        for name in ("_conv_states", "_recurrent_states") if ours else ("conv_states", "recurrent_states"):
            tensors += getattr(layer, name, {}).values()
        for past in [*layer.past, layer.waiting] if ours else []:
            if past is not None:
                tensors += [*past.reads, *(past.before or ())]
        total += sum(t.numel() * t.element_size() for t in tensors if t is not None)
    return total
