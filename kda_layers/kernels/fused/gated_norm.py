"""RMSNorm times the sigmoid or the SiLU of a gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..checks import OUTPUT_ACTIVATIONS, accumulator_dtype
from ..kda.fla.package import layer_functions
from ..operator import once_differentiable
from ..triton_package import even_rows
from .mechanism import FLA, Fused, Triton
from .rows import RowTiles

PER_THREAD = 8  # elements of a tile for a thread
Plain = Callable[[Tensor, Tensor], Tensor]  # (x, gate): the gated norm as the caller's module rounds it


class _GatedNorm(torch.autograd.Function):
    """(x, gate, weight, eps, silu) -> y, one launch each way; rounds once and keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, silu: bool) -> Tensor:
        y = _launch(x, gate, weight, torch.empty_like(x), eps, silu)
        ctx.save_for_backward(x, gate, weight)
        ctx.eps, ctx.silu = eps, silu
        return y

    @staticmethod
    @once_differentiable("gated_rms_norm")
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        from .triton.rows import gated_norm_backward_kernel

        x, gate, weight = ctx.saved_tensors
        d_x, d_gate = torch.empty_like(x), torch.empty_like(gate)
        d_weight = _tiles(x).launch_summing(
            weight, gated_norm_backward_kernel, x, gate, d_y.contiguous(), weight, d_x, d_gate, ctx.eps, ctx.silu
        )
        return d_x, d_gate, d_weight, None, None


def _launch(x: Tensor, gate: Tensor, weight: Tensor, y: Tensor, eps: float, silu: bool) -> Tensor:
    """Write the result to y, which may be x; both are contiguous. A gate with contiguous heads is not copied."""
    from .triton.rows import gated_norm_forward_kernel

    heads = 1 if gate.ndim < 2 or gate.is_contiguous() else gate.shape[-2]
    width = heads * gate.shape[-1]
    rows = even_rows(gate.reshape(1, gate.numel() // max(1, width), width))
    _tiles(x).launch(gated_norm_forward_kernel, x, rows, weight, y, rows.stride(1), heads, eps, silu)
    return y


def _tiles(x: Tensor) -> RowTiles:
    return RowTiles(x.shape[:-1].numel(), x.shape[-1], PER_THREAD)


def _triton(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, plain: Plain | None = None, activation: str = "sigmoid"
) -> Tensor:
    x, weight, silu = x.contiguous(), weight.contiguous(), activation == "silu"
    if torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad or weight.requires_grad):
        return _GatedNorm.apply(x, gate.contiguous(), weight, eps, silu)
    return _launch(x, gate, weight, torch.empty_like(x), eps, silu)


def _fla(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, plain: Plain | None = None, activation: str = "sigmoid"
) -> Tensor:
    with torch.cuda.device(x.device):
        return layer_functions().rms_norm_gated(x, gate, weight, None, activation=activation, eps=eps)


def _fits(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, plain: Plain | None = None, activation: str = "sigmoid"
) -> bool:
    return gate.shape == x.shape and weight.shape == x.shape[-1:] and activation in OUTPUT_ACTIVATIONS


GATED_NORM = Fused("gated_norm", "gated norm", Triton(_triton), FLA(_fla), tensors=3, fits=_fits)


@GATED_NORM.plain
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    plain: Plain | None = None,
    activation: str = "sigmoid",
    *,
    backend: str | None = None,
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * activation(gate) over the last dimension, differentiable.

    Args:
        x, gate: [B, T, ..., D], any float dtype.
        weight: [D]. torch.compile, torch.func, and tensors of another class or shape get the plain form.
        plain: (x, gate) -> the same in plain PyTorch, for callers whose module rounds intermediate results; None
            computes in fp32 (fp64 for fp64) and rounds once.
        activation: "sigmoid", or "silu" for gate * sigmoid(gate).
        backend: name of a backend, used if it serves this call; None chooses.

    Returns:
        [B, T, ..., D] in x's dtype, or what `plain` returns.

    Raises:
        ValueError: another activation.
    """
    if activation not in OUTPUT_ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(OUTPUT_ACTIVATIONS)}, got {activation!r}")
    if plain is not None:
        return plain(x, gate)
    dtype = accumulator_dtype(x.dtype)
    y = torch.nn.functional.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps)
    return (y * OUTPUT_ACTIVATIONS[activation](gate.to(dtype))).to(x.dtype)


def gated_rms_norm_(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> None:
    """`gated_rms_norm` with a sigmoid gate, in place and without gradients, for inference engines.

    Args:
        x: [..., H, D], any float dtype, contiguous; overwritten.
        gate: [..., H, D], any float dtype; read in place if its heads are contiguous, as in a merged projection.
        weight: [D], any float dtype.
        eps: added to the mean square.

    Raises:
        ValueError: x is not contiguous, or gate or weight has another shape.
    """
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()} of {tuple(x.shape)}; pass x.contiguous()")
    if not _fits(x, gate, weight, eps):
        raise ValueError(
            f"gate must have x's shape and weight its last dimension, got x {tuple(x.shape)}, "
            f"gate {tuple(gate.shape)}, weight {tuple(weight.shape)}"
        )
    if GATED_NORM.choose(None, x.device, x.dtype, False) == "triton":
        _launch(x, gate, weight.contiguous(), x, eps, silu=False)
    else:
        x.copy_(gated_rms_norm(x, gate, weight, eps))
