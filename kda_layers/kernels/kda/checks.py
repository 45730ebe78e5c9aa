"""The validators of the operators: an error names the argument, what was expected and what came."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import torch_private
from ..checks import DTYPES, DtypeError, check_index, check_is_tensor, check_offsets, check_tensor, dtype_names
from ..declarations import one_of
from ..deprecation import recompute_words
from ..tracing import is_plain
from .activations import BETA_ACTIVATIONS, GATE_ACTIVATIONS, GATES, GIVEN, LOG_DECAY, MIN_LOWER_BOUND
from .contract import (
    CHUNK,
    MOST_SAVED,
    SEGMENTS,
    CommitInputs,
    DecodeInputs,
    Inputs,
    PrefillInputs,
    state_dtype,
    state_dtypes,
)


def check_whole(x: Inputs) -> None:
    """Raise a TypeError or ValueError naming the argument unless `x` keeps the contract of `kda`."""
    N, _, *state_shape = check_common(x)
    if x.initial_state is not None:
        _check_state("initial_state", x.initial_state, x.q, (N, *state_shape))
    if not isinstance(x.checkpoint_every, int) or x.checkpoint_every not in (0, CHUNK):
        raise ValueError(f"checkpoint_every must be 0 or {CHUNK}, got {x.checkpoint_every}")


def check_prefill(x: PrefillInputs) -> None:
    """Raise a TypeError or ValueError naming the argument unless `x` keeps the contract of `kda_prefill`; `x.o` is the
    caller's `out` or None."""
    N, _, HV, V, K = check_common(x)
    if x.state_indices is not None:
        if x.state is None:
            raise ValueError("state must be a pool of states with state_indices, got None")
        check_is_tensor("state", x.state)
        _check_state("state", x.state, x.q, (*x.state.shape[:1], HV, V, K), writes=True)
        if not x.state.shape[0]:
            raise ValueError("state must have at least 1 slot, got 0")
        check_of_sequences("state_indices", x.state_indices, x.q, N)
    elif x.state is not None:
        _check_state("state", x.state, x.q, (N, HV, V, K), writes=True)
    if x.checkpoint_at is not None:
        check_of_sequences("checkpoint_at", x.checkpoint_at, x.q, N)
    check_out(x.o, x)


def check_out(out: Any, x: Any) -> None:
    """Raise unless `out` is None or can take the output of `x`."""
    if out is None:
        return
    check_tensor("out", out, tuple(x.v.shape), (x.v.dtype,), x.q)
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}: pass torch.empty_like(v)")
    check_writable("out", out)
    for name in ("q", "k", "v", "g", "f", "gate", "beta") if is_plain(x) else ():
        if hasattr(x, name) and getattr(x, name).data_ptr() == out.data_ptr():
            raise ValueError(f"out must not overlap an input, got the memory of {name}: pass torch.empty_like(v)")


def check_of_sequences(name: str, t: Any, q: Tensor, N: int, like: str = "q") -> None:
    """Raise unless `t` has an index for each of N sequences, on the device of q, which messages call `like`."""
    check_index(name, t, q, like)
    if tuple(t.shape) != (N,):
        raise ValueError(f"{name} must have shape [{N}], a value for each sequence, got {list(t.shape)}")


def check_decode(x: DecodeInputs) -> None:
    """Raise a TypeError or ValueError naming the argument unless `x` keeps the contract of `kda_step`."""
    N, T, *state_shape = check_common(x)
    columns, more = 1 if x.cu_seqlens is not None else T, () if x.q.dtype == torch.float64 else (torch.int8,)
    check_slots(x.q, x.state, x.state_indices, x.num_accepted, (N, *state_shape), columns, more)
    _check_state_scale(x)
    _check_initial(x, N)
    check_out(x.out, x)


