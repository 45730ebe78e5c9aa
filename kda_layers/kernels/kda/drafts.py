"""The public operators for drafted tokens: `kda_verify`, which keeps what a state needs to advance by each token, and
`kda_commit`, which advances it by those that were accepted."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..checks import DtypeError, check_is_tensor, check_scale, check_tensor
from ..declarations import arch_of
from ..operator import NoGradOperator, no_output
from ..registry import CHOICES
from ..torch_private import constant_to_compile
from . import checks
from .contract import KDA, MOST_DRAFTED, CommitInputs, DecodeInputs, Problem, state_dtype
from .reference import activate

_verify_cache, _commit_cache = map(KDA.call_cache, (DecodeInputs, CommitInputs))
_kda_verify: NoGradOperator[DecodeInputs] = NoGradOperator(
    "kda_verify", DecodeInputs, ("state", "updates"), KDA, "verify", lambda x: x.v.new_empty(x.v.shape)
)
_kda_verify_into: NoGradOperator[DecodeInputs] = NoGradOperator(
    "kda_verify_into", DecodeInputs, ("state", "updates", "out"), KDA, "verify", no_output
)
_kda_commit: NoGradOperator[CommitInputs] = NoGradOperator(
    "kda_commit", CommitInputs, ("state",), KDA, "commit", no_output
)


def kda_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    updates: Tensor,
    *,
    num_accepted: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_indices: Tensor | None = None,
    update_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    gate_activation: str = "lower_bound",
    lower_bound: float | None = None,
    beta_activation: str = "sigmoid",
    qk_l2norm: bool = True,
    scale: float | None = None,
    state_layout: str = "vk",
    backend: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the outputs of a few drafted tokens without advancing the state by them; not differentiable.

    What the state needs to advance by each token, about 1/42 of an fp32 state of K = V = 128, is written to `updates`.
    The next call advances the state by the tokens that turned out to be accepted before it verifies its own, or
    `kda_commit` does so alone. Outputs and states have the bits of `kda_step` for the same tokens, on the same backend;
    with a bf16 state, those of its calls of up to 8 tokens.

    Args:
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, gate_activation, lower_bound, beta_activation, qk_l2norm, scale,
            backend: as in `kda_step`; at most 16 tokens of each sequence.
        state: [N, HV, V, K], or a pool with `state_indices`, as in `kda_step`, but not int8. Written only by what
            `num_accepted` says.
        updates: [N, tokens, HV, 2 K + V] fp32 (fp64 for fp64 inputs), with state_indices a pool [slots, tokens, HV,
            2 K + V] with the slots of `state`, or with slots of its own if update_indices are given; 1 to 16 tokens, at
            least as many as a sequence has. The last dimension is contiguous: the decay e^g [K], the key [K],
            normalised with qk_l2norm, and the error beta (v - S k) [V]. Read where tokens were accepted, then
            overwritten for the new tokens; its first content does not matter.
        num_accepted: [N] int32 or int64: by how many tokens of the last call, 0 to all of them, each state advances
            first, also that of a sequence without tokens in this call. None: by none.
        state_indices: [N] int32 or int64: each sequence's slot; -1 and slots outside of the pool as in `kda_step`. On
            CUDA a num_accepted out of range and a sequence of more tokens than `updates` has make a sequence padding,
            too; 'eager' raises.
        update_indices: [N] int32 or int64: each sequence's slot of `updates`, where these are kept apart from the
            states, such as in a row for each sequence of a batch; -1 as in state_indices. None: that of its state.
        state_layout, out: as in `kda_step`.

    Returns:
        o [B, T, HV, V] in v's dtype, or `out`.

    Raises:
        TypeError, ValueError: as `kda_step`; an int8 state, which is rounded after each token and has no such updates.
    """
    if checks.check_state_layout(state_layout):
        state = checks.from_kv("state", state, in_place=True)
    check_is_tensor("updates", updates)
    x = DecodeInputs(
        q, k, v, g, beta, state, A_log, dt_bias, state_indices, num_accepted, cu_seqlens, None, out, updates,
        update_indices, None, None, gate_activation, checks.gate_bound(gate_activation, lower_bound), beta_activation,
        bool(qk_l2norm), check_scale(q, scale),
    )  # fmt: skip
    cached = _verify_cache.get(x, backend)
    name, *fused = cached or _prepare_verify(x, backend)
    checks.check_values(x)
    x, plain = activate(x, fused), cached is not None
    if out is None:
        return _kda_verify(x, name, plain)
    _kda_verify_into(x, name, plain)
    return out


def kda_commit(
    state: Tensor,
    updates: Tensor,
    num_accepted: Tensor,
    *,
    state_indices: Tensor | None = None,
    update_indices: Tensor | None = None,
    initial_indices: Tensor | None = None,
    state_layout: str = "vk",
    backend: str | None = None,
) -> None:
    """Advance `state` in place by the first tokens that `kda_verify` wrote to `updates`, with the bits of `kda_step`.

    Args:
        state, updates, state_indices, update_indices, state_layout: as in `kda_verify`.
        num_accepted: [N] int32 or int64, by how many tokens each state advances, 0 to all.
        initial_indices: [N] int32 or int64: slots of `state` from which each advances, which stay as they are; the
            result is written to the sequence's own slot. -1 as in state_indices. No sequence may read a slot that
            another one writes. None: its own.
        backend: as in `kda`; the one that verified, for the bits of `kda_step`.

    Raises:
        TypeError, ValueError: as `kda_verify`; the state is then unchanged.
    """
    if checks.check_state_layout(state_layout):
        state = checks.from_kv("state", state, in_place=True)
    x = CommitInputs(state, updates, num_accepted, state_indices, update_indices, initial_indices)
    cached: str | None = _commit_cache.get(x, backend)
    _kda_commit(x, cached or _prepare_commit(x, backend), cached is not None)


