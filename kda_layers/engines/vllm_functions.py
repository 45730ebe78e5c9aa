"""Functions for the keywords with which vLLM calls those that `vllm.py` replaces; it passes nothing by position.

Two kinds of modules of vLLM have such functions: those of Kimi-K3 and Kimi-Linear take logits of gate and beta, `raw_g`
and `raw_beta`; those of GLM-5.3-Flash and Ling take `beta`, and the log-decay `g` of decoded tokens, after their
activation. In both, slots up to 0 of a pool are padding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kda_layers.engines import calls
from kda_layers.kernels.kda.contract import NO_SLOT

NOT_GIVEN: Any = object()


def chunk(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
    lower_bound: float | None,
    raw_g: Tensor | None = None,
    g: Tensor | None = None,
    raw_beta: Tensor | None = None,
    beta: Tensor | None = None,
    A_log: Tensor | None = None,
    g_bias: Tensor | None = None,
    safe_gate: bool = True,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return o [1, T, H, V], or `out`, and the states [N, HV, V, K] after packed sequences, or None.

    Args:
        q, k, v: [1, T, H, K], [1, T, H, K], [1, T, H, V] in bf16 or fp16, packed as cu_seqlens [N + 1] says.
        initial_state: [N, H, V, K]; None for zeros.
        raw_g, g: logits of the gate, or its log-decay, [1, T, H, K]. The gate of logits has `lower_bound`, unless that
            is None or `safe_gate` False. With `g` both are ignored, as in vLLM: Ling has applied the gate.
        raw_beta, beta: logits of beta, or beta, [1, T, H].
        A_log, g_bias: [H] and [H, K] or [H K], of the gate of logits.

    Raises:
        ValueError: neither of raw_g and g, or of raw_beta and beta; logits of the gate without A_log.
    """
    bound = lower_bound if safe_gate else None
    return calls.prefill_from(
        q, k, v, _one_of(raw_g=raw_g, g=g), _one_of(raw_beta=raw_beta, beta=beta), initial_state, output_final_state,
        cu_seqlens, out, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
        **_activations(raw_g is not None, raw_beta is not None, A_log, g_bias, bound, q.shape[3]),
    )  # fmt: skip


def recurrent(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    ssm_state_indices: Tensor | None,
    lower_bound: float | None = NOT_GIVEN,
    raw_g: Tensor | None = None,
    g: Tensor | None = None,
    raw_beta: Tensor | None = None,
    beta: Tensor | None = None,
    A_log: Tensor | None = None,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    g_bias: Tensor | None = None,
    compute_gate: bool = False,
    sigmoid_beta: bool = False,
    safe_gate: bool = False,
    num_accepted_tokens: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o [1, T, H, V] of a few tokens of each sequence, and the pool `initial_state`, which is updated.

    Args:
        q, k, v: [1, T, H, K], [1, T, H, K], [1, T, H, V] in bf16 or fp16, packed as cu_seqlens [N + 1] says.
        initial_state: [slots, H, V, K], read and overwritten at ssm_state_indices [N] or [N, tokens].
        raw_g, g: logits of the gate, or its log-decay, [1, T, H, K]; with `compute_gate`, `g` holds logits, too.
            `lower_bound` is read where the gate is computed; `safe_gate` is ignored, as in vLLM.
        raw_beta, beta: logits of beta, or beta, [1, T, H]; with `sigmoid_beta`, `beta` holds logits, too.
        A_log, dt_bias: [H] and [H, K] or [H K], of raw_g; a_log, g_bias: the same, of g.

    Raises:
        ValueError: states that are not to be updated in place; neither of raw_g and g, or of raw_beta and beta; logits
            of the gate without A_log or lower_bound.
    """
    if initial_state is None or ssm_state_indices is None or not inplace_final_state:
        raise ValueError(
            "initial_state and ssm_state_indices must be a pool and its slots, and inplace_final_state True, as states "
            f"are updated in place; got {type(initial_state).__name__}, {type(ssm_state_indices).__name__} and "
            f"{inplace_final_state}"
        )
    gate_logits, beta_logits = raw_g is not None or compute_gate, raw_beta is not None or sigmoid_beta
    if gate_logits and lower_bound is NOT_GIVEN:
        raise ValueError("lower_bound must be given with logits of the gate, None for softplus, got nothing")
    rate, bias = (A_log, dt_bias) if raw_g is not None else (a_log, g_bias)
    o = calls.step(
        q, k, v, _one_of(raw_g=raw_g, g=g), _one_of(raw_beta=raw_beta, beta=beta), initial_state,
        _slots(ssm_state_indices), cu_seqlens, out, scale=scale, num_accepted=num_accepted_tokens,
        qk_l2norm=use_qk_l2norm_in_kernel,
        **_activations(gate_logits, beta_logits, rate, bias, lower_bound, q.shape[3]),
    )  # fmt: skip
    return o, initial_state


recurrent_forward = partial(recurrent, use_qk_l2norm_in_kernel=False)  # fused_recurrent_kda_fwd has another default


def packed_decode(
    *,
    mixed_qkv: Tensor,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the results of `recurrent` for one token of each sequence, q, k and v in one row [N, 2 H K + H V]."""
    _, H, V, K = initial_state.shape
    q, k, v = (t.unflatten(-1, (H, -1))[None] for t in mixed_qkv.split([H * K, H * K, H * V], -1))
    o = calls.step(
        q, k, v, raw_g, raw_beta, initial_state, _slots(state_indices), None, out, scale=scale,
        **_activations(True, True, A_log, dt_bias, lower_bound, K),
    )  # fmt: skip
    return o, initial_state


def _slots(indices: Tensor) -> Tensor:
    return torch.where(indices > 0, indices, NO_SLOT)


def _one_of(**tensors: Tensor | None) -> Tensor:
    for t in tensors.values():
        if t is not None:
            return t
    raise ValueError(f"one of {' and '.join(tensors)} must be given, got neither")


def _activations(
    gate_logits: bool, beta_logits: bool, A_log: Tensor | None, bias: Tensor | None, bound: float | None, K: int
) -> dict[str, Any]:
    """Return the arguments of `kda` for logits of the gate, with A_log, or its log-decay, and for logits of beta."""
    beta = "sigmoid" if beta_logits else "given"
    if not gate_logits:
        return dict(gate_activation="log_decay", beta_activation=beta)
    if A_log is None:
        raise ValueError("A_log (a_log with compute_gate) must be given with logits of the gate, got None")
    return calls.gate(A_log, bias, bound, K) | dict(beta_activation=beta)