def _check_initial(x: DecodeInputs, N: int) -> None:
    """Raise unless `initial_state` and its indices can be read in place of `state`, which has been checked."""
    state, indices = x.initial_state, x.initial_indices
    if (state is None) != (indices is None):
        raise ValueError(
            "initial_state and initial_indices must be given together, got "
            f"{type(state).__name__} and {type(indices).__name__}"
        )
    if state is None:
        return
    if x.state_indices is None or x.num_accepted is not None or x.state.dtype == torch.int8:
        raise ValueError(
            "initial_state needs state_indices, the slots that are written, no num_accepted and no int8 state, got "
            f"{type(x.state_indices).__name__}, {type(x.num_accepted).__name__} and {dtype_names([x.state.dtype])}"
        )
    check_is_tensor("initial_state", state)
    shape = *state.shape[:1], *x.state.shape[1:]
    check_tensor("initial_state", state, shape, (x.state.dtype,), x.state, "state")
    check_matrices("initial_state", state)
    check_of_sequences("initial_indices", indices, x.q, N)


def refuse_gradients(name: str, x: PrefillInputs | DecodeInputs | CommitInputs) -> None:
    """Raise if gradients are enabled and a tensor of `x` requires one, which an operator in place cannot give."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in x):
        raise ValueError(f"{name} updates the state in place and has no gradient: call it under torch.no_grad()")


def check_slots(
    q: Tensor,
    state: Any,
    state_indices: Any,
    num_accepted: Any,
    shape: tuple[int, ...],
    columns: int,
    more_dtypes: tuple[torch.dtype, ...] = (),
) -> None:
    """Raise unless `state` has `shape` [N, HV, V, K], or with state_indices is a pool of such states.

    Args:
        columns: how many state_indices [N, columns] must have at least
        more_dtypes: of the state, beside `state_dtypes`
    """
    N = shape[0]
    pooled = state_indices is not None and isinstance(state, Tensor) and state.ndim == 4
    _check_state("state", state, q, (state.shape[0], *shape[1:]) if pooled else shape, more_dtypes, writes=True)
    if state_indices is not None:
        check_index("state_indices", state_indices, q)
        given = tuple(state_indices.shape)
        if given[:1] != (N,) or not (len(given) == 1 or (len(given) == 2 and given[1] >= columns)):
            raise ValueError(f"state_indices must have shape [{N}] or [{N}, at least {columns}], got {list(given)}")
    if num_accepted is not None:
        check_of_sequences("num_accepted", num_accepted, q, N)
        if state_indices is None or state_indices.ndim != 2:
            raise ValueError("num_accepted needs state_indices of shape [N, T]: a slot for the state after each token")


def _check_state_scale(x: DecodeInputs) -> None:
    """Raise unless `state_scale` goes with `state`, which has been checked."""
    scale = x.state_scale
    if x.state.dtype != torch.int8:
        if scale is not None:
            raise ValueError(f"state_scale must be None with a state of {dtype_names([x.state.dtype])}, which has none")
        return
    if scale is None:
        raise ValueError(
            "state_scale must be given with an int8 state, got None: state, state_scale = quantize_state(state)"
        )
    check_tensor("state_scale", scale, tuple(x.state.shape[:3]), (torch.float32,), x.state, "state")
    if scale.shape[2] > 1 and scale.stride(2) != 1:
        raise ValueError(
            f"state_scale must have contiguous rows [V], got strides {scale.stride()}; pass state_scale.contiguous()"
        )
    check_writable("state_scale", scale)


def check_common(x: Inputs | DecodeInputs | PrefillInputs) -> tuple[int, int, int, int, int]:
    """Check the fields that all operators on tokens have; return N, T, HV, V and K."""
    q, v = x.q, x.v
    for name, t in (("q", q), ("v", v)):
        check_is_tensor(name, t)
        if t.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions, got shape {tuple(t.shape)}")
    (B, T, H, K), (_, _, HV, V) = q.shape, v.shape
    for name, dim in (("B", B), ("T", T), ("H", H), ("HV", HV), ("K", K), ("V", V)):
        if dim == 0:
            raise ValueError(f"{name} must be at least 1, got 0 (q {tuple(q.shape)}, v {tuple(v.shape)})")
    try:
        _check_tokens(x, B, T, H, HV, K, V)
    except ValueError:
        _check_layout(x)
        raise
    if x.cu_seqlens is None:
        return B, T, HV, V, K
    check_offsets(x.cu_seqlens, q)
    return x.cu_seqlens.shape[0] - 1, T, HV, V, K


def _check_tokens(x: Inputs | DecodeInputs | PrefillInputs, B: int, T: int, H: int, HV: int, K: int, V: int) -> None:
    """Check the tensors of tokens and the gate's parameters against the sizes of q and v."""
    if HV % H != 0:
        raise ValueError(f"v's {HV} heads must be a multiple of q's {H} heads (grouped value heads)")
    q, dtype, wide = x.q, x.q.dtype, state_dtype(x.q.dtype)
    if dtype not in DTYPES:
        raise DtypeError(f"q must be one of {dtype_names(DTYPES)}, got {dtype}: pass q.to(torch.bfloat16)")
    check_gate(x.gate_activation, x.beta_activation, x.A_log, x.dt_bias)
    check_tensor("k", x.k, (B, T, H, K), (dtype,), q)
    check_tensor("v", x.v, (B, T, HV, V), (dtype,), q)
    of_heads = isinstance(x.g, Tensor) and x.g.ndim == 3
    if of_heads and x.g.shape == (B, T, HV * K) != (B, T, HV):
        raise ValueError(
            f"g must have shape [B, T, HV, K] = {[B, T, HV, K]}, or {[B, T, HV]} for one gate a head, got "
            f"{list(x.g.shape)}; pass g.unflatten(-1, {(HV, K)})"
        )
    gates = (HV,) if of_heads else (HV, K)
    check_tensor("g", x.g, (B, T, *gates), (dtype, wide), q)
    check_tensor("beta", x.beta, (B, T, HV), (dtype, wide), q)
    if x.A_log is not None:
        check_tensor("A_log", x.A_log, (HV,), (wide,), q)
    if x.dt_bias is not None:
        check_tensor("dt_bias", x.dt_bias, gates, (wide,), q)


