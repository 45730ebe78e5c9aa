"""One decode step of a KDA layer between its projections, its two states updated in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....checks import (
    DTYPES,
    OUTPUT_ACTIVATIONS,
    DtypeError,
    accumulator_dtype,
    check_is_tensor,
    check_scale,
    check_tensor,
    dtype_names,
)
from ....declarations import arch_of
from ....operator import NoGradOperator, no_output
from ....torch_private import constant_to_compile
from ....tracing import is_plain
from ...checks import check_gate, check_lower_bound, check_of_sequences, check_out, check_slots, check_writable
from ...contract import KDA
from .contract import LAYER_STEP, Inputs, Problem, of_heads

_cache = LAYER_STEP.call_cache(Inputs)
_layer_step: NoGradOperator[Inputs] = NoGradOperator(
    "layer_step", Inputs, ("conv_state", "state"), LAYER_STEP, "step", lambda x: x.v.new_empty(x.v.shape)
)
_layer_step_into: NoGradOperator[Inputs] = NoGradOperator(
    "layer_step_into", Inputs, ("conv_state", "state", "out"), LAYER_STEP, "step", no_output
)


def layer_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    gate: Tensor,
    beta: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    *,
    norm_weight: Tensor,
    f_weight: Tensor | None = None,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_indices: Tensor | None = None,
    gate_activation: str = "lower_bound",
    lower_bound: float | None = None,
    beta_activation: str = "sigmoid",
    scale: float | None = None,
    norm_eps: float = 1e-6,
    overlap: bool = False,
    first_slot: int = 0,
    output_activation: str = "sigmoid",
    backend: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decode one token of each sequence from a layer's projections to the input of its output projection.

    q, k and v go through the short convolution and SiLU, q and k are normalised, the log-decay is that of the logits
    f_weight f, `kda_step` follows, and its output is RMS-normalised and multiplied by the activated gate_weight gate +
    gate_bias. Not differentiable.

    Args:
        q, k: [B, 1, H, K], before the convolution; v [B, 1, HV, V] too. Each token's channels are contiguous.
        f: [B, 1, R] with f_weight [HV K, R]; without it the logits themselves, [B, 1, HV K], or [B, 1, HV] for one
            decay of each head.
        gate: [B, 1, R'] with gate_weight [HV V, R']; without it [B, 1, HV V], the logits themselves.
        beta: [B, 1, HV] logits.
        conv_weight: [D, W] in q's dtype or fp32, D = 2 H K + HV V, the channels of q first, then those of k and of v.
        conv_state: [B, D, W] or [B, D, W - 1] in q's dtype, the last inputs of the convolution, updated in place. It
            needs W - 1 of them.
        state: [B, HV, V, K], as in `kda_step`, updated in place.
        norm_weight: [V]; gate_bias: [HV V] or None; A_log, dt_bias: as in `kda` ([HV, K], or [HV] for decays of heads).
        state_indices: [B], as in `kda_step`; conv_state and state are then pools with the same slots.
        gate_activation, lower_bound, beta_activation, scale: as in `kda`.
        norm_eps: epsilon of the norm.
        overlap: True if the kernel launched before this one on the stream writes no parameter (conv_weight, f_weight,
            gate_weight, gate_bias, norm_weight, A_log, dt_bias), which may then be read before that kernel has ended
            (programmatic dependent launch, from compute capability 9.0 on).
        first_slot: slots of state_indices below it are no slots, as -1 is: 1 where slot 0 stands for padding.
        output_activation: 'sigmoid' or 'silu', of the output gate.
        backend: name of a backend of `kda`, taken where it serves; None chooses.
        out: as in `kda_step`.

    Returns:
        o [B, 1, HV, V] in v's dtype, or `out`.

    Raises:
        TypeError, ValueError: an argument breaks this contract; the message names it. The states are then unchanged.
    """
    x = Inputs(
        q, k, v, f, gate, beta, conv_weight, conv_state, state, f_weight, gate_weight, gate_bias, norm_weight, A_log,
        dt_bias, state_indices, out, gate_activation, check_lower_bound(gate_activation, lower_bound),
        beta_activation, check_scale(q, scale), float(norm_eps), bool(overlap), first_slot, output_activation,
    )  # fmt: skip
    cached = _cache.get(x, backend)
    name, run = cached or _prepare(x, backend)
    if out is None:
        return _layer_step(x, name, cached is not None, run)
    _layer_step_into(x, name, cached is not None, run)
    return out


