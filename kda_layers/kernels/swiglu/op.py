"""SwiGLU, which keeps its two inputs for the backward and nothing else; also with the linear layer that follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import torch_private
from ..operator import Operator, once_differentiable
from ..tracing import autocasts, is_plain
from .contract import Backend, Gradients, Inputs, Outputs
from .dispatch import SWIGLU

_swiglu: Operator[Inputs, Outputs] = Operator(
    "swiglu", Inputs, Outputs, Gradients, SWIGLU, lambda x: Outputs(x.gate.new_empty(x.gate.shape))
)


def swiglu(gate: Tensor, up: Tensor, backend: str | None = None) -> Tensor:
    """Return silu(gate) * up, differentiable.

    Args:
        gate, up: [B, T, D], any float dtype. torch.compile, torch.func, and tensors of another rank or class or unlike
            each other get the plain form, which broadcasts and raises as PyTorch does.
        backend: name of a backend, used if it serves this call; None chooses.

    Returns:
        [B, T, D]. A fused kernel rounds once, plain PyTorch also after silu.

    Raises:
        RuntimeError: a second derivative of a fused kernel; shapes that PyTorch cannot broadcast.
    """
    name, transparent = _choose(gate, up, backend)
    if transparent:
        return SWIGLU.backend(name).multiply(gate, up)
    needs_grad = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    return _swiglu(Inputs(gate, up), needs_grad, name).y


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, backend: str | None = None) -> Tensor:
    """Return swiglu(gate, up) @ weight.mT, differentiable; a fused kernel keeps gate and up, but not their product.

    The backward computes the product again while it computes the gradients of gate and up, for the gradient of weight.

    Args:
        gate, up, backend: as in `swiglu`.
        weight: [N, D], gate's dtype.

    Returns:
        [B, T, N].

    Raises:
        RuntimeError: as `swiglu`, or a weight of another dtype or width.
    """
    name, transparent = _choose(gate, up, backend)
    if transparent or not is_plain((weight,)) or autocasts(gate.device.type):
        return torch.nn.functional.linear(swiglu(gate, up, backend), weight)
    return _SwigluLinear.apply(gate, up, weight, SWIGLU.backend(name))


def _choose(gate: Tensor, up: Tensor, backend: str | None) -> tuple[str, bool]:
    """Return (name, transparent) of the backend for a call."""
    alike = gate.shape == up.shape and gate.dtype == up.dtype and gate.device == up.device
    plain_tensors = is_plain((gate, up)) and gate.ndim == 3 and alike
    if not plain_tensors or torch_private.transforms_active() or torch_private.forward_ad_active():
        return "eager", True
    return SWIGLU.choose(backend, gate.device, gate.dtype)


class _SwigluLinear(torch.autograd.Function):
    """(gate, up, weight) -> swiglu(gate, up) @ weight.mT."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, backend: Backend) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.backend = backend
        return torch.nn.functional.linear(backend.forward(Inputs(gate, up), False)[0].y, weight)

    @staticmethod
    @once_differentiable("swiglu_linear")
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        rows = d_out.flatten(0, -2)
        y = (rows @ weight).view(gate.shape)  # its gradient, which the kernel replaces
        d_gate, d_up = ctx.backend.backward_over_output(Inputs(gate, up), y)
        d_weight = rows.mT @ y.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return d_gate, d_up, d_weight, None