def _check_layout(x: Inputs | DecodeInputs | PrefillInputs) -> None:
    """Raise if the shape of beta [B, T, HV] or of a parameter of the gate shows that q or v is [B, H, T, D].

    Where all tensors of tokens agree in that order and no parameter has the heads, T and H cannot be told apart.
    """
    beta = x.beta.shape if isinstance(x.beta, Tensor) else ()
    for name, t in (("q", x.q.shape), ("v", x.v.shape)):
        if len(beta) == 3 and beta[1] != t[1] and beta[1] == t[2] and beta[2] % t[1] == 0:
            raise ValueError(
                f"{name} looks like [B, H, T, D], got {list(t)} with beta [B, T, H] = {list(beta)}: kda takes q, k, v "
                f"and g as [B, T, H, D], pass {name}.transpose(1, 2)"
            ) from None
    v = x.v.shape
    for name, p in (("A_log [HV]", x.A_log), ("dt_bias [HV, K]", x.dt_bias)):
        if isinstance(p, Tensor) and p.ndim and p.shape[0] == v[1] != v[2]:
            raise ValueError(
                f"v looks like [B, H, T, D], got {list(v)} with {name} = {list(p.shape)}: kda takes q, k, v and g as "
                "[B, T, H, D] and beta as [B, T, H], pass .transpose(1, 2) of each"
            ) from None


