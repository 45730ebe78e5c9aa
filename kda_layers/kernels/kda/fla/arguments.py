"""Arguments of flash-linear-attention's functions translated to those of our operators."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ...checks import check_is_tensor
from ..contract import state_dtype, state_dtypes

# Arguments of flash-linear-attention without a counterpart here: name, default, what to do instead.
UNSUPPORTED = (
    ("cp_context", None, "context parallelism is not supported, give every rank full sequences"),
    ("use_graph", False, "a CUDA graph captures the call without it, and reads cu_seqlens again at every replay"),
    ("max_num_seqs", None, "the shape of cu_seqlens says how many sequences there are"),
    ("chunk_indices", None, "they follow from cu_seqlens"),
)


def state_to_update(
    q: Tensor, v: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, v_first: bool, in_place: bool
) -> Tensor:
    """Return the states [N, HV, V, K] that `kda_step` updates: `initial` itself only `in_place` and in its layout."""
    wide = state_dtype(q.dtype)
    if initial is None:
        N = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        return q.new_zeros(N, v.shape[-2], v.shape[-1], q.shape[-1], dtype=wide)
    if in_place and v_first:
        return initial
    dtype = wide if not in_place and initial.dtype in state_dtypes(q.dtype) else initial.dtype
    return v_first_view(initial, q, v, v_first).to(dtype, copy=True, memory_format=torch.contiguous_format)


def check_arguments(
    q: Tensor, v: Tensor, v_first: bool, transpose_state_layout: bool | None, *unsupported: Any
) -> bool:
    """Check q, v and the arguments of `UNSUPPORTED`; return state_v_first."""
    check_is_tensor("q", q)
    check_is_tensor("v", v)
    if transpose_state_layout is not None:
        if v_first:
            raise ValueError("transpose_state_layout is the deprecated name of state_v_first: give only state_v_first")
        if not torch.compiler.is_compiling():  # a warning would break the graph
            warnings.warn("transpose_state_layout is deprecated: use state_v_first", DeprecationWarning, stacklevel=3)
        v_first = transpose_state_layout
    for (name, default, instead), value in zip(UNSUPPORTED, unsupported, strict=True):
        if value is not default:
            raise ValueError(f"{name} must be {default}, got {value}: {instead}")
    return v_first


def checked_offsets(q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Tensor | None:
    """Return the offsets [N + 1] on q's device, from whichever of the two is given; None for neither."""
    if cu_seqlens_cpu is None:
        return cu_seqlens
    check_is_tensor("cu_seqlens_cpu", cu_seqlens_cpu)
    if cu_seqlens is None:
        return cu_seqlens_cpu.to(q.device)
    check_is_tensor("cu_seqlens", cu_seqlens)
    expected, got = list(cu_seqlens.shape), list(cu_seqlens_cpu.shape)
    if got != expected:
        raise ValueError(f"cu_seqlens_cpu must have the shape of cu_seqlens {expected}, got {got}")
    return cu_seqlens


def v_first_view(state: Tensor, q: Tensor, v: Tensor, v_first: bool) -> Tensor:
    """View a state in the caller's layout as [N, HV, V, K]."""
    if v_first:
        return state
    K, V = q.shape[-1], v.shape[-1]
    if state.ndim != 4 or tuple(state.shape[2:]) != (K, V):
        raise ValueError(
            f"initial_state must have shape [N, HV, K, V] = [.., {v.shape[-2]}, {K}, {V}] with state_v_first=False, "
            f"got {list(state.shape)}"
        )
    return state.mT


def operator_activations(
    q: Tensor,
    g: Tensor,
    use_gate: bool,
    lower_bound: float | None,
    beta_logits: bool,
    allow_neg_eigval: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> dict[str, Any]:
    """Translate the gate and beta arguments of `chunk_kda`, with g [B, T, HV, K], to those of `kda`."""
    if allow_neg_eigval and not beta_logits:
        raise ValueError("use_beta_sigmoid_in_kernel must be True with allow_neg_eigval=True, got False")
    beta = ("2sigmoid" if allow_neg_eigval else "sigmoid") if beta_logits else "given"
    if not use_gate:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise ValueError(f"{name} must be None with use_gate_in_kernel=False: g is then used as it is")
        return {"gate_activation": "log_decay", "beta_activation": beta}  # lower_bound is ignored
    check_is_tensor("g", g)
    A_log, dt_bias = gate_parameters(g, A_log, dt_bias, lower_bound, state_dtype(q.dtype))
    return {
        "gate_activation": "softplus" if lower_bound is None else "lower_bound",
        "lower_bound": lower_bound,
        "beta_activation": beta,
        "A_log": A_log,
        "dt_bias": dt_bias,
    }


def gate_parameters(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Check A_log and dt_bias against g [..., HV, K]; return them as [HV] and [HV, K] in `dtype`."""
    if g.ndim < 2:
        raise ValueError(f"g must have shape [..., HV, K], got {list(g.shape)}")
    HV, K = g.shape[-2:]
    if A_log is None and lower_bound is None:
        raise ValueError("A_log must be given for a gate without lower_bound, got None")
    if A_log is not None:
        check_is_tensor("A_log", A_log)
        if A_log.numel() != HV:
            raise ValueError(f"A_log must have {HV} elements, one for each head of g, got shape {list(A_log.shape)}")
        A_log = A_log.reshape(HV).to(dtype)
    if dt_bias is not None:
        check_is_tensor("dt_bias", dt_bias)
        if dt_bias.numel() != HV * K or tuple(dt_bias.shape[-1:]) not in ((HV * K,), (K,)):
            raise ValueError(f"dt_bias must have shape [{HV * K}] or [{HV}, {K}], got {list(dt_bias.shape)}")
        dt_bias = dt_bias.reshape(HV, K).to(dtype)
    return A_log, dt_bias
