"""Clipping gradients of several dtypes by a few kernels for each dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kda_layers.kernels.torch_private import foreach_mul_, foreach_norm, groups_of_dtypes

DEVICES = ("cuda",)  # where torch rounds the coefficient; on a CPU it does not


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Do what `nn.utils.clip_grad_norm_` does, bit for bit.

    On a GPU with gradients of several dtypes, torch launches two kernels for each gradient: one converts its norm to
    the widest dtype, the other multiplies it by an fp32 coefficient, which it rounds to the gradient's dtype. Norms
    that are converted together, and a coefficient that was rounded before, take a few kernels for all gradients.

    Args:
        parameters: parameters on one device.
        max_norm: largest norm of all gradients together.

    Returns:
        The norm before clipping.
    """
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if len({g.dtype for g in gradients}) < 2 or gradients[0].device.type not in DEVICES:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    with torch.no_grad():
        groups = groups_of_dtypes(gradients)  # in torch's order, as a sum depends on it
        norms = torch.cat([torch.stack(foreach_norm(group)) for group in groups])
        norm = torch.linalg.vector_norm(norms)
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for group in groups:
            foreach_mul_(group, coefficient.to(group[0].dtype))
    return norm
