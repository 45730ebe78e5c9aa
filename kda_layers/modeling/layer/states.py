"""The states of one layer in a cache during one forward call, and the operator on them.

A KDA layer keeps, per sequence, the last W inputs of its short convolution [N, D, W] and the recurrent state
[N, HV, V, K] in fp32, bf16 or int8, whatever the length. A cache of transformers holds the states of one batch
(`LayerState`), a serving engine those of all requests (`slots.py`).

`kda_step` updates a state in each dtype. Other calls compute in fp32 and round the state once, at their end.

Cache layers are recognised by their attributes, because their base classes are those of transformers, which is not
imported here: `recurrent_states` of its linear-attention layers, `record` and `count` of ours (`cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.checks import accumulator_dtype
from ...kernels.fused.short_conv import state_after
from ...kernels.kda.contract import CHUNK, MOST_DRAFTED
from ...kernels.kda.drafts import kda_commit, kda_verify, verifying
from ...kernels.kda.int8_state import dequantize_state, quantize_state
from ...kernels.kda.op import kda, kda_step
from .fast_paths import name_of
from .slots import Slots, SlotState

if TYPE_CHECKING:
    from transformers.cache_utils import Cache


States = tuple[Tensor, Tensor]  # recurrent [N, HV, V, K], convolution [N, D, W]


class Past(NamedTuple):
    """One recorded call: what takes the states from before its recorded tokens to after the first of them."""

    advance: Callable[[Any, int], States]  # the states before (None at the start), overwritten or not, and how many
    reads: tuple[Tensor, ...]  # what `advance` keeps
    tokens: int
    complete: bool = True  # if `tokens` are all tokens of the call
    before: States | None = None  # None at the start
    follows: bool = False  # `before` is not kept: it is what the call recorded before leads to


def make_writable(layer: Any) -> None:
    """Clone states that were made under torch.inference_mode: torch refuses to update these outside of it."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return
    for states in (layer.conv_states, layer.recurrent_states):
        for i, t in states.items():
            if t is not None and t.is_inference():
                states[i] = at_a_fixed_address(t.clone())
    counter = getattr(layer, "counter", None)
    if isinstance(counter, Tensor) and counter.is_inference():
        layer.counter = at_a_fixed_address(counter.clone())