def check_gate(gate_activation: str, beta_activation: str, A_log: Tensor | None, dt_bias: Tensor | None) -> None:
    """Raise unless the activations exist and have the parameters that they need."""
    if beta_activation not in BETA_ACTIVATIONS:
        raise ValueError(f"beta_activation must be one of {BETA_ACTIVATIONS}, got {beta_activation!r}")
    if gate_activation == LOG_DECAY:
        for name, t in (("A_log", A_log), ("dt_bias", dt_bias)):
            if t is not None:
                raise ValueError(f"{name} must be None with gate_activation='log_decay', which uses g as it is")
    elif GATES[gate_activation].needs_rate and A_log is None:
        raise ValueError(f"A_log must be given with gate_activation={gate_activation!r}, got None")


def check_lower_bound(gate_activation: str, lower_bound: Any) -> float:
    """Check the gate's name and its bound; return the bound as a float, 0 for gates without one."""
    if gate_activation not in GATE_ACTIVATIONS:
        raise ValueError(f"gate_activation must be one of {GATE_ACTIVATIONS}, got {gate_activation!r}")
    if gate_activation == LOG_DECAY or not GATES[gate_activation].bounded:
        if lower_bound is not None:
            raise ValueError(f"lower_bound must be None with gate_activation={gate_activation!r}, got {lower_bound}")
        return 0.0
    if lower_bound is None:
        raise ValueError(f"lower_bound must be given with gate_activation={gate_activation!r}, got None")
    if isinstance(lower_bound, bool) or not isinstance(lower_bound, (int, float)):
        raise TypeError(f"lower_bound must be a number, got {type(lower_bound).__name__}")
    if not MIN_LOWER_BOUND <= lower_bound < 0:
        raise ValueError(f"lower_bound must be in [{MIN_LOWER_BOUND}, 0), got {lower_bound}")
    return float(lower_bound)


def gate_bound(gate_activation: str, lower_bound: Any) -> float:
    """Return the bound of an operator's gate as `check_lower_bound` does; the lowest for a bounded gate without one."""
    gate = GATES.get(gate_activation)
    if lower_bound is None and gate is not None and gate.bounded:
        return float(MIN_LOWER_BOUND)
    return check_lower_bound(gate_activation, lower_bound)


def check_recompute(recompute: Any, memory_share: Any = None) -> float:
    """Check both; return the share of the device's memory above which the backward runs the forward again."""
    if not isinstance(recompute, str):
        recompute, memory_share = recompute_words(recompute, memory_share)
    if not isinstance(recompute, str) or recompute not in ("auto", "always", "never"):
        raise ValueError(f"recompute must be 'auto', 'always' or 'never', got {recompute!r}")
    if memory_share is None:
        return _most_saved() if recompute == "auto" else float(recompute == "never")
    if recompute != "auto":
        raise ValueError(f"memory_share must be None with recompute={recompute!r}, got {memory_share!r}")
    if not isinstance(memory_share, float) or not 0 < memory_share < 1:
        raise ValueError(
            f"memory_share must be a float between 0 and 1, a share of the device's memory, got {memory_share!r}"
        )
    return memory_share


def check_segments(segments: Any) -> str:
    """Check `segments`; return it."""
    if not isinstance(segments, str) or segments not in SEGMENTS:
        raise ValueError(f"segments must be {one_of([repr(s) for s in SEGMENTS])}, got {segments!r}")
    return segments


@torch_private.constant_to_compile  # a symbolic float would be traced twice
def _most_saved() -> float:
    return MOST_SAVED


def check_values(x: Inputs | DecodeInputs | PrefillInputs) -> None:
    """Raise if a precomputed gate or beta is outside of its domain; NaN passes.

    Only plain CPU tensors are read: on a device this would synchronise, and it would break a trace.
    """
    decay, given = x.gate_activation == LOG_DECAY, x.beta_activation == GIVEN
    if not (decay or given) or x.q.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if not is_plain(x) or torch_private.transforms_active():
        return
    if decay and (x.g > 0).any():
        raise ValueError(
            "g must be at most 0 with gate_activation='log_decay' (the natural log of a decay in [0, 1]), "
            f"got up to {x.g.nan_to_num(-1.0).max():g}"
        )
    if given and ((x.beta < 0) | (x.beta > 2)).any():
        low, high = x.beta.nan_to_num(1.0).aminmax()
        raise ValueError(f"beta must be in [0, 2] with beta_activation='given', got {low:g} to {high:g}")


