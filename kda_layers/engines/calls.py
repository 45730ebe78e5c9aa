"""Calls of the operator as engines make them: packed tokens, flat parameters of the gate, slots of their pools."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_layers.kernels.kda.contract import PrefillOutput, state_dtype
from kda_layers.kernels.kda.op import kda_prefill, kda_step


def gate(A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None, K: int) -> dict[str, Any]:
    """Return the gate's arguments of `kda` for A_log and dt_bias of any shape with HV and HV K elements, and a bound or
    None for softplus."""
    return dict(
        A_log=A_log.reshape(-1).float(),
        dt_bias=None if dt_bias is None else dt_bias.reshape(-1, K).float(),
        gate_activation="softplus" if lower_bound is None else "lower_bound",
        lower_bound=lower_bound,
    )


@torch.no_grad()
def prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, out: Tensor | None = None,
    **options: Any,
) -> PrefillOutput:  # fmt: skip
    """`kda_prefill` of packed sequences, which reads rows of wider tensors in place.

    Args:
        q, k, v: [1, T, heads, D].
        g, beta: logits or activations with T HV K and T HV elements.
        state, out: as of `kda_prefill`.
    """
    (_, T, HV, _), K = v.shape, q.shape[3]
    return kda_prefill(q, k, v, g.reshape(1, T, HV, K), beta.reshape(1, T, HV), state, out=out, **options)


def prefill_from(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, final_state: bool,
    cu_seqlens: Tensor | None, out: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`prefill` that does not write the initial states [N, HV, V, K]; returns o and the final states, or None."""
    state, wide = None, state_dtype(q.dtype)
    if initial_state is not None:
        state = initial_state.to(wide, copy=True, memory_format=torch.contiguous_format)
    elif final_state:
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = q.new_zeros(N, *v.shape[2:], q.shape[3], dtype=wide)
    o, _ = prefill(q, k, v, g, beta, state, out, cu_seqlens=cu_seqlens, **options)
    if not final_state or state is None:
        return o, None
    return o, state if initial_state is None else state.to(initial_state.dtype)


@torch.no_grad()
def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor, cu_seqlens: Tensor | None,
    out: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """`kda_step` of packed sequences; returns o [1, T, HV, V], or `out`, which is contiguous.

    Args:
        q, k, v: [1, T, heads, D].
        g, beta: logits or activations with T HV K and T HV elements.
        pool: [slots, HV, V, K], updated in place.
        slots: [N], or with drafts [rows, columns]. Rows after the first N are ignored, as are those of num_accepted.
        cu_seqlens: [N + 1]; not read with slots [T], where every sequence has one token.
    """
    (_, T, HV, _), K = v.shape, q.shape[3]
    inputs = [q, k, v, g.reshape(1, T, HV, K), beta.reshape(1, T, HV)]
    if slots.ndim == 1 and slots.shape[0] == T:  # as rows of a batch: nothing about the sequences is to be read
        q, k, v, g, beta = (t.transpose(0, 1) for t in inputs)
        rows = None if out is None else out.transpose(0, 1)
        return kda_step(q, k, v, g, beta, pool, state_indices=slots, out=rows, **options).transpose(0, 1)
    q, k, v, g, beta = inputs
    assert cu_seqlens is not None
    N = cu_seqlens.shape[0] - 1
    if options.get("num_accepted") is not None:
        options["num_accepted"] = options["num_accepted"][:N]
    slots = slots[:N]
    return kda_step(q, k, v, g, beta, pool, state_indices=slots, cu_seqlens=cu_seqlens, out=out, **options)
