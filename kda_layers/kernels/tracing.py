"""Torch's state around a call: tracing, dispatch modes, torch.func transforms, autocast, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from . import torch_private

PLAIN = {Tensor, Parameter, type(None), str, float, bool, int}


def is_plain(x: Any) -> bool:
    """True if the torch dispatcher can be bypassed for inputs `x`: not tracing, no dispatch mode, no Tensor subclass.

    Boxing some 20 arguments at every layer of the dispatcher costs as much as the rest of a call.
    """
    return (
        not torch.compiler.is_compiling()
        and torch_private.dispatch_modes() == 0
        and not x[0].is_meta
        and PLAIN.issuperset(map(type, x))
    )


def may_run_again() -> bool:
    """True in the forward of an autograd.Function, whose backward may run the same call again, with gradients.

    The first pass of reentrant checkpointing is such a forward. It records no gradients, but must find the bits of the
    second pass, so it takes the same kernels. Compiled code cannot guard on this and always gets False.
    """
    return not (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch_private.forward_ad_enabled()
        or torch.is_inference_mode_enabled()
    )


def needs_gradients(values: Iterable[Any]) -> bool:
    """True if autograd records a call with these inputs, or may record it when it runs again."""
    if torch.is_grad_enabled():
        return any(isinstance(t, Tensor) and t.requires_grad for t in values)
    return may_run_again()


def autocasts(device: str) -> bool:
    """Return True if autocast is enabled for a type of device; False for "meta", which it does not know."""
    return device != "meta" and torch.is_autocast_enabled(device)


def without_autocast(f: Callable[..., Any], x: Any, *args: Any) -> Any:
    """Return f(x, *args) with autocast off, which would run its matrix products in 16 bits."""
    device = x[0].device.type
    if not autocasts(device):
        return f(x, *args)
    with torch.autocast(device, enabled=False):
        return f(x, *args)


def refuse_transforms(name: str, values: Iterable[Any]) -> None:
    """Raise if called under a torch.func transform or forward-mode AD, which the kernels do not support."""
    functorch = torch_private.transforms_active()
    if (functorch or torch_private.forward_ad_active()) and any(
        (functorch and (t.requires_grad or torch_private.is_transformed(t)))
        or forward_ad.unpack_dual(t).tangent is not None
        for t in values
        if isinstance(t, Tensor)
    ):
        raise RuntimeError(
            f"{name} has no rules for torch.func's transforms (grad, vmap, jvp, ...) and forward-mode differentiation: "
            "for gradients use backward() or torch.autograd.grad, for several inputs at once the batch dimension"
        )