def at_a_fixed_address(t: Tensor) -> Tensor:
    """Return `t` marked as a tensor whose address torch.compile may rely on, as transformers marks its states."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(t)
    return t


def write_recurrent(layer: Any, state: Tensor, dtype: torch.dtype) -> None:
    """Write a state [N, HV, V, K] to a cache layer in `dtype`, which is that of a state that it holds.

    A layer with int8 states has another state, the scales of rows [N, HV, V] in fp32, which is reordered, offloaded and
    reset as the others are.
    """
    if dtype != torch.int8:
        layer.update_recurrent_state(state.to(dtype))
        return
    if 1 not in layer.recurrent_states:
        layer.number_of_states = 2
        for values, empty in (
            (layer.conv_states, None), (layer.recurrent_states, None), (layer.conv_kernel_size, None),
            (layer.is_conv_states_initialized, False), (layer.is_recurrent_states_initialized, False),
        ):  # fmt: skip
            values[1] = empty
    for i, t in enumerate(quantize_state(state)):
        layer.update_recurrent_state(t, i)
    layer.has_previous_state[1] = True


class LayerState:
    """The states of layer `layer_idx` in a cache, or nothing without a cache.

    Attributes:
        cached: False without a cache; nothing can be written then.
        recording: True if the cache can be asked to take tokens back.
        conv: [N, D, W] inputs of the short convolution before this call; None at the start.
        recurrent: [N, HV, V, K] recurrent state; None at the start.
        scale: [N, HV, V] scales of an int8 state, else None.
        new_dtype: that of the states which an empty cache gets; a cache keeps the one that it has.

    Raises:
        ValueError: a cache without layer_idx, without a linear-attention layer there, or with another number of rows.
    """

    conv_into = index = step = None  # of states in the slots of an engine
    one_each = False

    def __init__(self, cache: Cache | None, layer_idx: int | None, sequences: int):
        self.cached, self.recording, self._waits = cache is not None, False, False
        self.conv: Tensor | None = None
        self.recurrent: Tensor | None = None
        self.scale: Tensor | None = None
        self.new_dtype = torch.float32
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
        self.scale = self._layer.recurrent_states.get(1)
        if self.conv.shape[0] != sequences:
            raise ValueError(f"cache must hold as many sequences as the call, {sequences}, got {self.conv.shape[0]}")

    def write_conv(self, state: Tensor, x: Tensor) -> None:
        """Store the convolution's state [N, D, W] and count the tokens of x [B, T, ...], which end the call."""
        if not self._waits:
            self._layer.update_conv_state(state.detach())
        self.count(x)

    def count(self, x: Tensor) -> None:
        """Count the tokens of x [B, T, ...], of a call that updates the states in place."""
        if hasattr(self._layer, "count"):
            self._layer.count(x)

    def attend(self, inputs: Sequence[Tensor], options: dict[str, Any], recompute: dict[str, Any]) -> Tensor:
        """Run the operator on q, k, v, g, beta from the cached state; store the new state and return o [B, T, HV, V].

        No gradient flows out of a cache.
        """
        before, grads = self.recurrent, torch.is_grad_enabled()
        if before is not None and inputs[0].shape[1] == 1 and options["cu_seqlens"] is None and not grads:
            q, k, v, g, beta = inputs
            return kda_step(q, k, v, g, beta, before, state_scale=self.scale, **options)  # updates the state in place
        # A copy, as autograd may keep the initial state, which the cache then overwrites.
        initial = self._copy() if grads or self.scale is not None else before
        out = kda(*inputs, initial_state=initial, return_final_state=True, **recompute | options)
        self._write(out.final_state.detach())
        return out.o

    def _copy(self) -> Tensor | None:
        """Return a copy of the recurrent state that `kda` takes; None at the start."""
        if self.recurrent is None or self.scale is None:
            return None if self.recurrent is None else self.recurrent.clone()
        return dequantize_state(self.recurrent, self.scale)

    def _write(self, state: Tensor) -> None:
        """Store the recurrent state [N, HV, V, K] in the cache's dtype."""
        states = self._layer.recurrent_states
        if self.recurrent is None and states[0] is not None and states[0].dtype != self.new_dtype:
            raise ValueError(
                f"cache must be new, or hold states in {name_of(self.new_dtype)} as state_dtype says, got one that "
                f"was reset and has room for states in {name_of(states[0].dtype)}: make another"
            )
        write_recurrent(self._layer, state, self.new_dtype if states[0] is None else states[0].dtype)
        self.recurrent, self.scale = states[0], states.get(1)

    def attend_and_record(
        self,
        inputs: Sequence[Tensor],
        options: dict[str, Any],
        recompute: dict[str, Any],
        x: Tensor,
        W: int,
        mask: Tensor | None,
    ) -> Tensor:
        """Run the operator and record what the cache needs for the states after fewer of these tokens.

        A few tokens, as drafts are, leave the cached states as they are: recorded is what advances these by each
        token (`kda_verify`). Of other calls the states are copied and the inputs of the last 64 to 127 tokens kept.

        Args:
            x: [B, T, D] inputs of the short convolution, which has W taps.
            mask: [B, T] bool, True for real tokens; None without padding.
        """
        if not hasattr(self._layer, "record"):
            raise ValueError(
                "cache records its past, which KDA layers can take back only in a KDACacheLayer: "
                "pass the cache through kda_layers.modeling.layer.cache.with_kda_layers while it is empty"
            )
        if options["cu_seqlens"] is not None:
            raise ValueError("cu_seqlens must be None with a cache that records its past")
        x, T = x.detach(), x.shape[1]
        few = self.recurrent is not None and T <= MOST_DRAFTED and not torch.is_grad_enabled() and self.scale is None
        if few and (backend := self._verifying(inputs, options)) is not None:
            return self._verify(inputs, options | dict(backend=backend), x, W, mask)
        head = max(T // CHUNK - 1, 0) * CHUNK
        conv = None if self.conv is None else self.conv.clone()
        recurrent, outputs, wide = self._copy(), [], accumulator_dtype(inputs[0].dtype)
        if head:  # the state between the two parts is not rounded, as it is not in one call
            first, last = ([t[:, part] for t in inputs] for part in (slice(None, head), slice(head, None)))
            kwargs = recompute | options | dict(return_final_state=True)
            out = kda(*first, initial_state=recurrent, state_dtype=wide, **kwargs)
            recurrent = out.final_state.detach()
            conv = state_after(x[:, :head], W, conv, None if mask is None else mask[:, :head]).clone()
            outputs.append(out.o)
            out = kda(*last, initial_state=recurrent, **kwargs)
            self._write(out.final_state.detach())
            outputs.append(out.o)
        else:
            outputs.append(self.attend(inputs, options, recompute))

        # Copies: a view would keep all of a long prompt alive.
        tail, x_tail = [t[:, head:].detach().clone() for t in inputs], x[:, head:].clone()
        mask_tail = None if mask is None else mask[:, head:]
        options = {n: t.detach() if isinstance(t, Tensor) else t for n, t in options.items()}
        assert self.recurrent is not None
        kept_in = wide if self.scale is not None else self.recurrent.dtype  # int8 is rounded where it is stored

        def advance(states: States | None, tokens: int) -> States:
            recurrent, conv = (None, None) if states is None else states
            out = kda(
                *(t[:, :tokens] for t in tail), initial_state=recurrent, return_final_state=True, state_dtype=kept_in,
                **options,
            )  # fmt: skip
            kept = None if mask_tail is None else mask_tail[:, :tokens]
            return out.final_state, state_after(x_tail[:, :tokens], W, conv, kept)

        before = None if conv is None else (recurrent, conv)
        self._layer.record(Past(advance, (*tail, x_tail), T - head, not head, before))
        return torch.cat(outputs, 1)

    @staticmethod
    def _verifying(inputs: Sequence[Tensor], options: dict[str, Any]) -> str | None:
        q, _, v, _, beta = inputs
        sizes = q.shape[3], v.shape[3], v.shape[2] // q.shape[2]
        activations = options["gate_activation"], options["beta_activation"]
        return verifying(options.get("backend"), q.device, q.dtype, beta.dtype, *sizes, *activations, True)

    def _verify(
        self, inputs: Sequence[Tensor], options: dict[str, Any], x: Tensor, W: int, mask: Tensor | None
    ) -> Tensor:
        """Run `attend_and_record` for a few tokens, by which the cache advances its states when they are read."""
        q, k, v, g, beta = inputs
        (N, T, HV, V), state = v.shape, self.recurrent
        assert state is not None
        updates = state.new_empty(N, T, HV, 2 * q.shape[3] + V, dtype=accumulator_dtype(q.dtype))
        o = kda_verify(q, k, v, g, beta, state, updates, **options)
        backend = options["backend"]  # also of the commit, whatever is asked for then

        def advance(states: States, tokens: int) -> States:
            recurrent, conv = states
            accepted = torch.full((N,), tokens, dtype=torch.int32, device=recurrent.device)
            kda_commit(recurrent, updates, accepted, backend=backend)
            return recurrent, state_after(x[:, :tokens], W, conv, None if mask is None else mask[:, :tokens])

        self._layer.wait(Past(advance, (updates, x), T))
        self._waits = True
        return o


class StateDtypeOfModel:
    """Mixin of a KDA layer in a model: `state_dtype` is its configuration's linear_state_dtype, set at any time."""

    model_config: Any

    @property
    def state_dtype(self) -> str:
        """Return the name of the dtype; "float32" for a configuration without one."""
        return getattr(self.model_config, "linear_state_dtype", "float32")

    @state_dtype.setter
    def state_dtype(self, name: str) -> None:
        self.model_config.linear_state_dtype = name


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
