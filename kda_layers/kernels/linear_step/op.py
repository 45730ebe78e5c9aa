"""A linear layer of a decode step: one launch from the residual stream to the next operator."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_is_tensor, check_tensor
from ..operator import NoGradOperator
from .contract import Inputs, work_of
from .dispatch import LINEAR_STEP


def _output_like(x: Inputs) -> Tensor:
    return x.x.new_empty((*x.x.shape[:2], x.weight.shape[0] // (2 if x.swiglu else 1)))


_cache = LINEAR_STEP.call_cache(Inputs)
_linear_step: NoGradOperator[Inputs] = NoGradOperator("linear_step", Inputs, (), LINEAR_STEP, "apply", _output_like)


def linear_step(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    residual: Tensor | None = None,
    swiglu: bool = False,
    overlap: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Return residual + f(rms_norm(x) weight^T), where the norm, the sum and f, SwiGLU, are optional. No gradient.

    Args:
        x: [B, T, D], any float dtype.
        weight: [N, D] in x's dtype, contiguous; with swiglu [2 N, D], the rows of the gate above those of the other.
        norm_weight: [D] in x's dtype, with which x is RMS-normalised; None for x as it is.
        norm_eps: epsilon of the norm.
        residual: [B, T, N] in x's dtype, or None.
        swiglu: True for f(gate, up) = silu(gate) * up.
        overlap: True if the kernel launched before this one on the stream does not write `weight`, which may then be
            read before that kernel has ended (programmatic dependent launch, from compute capability 9.0 on).
        backend: name of a backend, used if it serves this call; None chooses.

    Returns:
        [B, T, N]. A fused kernel rounds once; plain PyTorch after each operation.

    Raises:
        TypeError, ValueError: an argument breaks this contract; the message names it.
        RuntimeError: called while gradients are recorded.
    """
    inputs = Inputs(x, weight, norm_weight, residual, float(norm_eps), swiglu, overlap)
    cached = _cache.get(inputs, backend)
    name, transparent = cached or _prepare(inputs, backend)
    if transparent:
        return LINEAR_STEP.backend(name).apply(inputs)
    return _linear_step(inputs, name, plain=cached is not None)


def _prepare(x: Inputs, backend: str | None) -> tuple[str, bool]:
    """Check `x`; return the backend, and whether it is transparent."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in x):
        raise RuntimeError("linear_step has no gradient: call it under torch.no_grad()")
    check(x)
    chosen: tuple[str, bool] = LINEAR_STEP.choose(backend, x.x.device, x.x.dtype, work_of(x))
    return _cache.put(x, chosen, backend)


def check(x: Inputs) -> None:
    """Raise a TypeError or ValueError naming the argument unless `x` keeps the contract."""
    for name in ("x", "weight"):
        check_is_tensor(name, getattr(x, name))
    if x.x.ndim != 3 or x.weight.ndim != 2:
        raise ValueError(
            f"x and weight must have shapes [B, T, D] and [N, D], got {tuple(x.x.shape)} and {tuple(x.weight.shape)}"
        )
    (B, T, D), rows = x.x.shape, x.weight.shape[0]
    if x.swiglu and rows % 2:
        raise ValueError(f"weight must have an even number of rows with swiglu, got {rows}")
    expected = (
        ("weight", (rows, D)), ("norm_weight", (D,)), ("residual", (B, T, rows // 2 if x.swiglu else rows)),
    )  # fmt: skip
    for name, shape in expected:
        if (t := getattr(x, name)) is not None:
            check_tensor(name, t, shape, (x.x.dtype,), x.x, "x")
