"""The operator between the states of a layer: read from a cache or from slots, updated there, recorded if asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.fused.short_conv import state_after
from ...kernels.kda.contract import CHUNK
from ...kernels.kda.op import kda, kda_prefill, kda_step
from .slots import SlotState
from .state import LayerState, Past


def attend(
    state: LayerState | SlotState, inputs: Sequence[Tensor], options: dict[str, Any], recompute: bool | float | str
) -> Tensor:
    """Run the operator on q, k, v, g, beta from the cached state; store the new state and return o [B, T, HV, V]."""
    if isinstance(state, SlotState):
        return _attend_in_slots(state, inputs, options)
    if not state.cached:
        return kda(*inputs, recompute=recompute, **options).o
    before, grads = state.recurrent, torch.is_grad_enabled()
    if before is not None and inputs[0].shape[1] == 1 and options["cu_seqlens"] is None and not grads:
        q, k, v, g, beta = inputs
        return kda_step(q, k, v, g, beta, before, **options)  # updates the state in place
    # A copy, as autograd may keep the initial state, which the cache then overwrites.
    initial = before.clone() if before is not None and grads else before
    out = kda(*inputs, initial_state=initial, final_state=True, recompute=recompute, **options)
    state.write_recurrent(out.final_state)
    return out.o


def _attend_in_slots(state: SlotState, inputs: Sequence[Tensor], options: dict[str, Any]) -> Tensor:
    """Run the operator on q, k, v, g, beta of packed sequences and update the states in their slots; return o."""
    state.clear()
    if state.slots.one_each:
        q, k, v, g, beta = (t.transpose(0, 1) for t in inputs)
        options = options | dict(cu_seqlens=None)
        return kda_step(q, k, v, g, beta, state.pool, state_indices=state.slots.index, **options).transpose(0, 1)
    q, k, v, g, beta = inputs
    return kda_prefill(q, k, v, g, beta, state.pool, state_indices=state.slots.index, **options).o


def attend_and_record(
    state: LayerState,
    inputs: Sequence[Tensor],
    options: dict[str, Any],
    recompute: bool | float | str,
    x: Tensor,
    W: int,
    mask: Tensor | None,
) -> Tensor:
    """Run `attend` and record what a cache needs to recompute the states after fewer of these tokens.

    Only the last 64 to 127 tokens of a long call are recorded, far more than a draft has.

    Args:
        x: [B, T, D] inputs of the short convolution, which has W taps.
        mask: [B, T] bool, True for real tokens; None without padding.
    """
    state.check_can_record(options["cu_seqlens"])
    x, T = x.detach(), x.shape[1]
    head = max(T // CHUNK - 1, 0) * CHUNK
    conv = None if state.conv is None else state.conv.clone()
    outputs = []
    if head:
        outputs.append(attend(state, [t[:, :head] for t in inputs], options, recompute))
        conv = state_after(x[:, :head], W, conv, None if mask is None else mask[:, :head]).clone()
    recurrent = None if state.recurrent is None else state.recurrent.clone()
    outputs.append(attend(state, [t[:, head:] for t in inputs], options, recompute))

    # Copies: a view would keep all of a long prompt alive.
    tail, x_tail = [t[:, head:].detach().clone() for t in inputs], x[:, head:].clone()
    mask_tail = None if mask is None else mask[:, head:]
    options = {n: t.detach() if isinstance(t, Tensor) else t for n, t in options.items()}

    def states_after(tokens: int) -> tuple[Tensor, Tensor]:
        out = kda(*(t[:, :tokens] for t in tail), initial_state=recurrent, final_state=True, **options)
        kept = None if mask_tail is None else mask_tail[:, :tokens]
        return out.final_state, state_after(x_tail[:, :tokens], W, conv, kept)

    before = None if conv is None else (recurrent, conv)
    state.record(Past(before, states_after, T - head, complete=not head))
    return torch.cat(outputs, 1)