class RepeatedLayerStep:
    """`layer_step` with fixed options; only the first call checks its tensors and chooses a backend."""

    def __init__(self, options: tuple[Any, ...], backend: str | None) -> None:
        """Fix the fields of `Inputs` after `state`, and the backend."""
        self._options, self._backend = options, backend
        self._run: Callable[[Inputs], Tensor] | None = None

    def __call__(self, *tensors: Any, state_indices: Tensor | None = None) -> Tensor:
        """Return `layer_step` of the fields of `Inputs` up to `state`; constraints as for `RepeatedLinearStep`."""
        x = Inputs._make((*tensors, *self._options))
        if state_indices is not None:
            x = x._replace(state_indices=state_indices)
        if self._run is None:
            name, self._run = _prepare(x, self._backend)
            return _layer_step(x, name)
        torch.autograd.graph.increment_version((x.conv_state, x.state))
        return self._run(x)


def _prepare(x: Inputs, backend: str | None) -> tuple[str, Callable[[Inputs], Tensor] | None]:
    """Check `x`; return the backend and its function for such inputs, None for inputs of the dispatcher."""
    check(x)
    name: str = LAYER_STEP.choose(backend, x.q.device, *Problem.fields_of(x))
    return _cache.put(x, (name, LAYER_STEP.backend(name).repeated(x) if is_plain(x) else None), backend)


@constant_to_compile
def has_kernel(backend: str | None, device: torch.device, *fields: Any) -> bool:
    """True if a kernel serves a problem with these `fields` of `Problem`.

    False if the argument `backend`, the context or the environment asks for a backend of `kda` that has no such kernel.
    """
    name = KDA.requested(backend)
    chosen = LAYER_STEP.choose(name, device, *fields)
    return chosen != "eager" and name in (None, chosen)


def why_no_kernel(backend: str | None, device: torch.device, *fields: Any) -> str:
    """Return what is against every kernel for a problem with these `fields`, or against all but the one asked for."""
    name, problem = KDA.requested(backend), LAYER_STEP.problem(device.type, arch_of(device), *fields)
    kernels = {n: b for n, b in LAYER_STEP.backends().items() if n != "eager"}
    if name is not None and name not in kernels:
        return f"backend {name!r} is asked for, which has none"
    asked = kernels if name is None else {name: kernels[name]}
    return "; ".join(f"{n}: {', '.join(b.unsupported(problem))}" for n, b in asked.items())


