"""Slots of a pool of states without a host read, for backends whose kernels know none: gathered, run, and put back."""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import CHUNK, NO_SLOT, Backend, DecodeInputs, Inputs, PrefillInputs, state_dtype


def prefill_by_forward(backend: Backend, x: PrefillInputs) -> None:
    """`Backend.prefill` by the backend's `forward`, with copies of states and outputs and every boundary state."""
    live, states = None, x.state
    if x.state_indices is not None:
        assert x.state is not None
        count = x.state.shape[0]
        live = (x.state_indices >= 0) & (x.state_indices < count)
        states = x.state.index_select(0, x.state_indices.clamp(0, count - 1)).masked_fill(_by_sequence(~live), 0)
    initial = None if states is None else states.to(state_dtype(x.q.dtype))
    out, _ = backend.forward(
        Inputs(
            x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, initial, x.cu_seqlens, x.gate_activation, x.lower_bound,
            x.beta_activation, x.qk_l2norm, x.scale, final_state=x.state is not None,
            checkpoint_every=0 if x.checkpoints is None else CHUNK,
        ),
        False,
    )  # fmt: skip
    x.o.copy_(out.o)
    if live is not None:
        clear_padding(x.o, ~live, x.cu_seqlens)
    if x.checkpoints is not None:
        assert out.checkpoints is not None
        _choose(x, out.checkpoints, initial, live)
    if x.state is None:
        return
    assert out.final_state is not None
    if x.state_indices is None or live is None:
        x.state.copy_(out.final_state)
    else:
        _put_back(x.state, x.state_indices, live, out.final_state.to(x.state.dtype))


def clear_padding(o: Tensor, padding: Tensor, cu_seqlens: Tensor | None) -> None:
    """Zero the outputs o [B, T, HV, V] of the sequences in `padding` [N], and of tokens after all sequences."""
    if cu_seqlens is None:
        o.masked_fill_(padding[:, None, None, None], 0)
        return
    tokens = torch.arange(o.shape[1], device=o.device)
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    after_all = torch.nn.functional.pad(padding, (0, 1), value=True)
    o.masked_fill_(after_all[sequence][None, :, None, None], 0)


def _by_sequence(of_each: Tensor) -> Tensor:
    """[N] as [N, 1, 1, 1]."""
    return of_each[:, None, None, None]


def _put_back(pool: Tensor, slots: Tensor, live: Tensor, states: Tensor) -> None:
    """Write states [N, HV, V, K] to the slots [N] of the sequences that are live.

    The host does not know which ones are: the others write again what the first live one writes, or if there is none,
    what slot 0 holds.
    """
    first = live.to(torch.int8).argmax(0, keepdim=True)  # of no dimension, an index would be read by the host
    first_slot = slots[first].clamp(0, pool.shape[0] - 1).long()
    again = torch.where(_by_sequence(live[first]), states[first], pool[first_slot])
    pool.index_copy_(0, torch.where(live, slots, first_slot).long(), torch.where(_by_sequence(live), states, again))


def _choose(x: PrefillInputs, boundaries: Tensor, initial: Tensor | None, live: Tensor | None) -> None:
    """Copy each sequence's state after checkpoint_at tokens to `x.checkpoints`, from those at all its boundaries.

    Args:
        boundaries: [B, T // 64, HV, V, K].
        initial: [N, HV, V, K], or None for zeros.
        live: [N] False for padding, or None.
    """
    assert x.checkpoints is not None
    assert x.checkpoint_at is not None
    at = x.checkpoint_at.long()
    lengths = torch.full_like(at, x.q.shape[1]) if x.cu_seqlens is None else x.cu_seqlens.diff().long()
    full_chunks = lengths // CHUNK
    valid = (at >= 0) & (at % CHUNK == 0) & (at <= lengths)
    if live is not None:
        valid &= live
    chosen = torch.zeros_like(x.checkpoints) if initial is None else initial
    rows = boundaries.flatten(0, 1)
    if rows.shape[0]:
        row = (full_chunks.cumsum(0) - full_chunks + at // CHUNK - 1).clamp(0, rows.shape[0] - 1)
        chosen = torch.where(_by_sequence(at > 0), rows[row], chosen)
    x.checkpoints.copy_(torch.where(_by_sequence(valid), chosen, 0.0))


def with_initial(x: DecodeInputs) -> DecodeInputs:
    """Copy the states of `initial_state` to the slots that a decode step without one reads, where both exist."""
    if x.initial_state is None or x.initial_indices is None or x.state_indices is None:
        return x
    slots, first = x.initial_indices, x.state_indices if x.state_indices.ndim == 1 else x.state_indices[:, 0]
    there = (slots >= 0) & (slots < x.initial_state.shape[0])
    live = there & (first >= 0) & (first < x.state.shape[0])
    _put_back(x.state, first, live, x.initial_state[slots.where(live, 0).long()])
    rows = there if x.state_indices.ndim == 1 else there[:, None]
    return x._replace(
        initial_state=None, initial_indices=None, state_indices=torch.where(rows, x.state_indices, NO_SLOT)
    )


def with_padding(x: DecodeInputs) -> tuple[DecodeInputs, Tensor, Tensor]:
    """Redirect sequences and states of a decode step without a slot to a scratch slot outside of the pool.

    Returns:
        the inputs, a bool mask [N] of the sequences that are padding, and the memory of the scratch slot, to be kept
        until the kernel is launched
    """
    assert x.state_indices is not None
    pool, slots = x.state, x.state_indices.long()
    if pool.shape[0] == 1:
        pool = pool.flatten().view(pool.shape)  # a single slot may have any stride
    slots = slots if slots.ndim == 2 else slots[:, None].expand(-1, x.q.shape[1])
    scratch = pool.new_empty(2 * pool.stride(0))
    first, bytes_per_slot = scratch.data_ptr() - pool.data_ptr(), pool.stride(0) * pool.element_size()
    scratch_slot = -(-first // bytes_per_slot)
    there = (slots >= 0) & (slots < pool.shape[0])
    if x.num_accepted is None:
        accepted, live = None, there[:, 0]
    else:
        accepted = x.num_accepted.long().clamp(1, slots.shape[1])
        live = there.gather(1, accepted[:, None] - 1)[:, 0] & (accepted == x.num_accepted)
    slots = torch.where(there & live[:, None], slots, scratch_slot)
    return x._replace(state=pool, state_indices=slots, num_accepted=accepted), ~live, scratch
