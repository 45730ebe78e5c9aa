"""The residual stream of a decoder layer: additions fused with the norms that read their sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kda_layers.kernels.fused.add_rms_norm import add_rms_norm
from kda_layers.modeling.layer.fast_paths import Call, Reason, additions, fast_path, other_dtype


def normal(norm: nn.Module, dtype: torch.dtype) -> Iterator[Reason]:
    """Yield what a norm does beyond a plain `nn.RMSNorm` with an epsilon, in inputs' dtype."""
    yield from additions(norm, nn.RMSNorm)
    if getattr(norm, "eps", None) is None:
        yield Reason("has no eps", "", norm)
    yield from other_dtype(norm, dtype)


@fast_path("norm fused with the addition before it", instead="an addition, then nn.RMSNorm")
def FUSED_NORM(call: Any, norm: nn.Module) -> Iterator[Reason]:
    """A plain `nn.RMSNorm` in x's dtype."""
    if call.compiling:
        yield Reason("is traced by torch.compile, which fuses them itself")
    yield from normal(norm, call.dtype)
    if norm._backward_hooks or norm._backward_pre_hooks:
        yield Reason("has backward hooks", "remove them", norm)
    if call.autocast:
        yield Reason("runs under autocast", "load the model in bfloat16 instead")
    if call.global_hooks:
        yield Reason("runs under global hooks of torch.nn", "remove them")


def add_and_normalise(residual: Tensor, x: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return residual + x (residual for None) and norm of it.

    Use the returned sum, also for x=None: the norm's backward adds its gradient.
    """
    if FUSED_NORM.serves(Call(residual), norm):
        return add_rms_norm(residual, x, norm.weight, norm.eps)  # type: ignore[arg-type]
    total = residual if x is None else residual + x
    return total, norm(total)
