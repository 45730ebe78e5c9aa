"""The public operator: `kda` for whole sequences, `kda_step` for decoding, and the three torch ops behind them.

`kda_layers::chunk`, `::chunk_grad` and `::step` are the autograd and torch.compile boundary. Argument lists are
spelled once, as the fields of `Inputs` and `StepInputs`; schemas, fakes and gradients are derived from them.
"""

from __future__ import annotations

import operator
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from kda_layers.kernels.contract import (
    Gradients,
    Inputs,
    StepInputs,
    check_chunk,
    check_lower_bound,
    check_state_dtype,
    check_step,
    checkpoint_count,
    state_dtypes,
)
from kda_layers.kernels.dispatch import backends, choose, constant_to_compile, problem_fields
from kda_layers.kernels.reference import activate

TENSORS = len(Gradients._fields)  # the leading fields of Inputs that have gradients


class KDAOutput(NamedTuple):
    """What `kda` returns."""

    o: Tensor  # [B, T, HV, V] in v's dtype
    final_state: Tensor | None  # [N, HV, V, K] in the states' dtype
    checkpoints: Tensor | None  # [B, T // 64, HV, V, K] in the states' dtype


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    gate_activation: str = "lower_bound",
    lower_bound: float | None = None,
    beta_activation: str = "sigmoid",
    qk_l2norm: bool = True,
    scale: float | None = None,
    final_state: bool = False,
    checkpoint_every: int = 0,
    state_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> KDAOutput:
    """Kimi Delta Attention over whole sequences, differentiable in every tensor.

    Per value head and token, with log-decay g [K] and the state S [V, K]:
    S <- S * exp(g);  S <- S + beta (v - S k) k^T;  o = scale * S q.

    Args:
        q, k: [B, T, H, K], bf16, fp16, fp32 or fp64.
        v: [B, T, HV, V] in q's dtype; HV a multiple of H, value head i reads q/k head i // (HV // H).
        g: [B, T, HV, K] gate logits, or the log-decay itself (natural log, <= 0); q's dtype or fp32.
        beta: [B, T, HV] logits, or beta itself (in [0, 2]); q's dtype or fp32.
        A_log: [HV] fp32 (fp64 for fp64 inputs): log of the gate's rate; optional with 'lower_bound' (rate 1).
        dt_bias: [HV, K] fp32, added to the gate logits; optional.
        initial_state: [N, HV, V, K] fp32 (fp64 for fp64 inputs; with 16-bit inputs also bf16), zero if None; N is B, or
            the number of packed sequences.
        cu_seqlens: [N + 1] int32 or int64, offsets of the sequences packed along T (then B = 1); empty ones allowed.
        gate_activation: 'lower_bound': lower_bound * sigmoid(exp(A_log) * (g + dt_bias));
            'softplus': -exp(A_log) * softplus(g + dt_bias); 'log_decay': g as it is.
        lower_bound: in [-5, 0), in nats per token; given exactly with gate_activation='lower_bound'.
        beta_activation: 'sigmoid', '2sigmoid' (negative eigenvalues) or 'given'.
        qk_l2norm: normalise q and k over K: x / sqrt(sum(x^2) + 1e-6).
        scale: of the output; K ** -0.5 if None.
        final_state: also return the state after the last token.
        checkpoint_every: 0, or 64 to also return the state at every 64-token boundary of each sequence.
        state_dtype: of the returned states, one that initial_state may have; if None, initial_state's, fp32 (fp64)
            without one. They are computed in fp32 (fp64) and rounded once.
        backend: name of a backend; None chooses (see `explain`).

    Returns:
        KDAOutput: o [B, T, HV, V] in v's dtype; final_state [N, HV, V, K] or None; checkpoints
        [B, T // 64, HV, V, K] or None, for packed sequences one sequence's after the other's, unused rows zero.

    Raises:
        TypeError, ValueError: an argument breaks this contract; the message names it, what was expected, what came.

    Source: Kimi Linear, arXiv 2510.26692, equation (1).
    """
    x = Inputs(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,
        gate_activation, check_lower_bound(gate_activation, lower_bound), beta_activation, bool(qk_l2norm),
        _scale(q, scale), bool(final_state), checkpoint_every,
    )  # fmt: skip
    check_chunk(x)
    returned = check_state_dtype(x, state_dtype)
    if initial_state is not None:
        x = x._replace(initial_state=initial_state.to(state_dtypes(q.dtype)[0]))
    needs_grad = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in x)
    name, *fused = choose(backend, x.q.device, *problem_fields(x, needs_grad))
    args = (*activate(x, fused), needs_grad, name)
    if not _plain(x):
        o, final, checkpoints, _ = torch.ops.kda_layers.chunk.default(*args)
    elif needs_grad:
        o, final, checkpoints = _Chunk.apply(*args)
    else:
        o, final, checkpoints, _ = _chunk(*args)
    return KDAOutput(
        o, final.to(returned) if x.final_state else None, checkpoints.to(returned) if x.checkpoint_every else None
    )


def kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_indices: Tensor | None = None,
    num_accepted: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    gate_activation: str = "lower_bound",
    lower_bound: float | None = None,
    beta_activation: str = "sigmoid",
    qk_l2norm: bool = True,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Decode one or a few tokens per sequence, updating `state` in place; not differentiable.

    Args:
        q, k, v, g, beta, A_log, dt_bias, gate_activation, lower_bound, beta_activation, qk_l2norm, scale, backend:
            as in `kda`; T is the number of new tokens of each sequence, usually 1.
        state: [N, HV, V, K] fp32 (fp64 for fp64 inputs), read and overwritten with the state after the last token.
            With 16-bit inputs also bf16: half of the bytes, rounded at every call; the CUDA backends take it.
            With `state_indices` a pool [slots, HV, V, K], of which other slots stay as they are.
        state_indices: [N]: each sequence's slot. [N, T]: sequence n reads slot [n, 0] and writes the state after its
            token t to slot [n, t], so that drafted tokens can be taken back.
        num_accepted: [N], with state_indices [N, T]: how many of the previous call's tokens were accepted; sequence n
            then reads slot [n, num_accepted[n] - 1].
        cu_seqlens: as in `kda`, for sequences of different lengths.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        TypeError, ValueError: as `kda`; the state is then unchanged.
    """
    x = StepInputs(
        q, k, v, g, beta, state, A_log, dt_bias, state_indices, num_accepted, cu_seqlens,
        gate_activation, check_lower_bound(gate_activation, lower_bound), beta_activation, bool(qk_l2norm),
        _scale(q, scale),
    )  # fmt: skip
    check_step(x)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in x):
        raise ValueError("kda_step updates the state in place and has no gradient: call it under torch.no_grad()")
    name, *fused = choose(backend, x.q.device, *problem_fields(x))
    args = (*activate(x, fused), name)
    if not _plain(x):
        return torch.ops.kda_layers.step.default(*args)
    torch.autograd.graph.increment_version(state)
    return _step(*args)


def _plain(x: Inputs | StepInputs) -> bool:
    """Whether nothing looks on: no tracing, no mode, no subclass of Tensor that reacts to operators.

    The ops are then called as the functions that they are: the dispatcher, which would box some 20 arguments for each
    of its layers, costs as much as all the rest of a call.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not x.q.is_meta
        and all(type(t) is Tensor or type(t) is Parameter for t in x if isinstance(t, Tensor))
    )


@constant_to_compile  # a symbolic float would be traced twice
def _default_scale(K: int) -> float:
    return max(K, 1) ** -0.5


def _scale(q: Tensor, scale: float | None) -> float:
    if scale is None:
        return _default_scale(operator.index(q.shape[-1])) if isinstance(q, Tensor) and q.ndim else 1.0
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    return float(scale)


# ---------------------------------------------------------------- torch ops

_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", float: "float", bool: "bool", int: "int"}


def _schema(fields: Any, mutable: str = "") -> str:
    hints = typing.get_type_hints(fields)
    return ", ".join(
        ("Tensor(a!)" if name == mutable else _SCHEMA_TYPES[hints[name]]) + f" {name}" for name in fields._fields
    )


_CHUNK = _schema(Inputs)
_library = torch.library.Library("kda_layers", "DEF")
_library.define(
    f"chunk({_CHUNK}, bool save, str backend) -> (Tensor o, Tensor final, Tensor checkpoints, Tensor[] saved)"
)
_library.define(
    f"chunk_grad({_CHUNK}, str backend, Tensor[] saved, Tensor d_o, Tensor? d_final, Tensor? d_checkpoints) -> "
    + "(" + ", ".join(["Tensor"] * TENSORS) + ")"
)  # fmt: skip
_library.define(f"step({_schema(StepInputs, mutable='state')}, str backend) -> Tensor")

# An op cannot return None: what was not asked for is an empty tensor, and the callers above and below drop it.


def _without_autocast(f: Callable[..., Any], x: Inputs | StepInputs, *args: Any) -> Any:
    """f(x, *args), which says itself what it rounds: under autocast its products would run in 16 bits."""
    device = x.q.device.type
    if not torch.is_autocast_enabled(device):
        return f(x, *args)
    with torch.autocast(device, enabled=False):
        return f(x, *args)


