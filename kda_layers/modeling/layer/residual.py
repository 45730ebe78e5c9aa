"""The residual stream of a decoder layer: additions fused with the norms that read their sums."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kda_layers.kernels import torch_private
from kda_layers.kernels.fused.add_rms_norm import add_rms_norm
from kda_layers.kernels.tracing import autocasts
from kda_layers.modeling.layer.merged_weights import trains_plainly


def add_and_normalise(residual: Tensor, x: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return residual + x (residual for None) and norm of it.

    Use the returned sum, also for x=None: the norm's backward adds its gradient.
    """
    if _is_fused(residual, norm):
        return add_rms_norm(residual, x, norm.weight, norm.eps)  # type: ignore[arg-type]
    total = residual if x is None else residual + x
    return total, norm(total)


def _is_fused(x: Tensor, norm: nn.Module) -> bool:
    """Return True for a plain `nn.RMSNorm` in x's dtype, without compiler, autocast and global hooks."""
    return (
        not torch.compiler.is_compiling()
        and trains_plainly(norm, nn.RMSNorm)
        and norm.eps is not None
        and norm.weight.dtype == x.dtype
        and not autocasts(x.device.type)
        and not torch_private.has_global_hooks()
    )