def check_state_dtype(x: Inputs, dtype: Any) -> torch.dtype:
    """The dtype of the returned states: `dtype`, else the initial state's, else the one they are computed in."""
    if dtype is None:
        return state_dtype(x.q.dtype) if x.initial_state is None else x.initial_state.dtype
    dtypes = state_dtypes(x.q.dtype)
    if dtype not in dtypes:
        raise DtypeError(f"state_dtype must be {dtype_names(dtypes)} with q of {dtype_names([x.q.dtype])}, got {dtype}")
    return dtype


def check_state_layout(state_layout: Any) -> bool:
    """Check `state_layout`; return True if states are [..., K, V]."""
    if state_layout not in ("vk", "kv"):
        raise ValueError(f"state_layout must be 'vk' or 'kv', got {state_layout!r}")
    return bool(state_layout == "kv")


def from_kv(name: str, state: Any, in_place: bool) -> Tensor:
    """Return a state [..., K, V] as [..., V, K], `in_place` as a view, which its memory must then allow."""
    check_is_tensor(name, state)
    if state.ndim < 2:
        raise ValueError(f"{name} must have shape [N, HV, K, V] with state_layout='kv', got {list(state.shape)}")
    (K, V), strides = state.shape[-2:], state.stride()[-2:]
    if K == 1 or V == 1 or strides == (1, K):
        return state.mT
    if in_place:
        raise ValueError(
            f"{name} must be a view [..., K, V] of [V, K] matrices (strides 1, {K}) with state_layout='kv', as it is "
            f"updated in place by rows of K, got strides {strides}; pass {name}.mT.contiguous().mT and keep it"
        )
    return state.mT.contiguous()


def _check_state(
    name: str, state: Any, q: Tensor, shape: tuple[int, ...], more_dtypes: tuple[torch.dtype, ...] = (),
    writes: bool = False,
) -> None:  # fmt: skip
    check_is_tensor(name, state)
    if state.shape != shape:
        swapped = tuple(state.shape) == (*shape[:2], shape[3], shape[2])
        hint = "; this is the [K, V] layout, pass state_layout='kv'" if swapped else ""
        raise ValueError(f"{name} must have shape [N, HV, V, K] = {list(shape)}, got {list(state.shape)}{hint}")
    dtypes = state_dtypes(q.dtype)
    if state.dtype not in (*dtypes, *more_dtypes):
        raise DtypeError(f"{name} must be {dtype_names(dtypes)} with q of {dtype_names([q.dtype])}, got {state.dtype}")
    if state.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {state.device}")
    check_matrices(name, state)
    if writes:
        check_writable(name, state)


def check_matrices(name: str, state: Tensor) -> None:
    """Raise unless the matrices [V, K] of a state are contiguous."""
    (V, K), strides = state.shape[2:], state.stride()[2:]
    if V > 1 and K > 1 and strides != (K, 1):
        raise ValueError(
            f"{name} must have contiguous [V, K] matrices (strides {K}, 1), got strides {strides}; "
            "pass state.contiguous()"
        )


def check_writable(name: str, state: Tensor) -> None:
    """Raise unless `state` can be updated in place, each of its elements on its own; not while compiling."""
    if torch.compiler.is_compiling():
        return
    if state.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} must not be an inference tensor outside of torch.inference_mode(), where torch refuses to write "
            f"to one: pass {name}.clone(), or stay in inference mode"
        )
    strides = state.stride()
    if 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, state.shape, strict=True)):
        raise ValueError(
            f"{name} must not be expanded: each sequence and head writes its own, pass {name}.contiguous()"
        )
