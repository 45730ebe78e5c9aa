"""Launches `kda_prefill`: states are in slots of a pool, rows of tokens have strides; `forms` chooses the kernel."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...cuda.machine import Machine
from ..contract import PrefillInputs
from . import forms
from .forward import last_tokens
from .spec import PARAMS, Plan, Rows, Signature, aligned, has_head_gates, row_stride, unpacked_if_one


def prefill(x: PrefillInputs, machine: Machine) -> None:
    """See `Backend.prefill`; states are fp32. Views of wider rows of tokens are read in place.

    Raises:
        ValueError: as `plan_of`
    """
    q, k, v, beta = x.q, x.k, x.v, x.beta
    if not (_has_rows(q) and _has_rows(k) and row_stride(q) == row_stride(k)):
        q, k = aligned(q), aligned(k)
    if not _has_rows(v):
        v = aligned(v)
    beta, head_gates = _in_rows(beta), has_head_gates(x)
    g = _in_rows(x.g) if head_gates else aligned(x.g)
    x = unpacked_if_one(x)
    A_log, dt_bias, offsets = (None if t is None else aligned(t) for t in (x.A_log, x.dt_bias, x.cu_seqlens))
    finishes = last_tokens.possible(q.shape[1], offsets is not None)
    state = None if x.state is None else _pool(x.state, finishes)
    slots, stops = (None if t is None else t.contiguous() for t in (x.state_indices, x.checkpoint_at))
    o = aligned(x.o)
    order = last_tokens.order_of(x._replace(cu_seqlens=offsets), stops, machine)
    kept = last_tokens.states_before(x, order) if finishes and state is None else None
    rows = Rows(
        row_stride(q), row_stride(v), row_stride(beta), _is_int64(slots), _is_int64(stops),
        0 if state is None else state.shape[0], 0 if state is None else state.stride(0),
        row_stride(g) if head_gates else 0,
    )  # fmt: skip
    s = Signature.of_prefill(x, rows, finishes)
    if offsets is not None or last_tokens.has_chunks(q.shape[1]) or stops is not None:
        pointers = functools.partial(
            PARAMS.point, q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, cu_seqlens=offsets, o=o,
            final_state=state, checkpoints=x.checkpoints, slots=slots, stops=stops,
            order=None if order is None else order.order, before_last=kept,
        )  # fmt: skip

        def run(plan: Plan) -> None:
            ring, progress = plan.scratch(q.device)
            plan.run(pointers(ring=ring, progress=progress))

        forms.attempt(run, machine, s)
    if finishes:
        given = x._replace(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, cu_seqlens=offsets)
        last_tokens.finish(given, s, o, state, state if kept is None else kept, state, machine, order, slots)
    if o is not x.o:
        x.o.copy_(o)
    if x.state is not None and state is not None and state is not x.state:
        x.state.copy_(state)


def _flattens(t: Tensor) -> bool:
    """True if the tokens of t [B, T, ...] are rows at one stride."""
    return t.shape[0] == 1 or t.shape[1] == 1 or t.stride(0) == t.shape[1] * t.stride(1)


def _in_rows(t: Tensor) -> Tensor:
    """`t` with one element of each head, or a copy unless heads are side by side and tokens rows at one stride."""
    return t if t.stride(2) == 1 and _flattens(t) else t.contiguous()


def _has_rows(t: Tensor) -> bool:
    """True if the kernel can read t [B, T, heads, D], whose heads are side by side, by vectors of 16 bytes."""
    aligned_rows = t.data_ptr() % 16 == 0 and row_stride(t) * t.element_size() % 16 == 0
    return t.stride()[2:] == (t.shape[3], 1) and _flattens(t) and aligned_rows


def _pool(state: Tensor, in_vectors: bool) -> Tensor:
    """`state`, or a copy unless the heads of a slot are side by side, and slots aligned if read `in_vectors`."""
    V, K = state.shape[2:]
    aligned = state.data_ptr() % 16 == 0 and state.stride(0) * state.element_size() % 16 == 0
    if state.stride()[1:] == (V * K, K, 1) and (aligned or not in_vectors):
        return state
    return state.clone(memory_format=torch.contiguous_format)


def _is_int64(t: Tensor | None) -> bool:
    return t is not None and t.dtype == torch.int64
