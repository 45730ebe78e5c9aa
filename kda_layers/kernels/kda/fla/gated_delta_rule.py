"""`chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule` with the interface of flash-linear-attention 0.6.

There is one gate a head. Arguments, their positions, defaults and meaning, and the returned dtypes are those of that
package. These raise here:

* arguments that it ignores: unknown keywords, A_log and dt_bias without use_gate_in_kernel;
* cp_context and chunk_indices other than their defaults, head_first=True, which it refuses, too;
* gv, beta of another shape than [B, T, HV], and use_gate_in_kernel with gk.

Only here: fp64 (computed in fp32 there), gradients of `fused_recurrent_gated_delta_rule`, and `backend`.

Source of names and meaning: flash-linear-attention 0.6.0, fla.ops.gated_delta_rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...checks import check_is_tensor
from ..contract import CHUNK, state_dtype
from ..op import kda, kda_step
from .arguments import check_arguments, checked_offsets, operator_activations, state_to_update, v_first_view

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: None = None,
    cp_context: None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = CHUNK,
    transpose_state_layout: bool | None = None,
    head_first: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over full sequences, with flash-linear-attention's arguments; see `kda_layers.kda`.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. g, beta: [B, T, HV].
        scale: K ** -0.5 if None.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first; fp32 (fp64 for fp64 inputs), with 16-bit
            inputs also bf16.
        output_final_state: also return the final state, in the same layout.
        use_qk_l2norm_in_kernel: normalise q and k.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: beta holds logits; the latter doubles their sigmoid.
        state_v_first: states are [V, K].
        cu_seqlens, cu_seqlens_cpu: [N + 1] offsets of packed sequences, and the same on the CPU.
        chunk_indices, cp_context: must be None.
        use_gate_in_kernel: g holds logits: the log-decay is -exp(A_log) softplus(g + dt_bias); otherwise g is it.
        A_log, dt_bias: HV elements, any float dtype.
        chunk_size: 64, 32 or 16, which changes no result here.
        transpose_state_layout: deprecated name of state_v_first.
        head_first: must be False: tokens come before heads.
        backend: see `kda_layers.kda`.

    Returns:
        (o [B, T, HV, V] in v's dtype, final state or None). The final state is fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _check_head_first(head_first)
    v_first = check_arguments(q, v, state_v_first, transpose_state_layout, cp_context, False, None, chunk_indices)
    if chunk_size not in (16, 32, CHUNK):
        raise ValueError(f"chunk_size must be 16, 32 or {CHUNK}, got {chunk_size}")
    _check_gate(g)
    options = _activations(q, g, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, A_log, dt_bias)
    options |= dict(scale=scale, qk_l2norm=use_qk_l2norm_in_kernel, backend=backend)
    offsets = checked_offsets(q, cu_seqlens, cu_seqlens_cpu)
    return _whole(q, k, v, g, beta, initial_state, output_final_state, v_first, offsets, options)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    head_first: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Decoding with flash-linear-attention's arguments; see `kda_layers.kda_step`.

    If a gradient is needed, which flash-linear-attention does not have, the sequences are computed by chunks. Arguments
    that are not listed are those of `chunk_gated_delta_rule`.

    Args:
        g: [B, T, HV]; None: no decay.
        gk: [B, T, HV, K] log-decays of the key channels, added to g; only without use_gate_in_kernel.
        gv: must be None: there is no decay of value channels.
        beta: [B, T, HV]; None: 1, only without use_beta_sigmoid_in_kernel.

    Returns:
        As `chunk_gated_delta_rule`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _check_head_first(head_first)
    v_first = check_arguments(q, v, state_v_first, transpose_state_layout, None, False, None, None)
    if gv is not None:
        raise ValueError("gv must be None, got a tensor: states have no decay of value channels here")
    if use_gate_in_kernel and (g is None or gk is not None):
        given = "None" if g is None else "a tensor and gk"
        raise ValueError(f"g must hold logits, and gk be None, with use_gate_in_kernel=True, got {given}")
    if beta is None and use_beta_sigmoid_in_kernel:
        raise ValueError("beta must be given with use_beta_sigmoid_in_kernel=True, got None")
    if g is None:
        g = v.new_zeros(v.shape[:-1])
    _check_gate(g)
    beta = v.new_ones(v.shape[:-1]) if beta is None else beta
    options = _activations(q, g, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, A_log, dt_bias)
    options |= dict(scale=scale, qk_l2norm=use_qk_l2norm_in_kernel, backend=backend)
    if gk is not None:
        check_is_tensor("gk", gk)
        g = gk.to(state_dtype(q.dtype)) + g[..., None]
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _whole(q, k, v, g, beta, initial_state, output_final_state, v_first, cu_seqlens, options)
    state = state_to_update(q, v, initial_state, cu_seqlens, v_first, in_place=False)
    o = kda_step(q, k, v, g, beta, state, cu_seqlens=cu_seqlens, **options)
    return o, (state if v_first else state.mT.contiguous()) if output_final_state else None


def _whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    v_first: bool,
    cu_seqlens: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Run `kda` with states in the caller's layout."""
    state = None if initial_state is None else v_first_view(initial_state, q, v, v_first).contiguous()
    o, final, _ = kda(
        q, k, v, g, beta, initial_state=state, cu_seqlens=cu_seqlens, return_final_state=output_final_state,
        state_dtype=state_dtype(q.dtype), **options,
    )  # fmt: skip
    return o, final if v_first or final is None else final.mT.contiguous()


def _activations(q: Tensor, g: Tensor, use_gate: bool, *more: Any) -> dict[str, Any]:
    """As `operator_activations`, with dt_bias [HV]."""
    options = operator_activations(q, g[..., None], use_gate, None, *more)
    bias = options.get("dt_bias")
    return options if bias is None else options | {"dt_bias": bias[:, 0]}


def _check_gate(g: Any) -> None:
    check_is_tensor("g", g)
    if g.ndim != 3:
        channels = ": chunk_kda takes a gate for each key channel" if g.ndim == 4 else ""
        raise ValueError(f"g must have shape [B, T, HV], got {list(g.shape)}{channels}")


def _check_head_first(head_first: Any) -> None:
    if head_first:
        raise ValueError(
            f"head_first must be False, got {head_first}: tokens come before heads, pass each tensor's .transpose(1, 2)"
        )
