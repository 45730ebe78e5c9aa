"""The torch ops behind the public operator, `kda_layers::chunk`, `::chunk_grad` and `::step`, and their gradients.

They are the autograd and torch.compile boundary. Argument lists are spelled once, as the fields of `Inputs` and
`StepInputs`; schemas, fakes and gradients are derived from them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..library import below_autograd, is_plain, schema, without_autocast
from .checks import refuse_transforms
from .contract import Gradients, Inputs, StepInputs, checkpoint_count, state_dtype
from .dispatch import backends

TENSORS = len(Gradients._fields)  # the leading fields of Inputs that have gradients


def chunk(x: Inputs, needs_grad: bool, backend: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(o, final state or None, checkpoints or None) of `Backend.chunk`, differentiable."""
    plain = is_plain(x)
    if not torch.compiler.is_compiling():  # then the op is asked
        refuse_transforms("kda", x)
    if plain and not needs_grad:
        return without_autocast(backends()[backend].chunk, x, False)[:3]
    op = _Chunk.apply if plain else torch.ops.kda_layers.chunk.default
    o, final, checkpoints, *_ = op(*x, needs_grad, backend)
    return o, final if x.final_state else None, checkpoints if x.checkpoint_every else None


def step(x: StepInputs, backend: str) -> Tensor:
    """o [B, T, HV, V] of `Backend.step`, with x.state updated in place."""
    if not torch.compiler.is_compiling():
        refuse_transforms("kda_step", x)
    if not is_plain(x):
        return torch.ops.kda_layers.step.default(*x, backend)
    torch.autograd.graph.increment_version(x.state)
    return without_autocast(backends()[backend].step, x)


_CHUNK = schema(Inputs)
_library = torch.library.Library("kda_layers", "DEF")
_library.define(
    f"chunk({_CHUNK}, bool save, str backend) -> (Tensor o, Tensor final, Tensor checkpoints, Tensor[] saved)"
)
_library.define(
    f"chunk_grad({_CHUNK}, str backend, Tensor[] saved, Tensor d_o, Tensor? d_final, Tensor? d_checkpoints) -> "
    + "(" + ", ".join(["Tensor"] * TENSORS) + ")"
)  # fmt: skip
_library.define(f"step({schema(StepInputs, mutable='state')}, str backend) -> Tensor")

# An op cannot return None: what was not asked for is an empty tensor, and the callers above and below drop it.


def _chunk(*args: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    x, (save, backend) = Inputs(*args[:-2]), args[-2:]
    o, final, checkpoints, saved = without_autocast(backends()[backend].chunk, x, save)
    return o, _or_empty(final, x), _or_empty(checkpoints, x), saved


def _chunk_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    x, (save, backend) = Inputs(*args[:-2]), args[-2:]
    B, K, (HV, V) = x.q.shape[0], x.q.shape[3], x.v.shape[2:]
    N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    wide = state_dtype(x.q.dtype)
    final = x.q.new_empty(N, HV, V, K, dtype=wide) if x.final_state else None
    rows = checkpoint_count(x)
    checkpoints = x.q.new_empty(B, rows, HV, V, K, dtype=wide) if x.checkpoint_every else None
    saved = backends()[backend].saved_like(x) if save else []
    return x.v.new_empty(x.v.shape), _or_empty(final, x), _or_empty(checkpoints, x), saved


def _chunk_grad(*args: Any) -> tuple[Tensor, ...]:
    n = len(Inputs._fields)
    x, (backend, *rest) = Inputs(*args[:n]), args[n:]
    return tuple(_or_empty(t, x) for t in without_autocast(backends()[backend].chunk_grad, x, *rest))


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
        o, final, checkpoints, saved = _chunk(*args) if is_plain(x) else below_autograd("chunk", *args)
        replaced = backends()[backend].replaces(x)
        x = x._replace(**dict(zip(replaced, saved, strict=False)))
        ctx.options = x[TENSORS + 1 :], backend
        ctx.save_for_backward(*x[: TENSORS + 1], *saved[len(replaced) :])
        ctx.set_materialize_grads(False)
        return o, final, checkpoints

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, d_checkpoints: Tensor | None) -> Any:
        options, backend = ctx.options
        refuse_transforms("the gradient of kda", (d_o, d_final, d_checkpoints))
        tensors = ctx.saved_tensors
        x = Inputs(*tensors[: TENSORS + 1], *options)
        if d_o is None:
            d_o = torch.zeros_like(x.v)
        args = (
            *x, backend, list(tensors[TENSORS + 1 :]), d_o,
            d_final if x.final_state else None, d_checkpoints if x.checkpoint_every else None,
        )  # fmt: skip
        direct = is_plain(x) and not torch.is_grad_enabled()
        grads = _chunk_grad(*args) if direct else torch.ops.kda_layers.chunk_grad.default(*args)
        needed = [None if t is None else d for t, d in zip(x, grads, strict=False)]
        return *needed, *[None] * (len(Inputs._fields) - len(needed) + 2)  # + save, backend


class _ChunkGrad(torch.autograd.Function):
    """The chunk_grad op where its own gradient is recorded: to say that there is none."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        return below_autograd("chunk_grad", *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("kda has no second derivative: its backward is written by hand and can be taken once")


def _chunk_autograd(*args: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    refuse_transforms("kda", args)
    if args[-2] and torch.is_grad_enabled():
        return *_Chunk.apply(*args), []  # residuals live in the graph alone
    return below_autograd("chunk", *args)


def _chunk_grad_autograd(*args: Any) -> tuple[Tensor, ...]:
    return _ChunkGrad.apply(*args) if torch.is_grad_enabled() else below_autograd("chunk_grad", *args)


def _step(*args: Any) -> Tensor:
    return without_autocast(backends()[args[-1]].step, StepInputs(*args[:-1]))


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
