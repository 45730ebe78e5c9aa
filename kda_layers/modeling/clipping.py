"""Clipping gradients of several dtypes by one kernel for each dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kda_layers.kernels.torch_private import foreach_mul_

DEVICES = ("cuda",)  # where torch rounds the coefficient; on a CPU it does not


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Do what `nn.utils.clip_grad_norm_` does, bit for bit.

    On a GPU, torch multiplies the gradients of each dtype by an fp32 coefficient if one of them is fp32. It rounds the
    coefficient to the dtype of the gradient, by a kernel for each gradient that is not vectorised; a coefficient that
    has been rounded before takes one kernel for all of them.

    Args:
        parameters: parameters on one device.
        max_norm: largest norm of all gradients together.

    Returns:
        The norm before clipping.
    """
    parameters = list(parameters)
    by_dtype: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    gradients = [p.grad for p in parameters if p.grad is not None]
    for gradient in gradients:
        by_dtype[gradient.dtype].append(gradient)
    if len(by_dtype) < 2 or gradients[0].device.type not in DEVICES:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    with torch.no_grad():
        norm = nn.utils.get_total_norm(gradients)
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for dtype, of_dtype in by_dtype.items():
            foreach_mul_(of_dtype, coefficient.to(dtype))
    return norm