def check(x: Inputs) -> None:
    """Raise a TypeError or ValueError naming the argument unless `x` keeps the contract."""
    q, v = x.q, x.v
    for name, ndim in (("q", 4), ("v", 4), ("conv_weight", 2), ("conv_state", 3), ("state", 4)):
        check_is_tensor(name, getattr(x, name))
        _check_ndim(name, getattr(x, name), ndim)
    if q.dtype not in DTYPES:
        raise DtypeError(f"q must be one of {dtype_names(DTYPES)}, got {q.dtype}: pass q.to(torch.bfloat16)")
    (B, T, H, K), (HV, V), dtype = q.shape, v.shape[2:], (q.dtype,)
    if 0 in q.shape or 0 in v.shape:
        raise ValueError(f"q and v must have no dimension of size 0, got {tuple(q.shape)} and {tuple(v.shape)}")
    if T != 1:
        raise ValueError(f"q must have one token of each sequence, [B, 1, H, K], got {T}: kda_step takes several")
    if HV % H:
        raise ValueError(f"v's {HV} heads must be a multiple of q's {H} heads (grouped value heads)")
    check_gate(x.gate_activation, x.beta_activation, x.A_log, x.dt_bias)
    if x.gate_weight is None and x.gate_bias is not None:
        raise ValueError("gate_bias must be None without gate_weight: add it to gate, the logits")
    if x.output_activation not in OUTPUT_ACTIVATIONS:
        raise ValueError(
            f"output_activation must be one of {', '.join(OUTPUT_ACTIVATIONS)}, got {x.output_activation!r}"
        )
    for name in ("f", "gate"):
        check_is_tensor(name, getattr(x, name))
        _check_ndim(name, getattr(x, name), 3)
    gates = (HV,) if of_heads(x) else (HV, K)
    D, wide = 2 * H * K + HV * V, (accumulator_dtype(q.dtype),)
    W = x.conv_weight.shape[1]
    kept = max(W - 1, min(W, x.conv_state.shape[2]))
    f_rank, gate_rank = (_rank(name, getattr(x, name)) for name in ("f_weight", "gate_weight"))
    expected: tuple[tuple[str, tuple[int, ...], tuple[torch.dtype, ...]], ...] = (
        ("k", (B, 1, H, K), dtype), ("v", (B, 1, HV, V), dtype), ("beta", (B, 1, HV), dtype),
        ("f", (B, 1, f_rank or math.prod(gates)), dtype), ("gate", (B, 1, gate_rank or HV * V), dtype),
        ("conv_weight", (D, W), (*dtype, *wide)), ("conv_state", (x.conv_state.shape[0], D, kept), dtype),
        ("norm_weight", (V,), dtype),
        ("f_weight", (HV * K, f_rank), dtype), ("gate_weight", (HV * V, gate_rank), dtype),
        ("gate_bias", (HV * V,), dtype), ("A_log", (HV,), wide), ("dt_bias", gates, wide),
    )  # fmt: skip
    for name, shape, dtypes in expected:
        if (t := getattr(x, name)) is not None:
            check_tensor(name, t, shape, dtypes, q)
    if x.state_indices is not None:
        check_of_sequences("state_indices", x.state_indices, q, B)
    check_slots(q, x.state, x.state_indices, None, (B, HV, V, K), 1)
    if isinstance(x.first_slot, bool) or not isinstance(x.first_slot, int) or x.first_slot < 0:
        raise ValueError(f"first_slot must be an integer of at least 0, got {x.first_slot!r}")
    if x.first_slot and x.state_indices is None:
        raise ValueError(f"first_slot must be 0 without state_indices, got {x.first_slot}")
    check_out(x.out, x)
    if x.conv_state.shape[0] != x.state.shape[0]:
        raise ValueError(f"conv_state must have the {x.state.shape[0]} slots of state, got {x.conv_state.shape[0]}")
    check_writable("conv_state", x.conv_state)
    for name in ("q", "k", "v", "f", "gate", "beta"):
        t = getattr(x, name)
        if t.stride(-1) != 1 or (t.ndim == 4 and t.shape[2] > 1 and t.stride(2) != t.shape[3]):
            raise ValueError(f"{name} must have the channels of a token side by side, got strides {t.stride()}")


def _rank(name: str, weight: Tensor | None) -> int:
    """Return the rank of a factor [rows, rank]; 0 for None."""
    if weight is None:
        return 0
    check_is_tensor(name, weight)
    _check_ndim(name, weight, 2)
    if weight.shape[1] == 0:
        raise ValueError(f"{name} must have a rank of at least 1, got shape {tuple(weight.shape)}")
    return weight.shape[1]


def _check_ndim(name: str, t: Tensor, ndim: int) -> None:
    if t.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {tuple(t.shape)}")