def _chunk(*args: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    x, (save, backend) = Inputs(*args[:-2]), args[-2:]
    o, final, checkpoints, saved = _without_autocast(backends()[backend].chunk, x, save)
    return o, _or_empty(final, x), _or_empty(checkpoints, x), saved


def _chunk_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    x, (save, backend) = Inputs(*args[:-2]), args[-2:]
    B, K, (HV, V) = x.q.shape[0], x.q.shape[3], x.v.shape[2:]
    N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    wide, *_ = state_dtypes(x.q.dtype)
    final = x.q.new_empty(N, HV, V, K, dtype=wide) if x.final_state else None
    rows = checkpoint_count(x)
    checkpoints = x.q.new_empty(B, rows, HV, V, K, dtype=wide) if x.checkpoint_every else None
    saved = backends()[backend].saved_like(x) if save else []
    return x.v.new_empty(x.v.shape), _or_empty(final, x), _or_empty(checkpoints, x), saved


def _chunk_grad(*args: Any) -> tuple[Tensor, ...]:
    n = len(Inputs._fields)
    x, (backend, *rest) = Inputs(*args[:n]), args[n:]
    return tuple(_or_empty(t, x) for t in _without_autocast(backends()[backend].chunk_grad, x, *rest))


def _chunk_grad_fake(*args: Any) -> tuple[Tensor, ...]:
    x = Inputs(*args[: len(Inputs._fields)])
    return tuple(_or_empty(t.new_empty(t.shape) if isinstance(t, Tensor) else None, x) for t in x[:TENSORS])


def _or_empty(t: Tensor | None, x: Inputs) -> Tensor:
    return x.q.new_empty(0) if t is None else t


class _Chunk(torch.autograd.Function):
    """The chunk op with its gradient. torch.library.register_autograd would do the same, 200 us a training step later:
    it sorts through every argument and residual several times."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, backend = Inputs(*args[:-2]), args[-1]
        o, final, checkpoints, saved = _chunk(*args) if _plain(x) else _below_autograd("chunk", *args)
        replaced = backends()[backend].replaces(x)
        x = x._replace(**dict(zip(replaced, saved, strict=False)))
        ctx.options = x[TENSORS + 1 :], backend
        ctx.save_for_backward(*x[: TENSORS + 1], *saved[len(replaced) :])
        ctx.set_materialize_grads(False)
        return o, final, checkpoints

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, d_checkpoints: Tensor | None) -> Any:
        options, backend = ctx.options
        tensors = ctx.saved_tensors
        x = Inputs(*tensors[: TENSORS + 1], *options)
        if d_o is None:
            d_o = torch.zeros_like(x.v)
        args = (
            *x, backend, list(tensors[TENSORS + 1 :]), d_o,
            d_final if x.final_state else None, d_checkpoints if x.checkpoint_every else None,
        )  # fmt: skip
        direct = _plain(x) and not torch.is_grad_enabled()
        grads = _chunk_grad(*args) if direct else torch.ops.kda_layers.chunk_grad.default(*args)
        needed = [None if t is None else d for t, d in zip(x, grads, strict=False)]
        return *needed, *[None] * (len(Inputs._fields) - len(needed) + 2)  # + save, backend


class _ChunkGrad(torch.autograd.Function):
    """The chunk_grad op where its own gradient is recorded: to say that there is none."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        return _below_autograd("chunk_grad", *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("kda has no second derivative: its backward is written by hand and can be taken once")


def _below_autograd(op: str, *args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.kda_layers, op).default(*args)


def _chunk_autograd(*args: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    if args[-2] and torch.is_grad_enabled():
        return *_Chunk.apply(*args), []  # residuals live in the graph alone
    return _below_autograd("chunk", *args)


def _chunk_grad_autograd(*args: Any) -> tuple[Tensor, ...]:
    return _ChunkGrad.apply(*args) if torch.is_grad_enabled() else _below_autograd("chunk_grad", *args)


def _step(*args: Any) -> Tensor:
    return _without_autocast(backends()[args[-1]].step, StepInputs(*args[:-1]))


def _step_fake(*args: Any) -> Tensor:
    v = StepInputs(*args[:-1]).v
    return v.new_empty(v.shape)


for _name, _impl, _fake in (
    ("chunk", _chunk, _chunk_fake),
    ("chunk_grad", _chunk_grad, _chunk_grad_fake),
    ("step", _step, _step_fake),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kda_layers::{_name}", _fake, lib=_library)
_library.impl("chunk", _chunk_autograd, "Autograd")
_library.impl("chunk_grad", _chunk_grad_autograd, "Autograd")
