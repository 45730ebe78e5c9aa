"""Functions with the signatures of those of vLLM that `vllm.py` replaces.

Two kinds of modules of vLLM have such functions: those of Kimi-K3 and Kimi-Linear take logits of gate and beta, those
of GLM-5.3-Flash and Ling take beta, and the log-decay of decoded tokens, after their activation. In both, slots up to 0
of a pool are padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_layers.engines import calls
from kda_layers.kernels.kda.contract import NO_SLOT


def _slots(indices: Tensor) -> Tensor:
    return torch.where(indices > 0, indices, NO_SLOT)


# ---------------------------------------------------------------- Kimi-K3, Kimi-Linear: logits


def chunk_from_logits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    *,
    beta_activation: str = "sigmoid",
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda_with_fused_gate`: o [1, T, HV, V], or `out`, and the states [N, HV, V, K] after packed sequences.

    `beta_activation`, as of `kda`, is not vLLM's.
    """
    return calls.prefill_from(
        q, k, v, raw_g, raw_beta, initial_state, output_final_state, cu_seqlens, out, scale=scale,
        qk_l2norm=use_qk_l2norm_in_kernel, beta_activation=beta_activation,
        **calls.gate(A_log, g_bias, lower_bound, q.shape[3]),
    )  # fmt: skip


def recurrent_from_logits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`fused_recurrent_kda`: o [1, T, H, V] of a few tokens of each sequence, and the pool, which is updated.

    `fuse_gate` chooses between two ways to the same result there.
    """
    o = calls.step(
        q, k, v, raw_g, raw_beta, initial_state, _slots(ssm_state_indices), cu_seqlens,
        out, num_accepted=num_accepted_tokens, **calls.gate(A_log, dt_bias, lower_bound, q.shape[3]),
    )  # fmt: skip
    return o, initial_state


def packed_decode_from_logits(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`fused_recurrent_kda_packed_decode`: one token of each sequence, q, k and v in one row [N, 2 H K + H V]."""
    _, H, V, K = initial_state.shape
    q, k, v = (t.unflatten(-1, (H, -1))[None] for t in mixed_qkv.split([H * K, H * K, H * V], -1))
    o = calls.step(
        q, k, v, raw_g, raw_beta, initial_state, _slots(state_indices), None, out, scale=scale,
        **calls.gate(A_log, dt_bias, lower_bound, K),
    )  # fmt: skip
    return o, initial_state


# ---------------------------------------------------------------- GLM-5.3-Flash, Ling: activations


def chunk_from_beta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float = -5.0,
) -> tuple[Tensor, Tensor | None]:
    """As `chunk_from_logits` with beta after its activation; `safe_gate` says that the gate has the lower bound."""
    return chunk_from_logits(
        q, k, v, raw_g, beta, A_log, g_bias, scale, initial_state, output_final_state,
        lower_bound if safe_gate else None, use_qk_l2norm_in_kernel, cu_seqlens, beta_activation="given",
    )  # fmt: skip


def chunk_from_decays(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda`, as `chunk_from_logits` with the log-decay g and beta after its activation.

    `safe_gate` and `lower_bound` speak of the gate that Ling has applied; they are not read, as in vLLM.
    """
    return calls.prefill_from(
        q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, scale=scale,
        qk_l2norm=use_qk_l2norm_in_kernel, beta_activation="given", gate_activation="log_decay",
    )  # fmt: skip


def recurrent_from_decays(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    sigmoid_beta: bool = False,
    a_log: Tensor | None = None,
    g_bias: Tensor | None = None,
    compute_gate: bool = False,
    lower_bound: float | None = -5.0,
    safe_gate: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `recurrent_from_logits` with the log-decay g, or with `compute_gate` its logits, and beta, or with
    `sigmoid_beta` its logits.

    `lower_bound` is read with `compute_gate` alone, and `safe_gate`, which speaks of the gate that Ling has applied, is
    not.

    Raises:
        ValueError: states that are not to be updated in place.
    """
    if initial_state is None or ssm_state_indices is None or not inplace_final_state:
        raise ValueError(
            "fused_recurrent_kda of kda_layers takes a pool and its slots, which it updates: initial_state and "
            "ssm_state_indices must be given and inplace_final_state True"
        )
    if compute_gate:
        assert a_log is not None
        activation = calls.gate(a_log, g_bias, lower_bound, q.shape[3])
    else:
        activation = dict(gate_activation="log_decay")
    o = calls.step(
        q, k, v, g, beta, initial_state, _slots(ssm_state_indices), cu_seqlens, out, scale=scale,
        num_accepted=num_accepted_tokens, qk_l2norm=use_qk_l2norm_in_kernel,
        beta_activation="sigmoid" if sigmoid_beta else "given", **activation,
    )  # fmt: skip
    return o, initial_state


def drafts_from_decays(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """`fused_recurrent_kda_fwd`, as `recurrent_from_decays` of log-decay and beta."""
    return recurrent_from_decays(
        q, k, v, g, beta, scale, initial_state, inplace_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        ssm_state_indices, num_accepted_tokens,
    )  # fmt: skip
