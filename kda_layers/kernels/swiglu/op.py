"""SwiGLU, which keeps its two inputs for the backward and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import torch_private
from ..operator import Operator
from ..tracing import is_plain
from .contract import Gradients, Inputs, Outputs
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
    """
    alike = gate.shape == up.shape and gate.dtype == up.dtype and gate.device == up.device
    plain_tensors = is_plain((gate, up)) and gate.ndim == 3 and alike
    if not plain_tensors or torch_private.transforms_active() or torch_private.forward_ad_active():
        return SWIGLU.backends()["eager"].multiply(gate, up)
    name, transparent = SWIGLU.choose(backend, gate.device, gate.dtype)
    if transparent:
        return SWIGLU.backends()[name].multiply(gate, up)
    needs_grad = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    return _swiglu(Inputs(gate, up), needs_grad, name).y
