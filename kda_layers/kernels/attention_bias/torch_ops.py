"""The torch ops behind `biased_attention` and its gradient: `kda_layers::biased_attention`, `::biased_attention_grad`.

They are the autograd and torch.compile boundary, as `kernels.torch_ops` is for KDA. An op cannot return None: what was
not asked for is an empty tensor, and the callers drop it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kda.checks import refuse_transforms
from ..library import below_autograd, is_plain, schema, without_autocast
from .contract import Gradients, Inputs, empty_lse
from .dispatch import ATTENTION

FIELDS, TENSORS = len(Inputs._fields), len(Gradients._fields)


def attend(x: Inputs, needs_grad: bool, backend: str) -> Tensor:
    """o [B, T, H, D] of `Backend.forward`, differentiable; the bias is compact."""
    plain = is_plain(x)
    if plain and not needs_grad:
        return _attend(*x, False, backend)[0]
    op = _Attend.apply if plain else torch.ops.kda_layers.biased_attention.default
    return op(*x, needs_grad, backend)[0]


def compact(bias: Tensor) -> Tensor:
    """The bias with size 1 in place of every leading dimension that is expanded (stride 0), differentiable."""
    dims = tuple(d for d in range(3) if bias.shape[d] > 1 and bias.stride(d) == 0)
    if not dims:
        return bias
    base = _base(bias)
    if base is None:
        return _Compact.apply(bias, dims)
    size = [1 if d in dims else n for d, n in enumerate(bias.shape)]
    return base.as_strided(size, bias.stride(), bias.storage_offset())


def _base(bias: Tensor) -> Tensor | None:
    """What the bias is an expanded view of, if the sum may go to it past the view, as it is: nobody looks at the
    gradient of the view. The compiler knows no bases."""
    if torch.compiler.is_compiling() or not bias.requires_grad or bias.is_leaf or not bias._is_view():
        return None
    base, looked_at = bias._base, bias.retains_grad or bias._backward_hooks
    return base if base is not None and not looked_at and base.requires_grad and base.dtype == bias.dtype else None


class _Compact(torch.autograd.Function):
    """Every element of the expanded bias gets an equal share of the sum, as one number with stride 0: whoever expanded
    it adds the shares up to the sum again, and nothing of the expanded size is ever in memory. In fp16 shares may be
    too small for the dtype."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, dims: tuple[int, ...]) -> Tensor:
        ctx.shape, ctx.shares = bias.shape, 1
        for d in dims:
            ctx.shares *= bias.shape[d]
            bias = bias.narrow(d, 0, 1)
        return bias

    @staticmethod
    def backward(ctx: Any, d_bias: Tensor) -> Any:
        return (d_bias / ctx.shares).expand(ctx.shape), None


_INPUTS = schema(Inputs)
_library = torch.library.Library("kda_layers", "FRAGMENT")
_library.define(f"biased_attention({_INPUTS}, bool save, str backend) -> (Tensor o, Tensor lse)")
_library.define(
    f"biased_attention_grad({_INPUTS}, str backend, Tensor o, Tensor lse, Tensor d_o) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)


def _is_empty(x: Inputs) -> bool:
    """Whether there is no query, or none that sees a key: backends are spared these."""
    return x.q.numel() == 0 or x.k.shape[1] == 0


def _attend(*args: Any) -> tuple[Tensor, Tensor]:
    x, (save, backend) = Inputs(*args[:FIELDS]), args[FIELDS:]
    if _is_empty(x):
        o, lse = x.v.new_zeros(x.q.shape), empty_lse(x)
    else:
        o, lse = without_autocast(ATTENTION.backends()[backend].forward, x)
    return o, lse if save else x.q.new_empty(0)


def _attend_fake(*args: Any) -> tuple[Tensor, Tensor]:
    x, (save, _) = Inputs(*args[:FIELDS]), args[FIELDS:]
    return x.v.new_empty(x.q.shape), empty_lse(x) if save else x.q.new_empty(0)


def _attend_grad(*args: Any) -> tuple[Tensor, ...]:
    x, (backend, *rest) = Inputs(*args[:FIELDS]), args[FIELDS:]
    if _is_empty(x):
        return tuple(t.zero_() for t in _attend_grad_fake(*args))
    grads = without_autocast(ATTENTION.backends()[backend].backward, x, *rest)
    return tuple(x.q.new_empty(0) if t is None else t for t in grads)


def _attend_grad_fake(*args: Any) -> tuple[Tensor, ...]:
    x = Inputs(*args[:FIELDS])
    d_bias = x.q.new_empty(0) if x.bias is None or not x.bias_grad else x.bias.new_empty(x.bias.shape)
    return *(t.new_empty(t.shape) for t in (x.q, x.k, x.v)), d_bias


class _Attend(torch.autograd.Function):
    """The op with its gradient; why not torch.library.register_autograd: see `kernels.torch_ops`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        x, backend = Inputs(*args[:FIELDS]), args[-1]
        o, lse = _attend(*args) if is_plain(x) else below_autograd("biased_attention", *args)
        ctx.options = x[TENSORS + 1 :], backend
        ctx.save_for_backward(*x[: TENSORS + 1], o, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, _: Any) -> Any:
        if d_o is None:
            return (None,) * (FIELDS + 2)
        options, backend = ctx.options
        refuse_transforms("the gradient of biased_attention", (d_o,))
        *tensors, o, lse = ctx.saved_tensors
        x = Inputs(*tensors, *options)
        direct = is_plain(x) and not torch.is_grad_enabled()
        op = _attend_grad if direct else torch.ops.kda_layers.biased_attention_grad.default
        *grads, d_bias = op(*x, backend, o, lse, d_o)
        return *grads, d_bias if x.bias_grad else None, *[None] * (FIELDS + 2 - TENSORS)  # + save, backend


class _AttendGrad(torch.autograd.Function):
    """The grad op where its own gradient is recorded: to say that there is none."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        return below_autograd("biased_attention_grad", *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "biased_attention has no second derivative: its backward is written by hand and can be taken once"
        )


def _attend_autograd(*args: Any) -> tuple[Tensor, Tensor]:
    refuse_transforms("biased_attention", args)
    if args[-2] and torch.is_grad_enabled():
        return _Attend.apply(*args)
    return below_autograd("biased_attention", *args)


def _attend_grad_autograd(*args: Any) -> tuple[Tensor, ...]:
    return _AttendGrad.apply(*args) if torch.is_grad_enabled() else below_autograd("biased_attention_grad", *args)


for _name, _impl, _fake in (
    ("biased_attention", _attend, _attend_fake),
    ("biased_attention_grad", _attend_grad, _attend_grad_fake),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kda_layers::{_name}", _fake, lib=_library)
_library.impl("biased_attention", _attend_autograd, "Autograd")
_library.impl("biased_attention_grad", _attend_grad_autograd, "Autograd")
