"""SwiGLU, which keeps its two inputs for the backward and nothing else; also with the linear layer that follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..operator import once_differentiable
from ..tracing import autocasts, is_plain
from ..triton_package import even_rows, on_device_of
from .mechanism import Fused, Triton

BLOCK, WARPS = 512, 2  # elements of a program: 8 for each thread, loads of 16 bytes


class _Swiglu(torch.autograd.Function):
    """(gate, up) -> silu(gate) * up, one launch each way."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _multiply(gate, up)

    @staticmethod
    @once_differentiable("swiglu")
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return _gradients(gate, up, even_rows(d_y), output=False)


class _SwigluLinear(torch.autograd.Function):
    """(gate, up, weight) -> swiglu(gate, up) @ weight.mT."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return torch.nn.functional.linear(_multiply(gate, up), weight)

    @staticmethod
    @once_differentiable("swiglu_linear")
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        rows = d_out.flatten(0, -2)
        y = (rows @ weight).view(gate.shape)  # its gradient, which the kernel replaces
        d_gate, d_up = _gradients(gate, up, y, output=True)
        d_weight = rows.mT @ y.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return d_gate, d_up, d_weight


def _multiply(gate: Tensor, up: Tensor) -> Tensor:
    from .triton.swiglu import swiglu_forward_kernel

    y = gate.new_empty(gate.shape)
    _launch(swiglu_forward_kernel, (even_rows(gate), even_rows(up)), (y,))
    return y


def _gradients(gate: Tensor, up: Tensor, d_y: Tensor, output: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up; `output` overwrites d_y with y, which has the bits of the forward."""
    from .triton.swiglu import swiglu_backward_kernel

    d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _launch(swiglu_backward_kernel, (even_rows(gate), even_rows(up), d_y), (d_gate, d_up), output)
    return d_gate, d_up


def _launch(kernel: Any, read: tuple[Tensor, ...], written: tuple[Tensor, ...], *options: bool) -> None:
    B, T, D = written[0].shape
    blocks = -(-D // BLOCK)
    if B * T * blocks == 0:
        return
    with on_device_of(read[0]):
        kernel[(B * T * blocks,)](
            *read, *written, *(t.stride(1) for t in read), D, blocks, *options,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def _triton(gate: Tensor, up: Tensor) -> Tensor:
    recorded = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    return _Swiglu.apply(gate, up) if recorded else _multiply(gate, up)


def _fits(gate: Tensor, up: Tensor) -> bool:
    return gate.ndim == 3 and gate.shape == up.shape and gate.dtype == up.dtype and gate.device == up.device


SWIGLU = Fused("swiglu", "swiglu", Triton(_triton, few_tokens=True), tensors=2, fits=_fits)


@SWIGLU.plain
def swiglu(gate: Tensor, up: Tensor, *, backend: str | None = None) -> Tensor:
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
    return torch.nn.functional.silu(gate) * up


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
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
    chosen = SWIGLU.chosen(backend, gate, up).name
    if chosen == "eager" or not is_plain((weight,)) or autocasts(gate.device.type):
        return torch.nn.functional.linear(swiglu(gate, up, backend=backend), weight)
    return _SwigluLinear.apply(gate, up, weight)
