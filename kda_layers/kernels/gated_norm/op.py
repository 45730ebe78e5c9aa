"""RMSNorm times the sigmoid of a gate."""

from __future__ import annotations

from torch import Tensor

from .. import torch_private
from ..fla.layer import few_tokens
from ..tracing import is_plain
from .contract import Plain
from .dispatch import GATED_NORM


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    plain: Plain | None = None,
    backend: str | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate) over the last dimension, differentiable.

    Args:
        x, gate: [B, T, ..., D], any float dtype.
        weight: [D]. torch.compile, torch.func, and tensors of another class or shape get the plain form.
        plain: (x, gate) -> the same in plain PyTorch, for callers whose module rounds intermediate results; None
            computes in fp32 (fp64 for fp64) and rounds once.
        backend: name of a backend, used if it serves this call; None chooses.

    Returns:
        [B, T, ..., D] in x's dtype, or what `plain` returns.
    """
    fused = is_plain((x, gate, weight)) and gate.shape == x.shape and weight.shape == x.shape[-1:]
    if not fused or torch_private.transforms_active() or torch_private.forward_ad_active():
        name = "eager"
    else:
        name = GATED_NORM.choose(backend, x.device, x.dtype, few_tokens(x))
    return GATED_NORM.backend(name).normalise(x, gate, weight, eps, plain)