@constant_to_compile
def verifying(backend: str | None, device: torch.device, *fields: Any) -> str | None:
    """The backend that verifies drafts, but not plain PyTorch on a GPU where `kda` has a kernel; None without one.

    Args:
        backend: as in `kda`; one that is asked for, also by context or environment, is the only candidate
        fields: of `Problem`, from dtype to qk_l2norm
    """
    return _verifying(KDA.requested(backend), tuple(KDA.backends()), device, *fields)


@functools.lru_cache(CHOICES)
def _verifying(asked: str | None, known: tuple[str, ...], device: torch.device, *fields: Any) -> str | None:
    def serving(drafts: bool) -> str | None:
        features: Any = dict(decode=drafts, has_state=True, verify=drafts)
        problem = KDA.problem(device.type, arch_of(device), *fields, **features)
        names = [asked] if asked in known else known
        return next((name for name in names if not KDA.backend(name).unsupported(problem)), None)

    found = serving(drafts=True)
    return found if found != "eager" or device.type == "cpu" or serving(drafts=False) == "eager" else None


def _prepare_verify(x: DecodeInputs, backend: str | None) -> tuple[Any, ...]:
    """Check `x`; return the backend and what it fuses."""
    _check_verify(x)
    checks.refuse_gradients("kda_verify", x)
    return _verify_cache.put(x, KDA.choose(backend, x.q.device, *Problem.fields_of(x)), backend)


def _prepare_commit(x: CommitInputs, backend: str | None) -> str:
    """Check `x`; return the backend."""
    _check_commit(x)
    checks.refuse_gradients("kda_commit", x)
    name: str = KDA.choose(backend, x.state.device, *Problem.fields_of(x))[0]
    return _commit_cache.put(x, name, backend)


def _check_verify(x: DecodeInputs) -> None:
    """Raise a TypeError or ValueError naming the argument unless `x` keeps the contract of `kda_verify`."""
    N, T, *state_shape = checks.check_common(x)
    _refuse_int8(x.state)
    if x.state_indices is not None:
        checks.check_of_sequences("state_indices", x.state_indices, x.q, N)
    checks.check_slots(x.q, x.state, x.state_indices, None, (N, *state_shape), 1)
    if x.update_indices is not None:
        checks.check_of_sequences("update_indices", x.update_indices, x.q, N)
    _check_updates(x, state_dtype(x.q.dtype), 1 if x.cu_seqlens is not None else T)
    checks.check_writable("updates", x.updates)  # type: ignore[arg-type]
    if x.num_accepted is not None:
        checks.check_of_sequences("num_accepted", x.num_accepted, x.q, N)
    checks.check_out(x.out, x)


def _check_commit(x: CommitInputs) -> None:
    """Raise a TypeError or ValueError naming the argument unless `x` keeps the contract of `kda_commit`."""
    state, slots = x.state, x.state_indices
    check_is_tensor("state", state)
    _refuse_int8(state)
    if state.ndim != 4 or 0 in state.shape:
        raise ValueError(f"state must have shape [N, HV, V, K] without a size of 0, got {list(state.shape)}")
    if state.dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise DtypeError(f"state must be float32, bfloat16 or float64, got {state.dtype}")
    checks.check_matrices("state", state)
    checks.check_writable("state", state)
    _check_updates(x, state_dtype(state.dtype), 1)
    check_is_tensor("num_accepted", x.num_accepted, ": pass a tensor [N] of int32 or int64")
    if slots is not None:
        check_is_tensor("state_indices", slots)
    N = state.shape[0] if slots is None else slots.shape[0] if slots.ndim else 0
    checks.check_of_sequences("num_accepted", x.num_accepted, state, N, "state")
    for name in ("state_indices", "update_indices", "initial_indices"):
        index = getattr(x, name)
        if index is not None:
            checks.check_of_sequences(name, index, state, N, "state")


def _refuse_int8(state: Any) -> None:
    if isinstance(state, Tensor) and state.dtype == torch.int8:
        raise DtypeError(
            "state must be float32 or bfloat16 to verify drafts, got int8: such a state is rounded after every token, "
            "which no update of a token can repeat; pass kda_step state_indices [N, T], a slot for each token"
        )


def _check_updates(x: DecodeInputs | CommitInputs, dtype: torch.dtype, tokens: int) -> None:
    """Raise unless `x.updates` has room for `tokens` tokens of each of the states, which have been checked."""
    updates: Any = x.updates
    check_is_tensor("updates", updates)
    state, (slots, HV, V, K) = x.state, x.state.shape
    shape, width = updates.shape, 2 * K + V
    if x.update_indices is not None and updates.ndim == 4:
        slots = max(shape[0], 1)
    if updates.ndim != 4 or (shape[0], *shape[2:]) != (slots, HV, width) or not tokens <= shape[1] <= MOST_DRAFTED:
        raise ValueError(
            f"updates must have shape [slots, tokens, HV, 2 K + V] = [{slots}, {tokens} to {MOST_DRAFTED}, {HV}, "
            f"{width}], got {list(shape)}"
            + (f": verify at most {MOST_DRAFTED} tokens at once" if tokens > MOST_DRAFTED else "")
        )
    check_tensor("updates", updates, tuple(shape), (dtype,), state, "state")
    if updates.stride(3) != 1:
        raise ValueError(
            f"updates must be contiguous in the last dimension, got strides {updates.stride()}; pass "
            "updates.contiguous() and keep it"
        )
