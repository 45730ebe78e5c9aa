"""Fused kernels for what surrounds the operator in a layer, where they are installed: short convolution, gated norm.

They are flash-linear-attention's; where plain PyTorch is asked for by name they are left out. Under torch.compile the
gated norm's plain form is used, which Inductor fuses as well; its convolution took twice as long as this one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .fla.chunk_table import chunk_table
from .fla.package import layer_functions, problems
from .kda.checks import refuse_transforms
from .kda.contract import CHUNK
from .registry import constant_to_compile, requested

MIN_TOKENS = 2 * CHUNK  # below, launching takes longer than computing, and these are slow to launch
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def conv_refusals(x: Tensor, backend: str | None = None) -> list[str]:
    """Why `conv_silu` does not serve x [B, T, D] next to an operator of that `backend`; empty where it does."""
    reasons = []
    # A bound on B * T would make two graphs of one.
    if x.shape[1] == 1 if torch.compiler.is_compiling() else x.shape[0] * x.shape[1] < MIN_TOKENS:
        reasons.append(f"there are too few tokens, needs B * T of at least {MIN_TOKENS}")
    return [*reasons, *_refusals(x.device.type, x.dtype, backend)]


def norm_refusals(x: Tensor, backend: str | None = None) -> list[str]:
    """Why `gated_rms_norm` does not serve x [B, T, HV, V]; empty where it does."""
    return ["torch.compile fuses the plain form"] if torch.compiler.is_compiling() else conv_refusals(x, backend)


@constant_to_compile
def _refusals(device: str, dtype: torch.dtype, backend: str | None) -> tuple[str, ...]:
    reasons = []
    if device != "cuda":
        reasons.append(f"device is {device}, needs cuda")
    if dtype not in DTYPES:
        reasons.append(f"dtype is {dtype}, needs bfloat16, float16 or float32")
    if requested(backend) == "eager":
        reasons.append("backend 'eager' is asked for")
    return tuple(reasons or problems())


def explain(device: str) -> str:
    """What a layer in bf16 on `device` uses around the operator, and why not the fused kernels."""
    reasons = _refusals(device, torch.bfloat16, None)
    return f"plain PyTorch: {'; '.join(reasons)}" if reasons else "flash-linear-attention's kernels"


def conv_silu(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """y of `short_conv` without a mask; the gradient does not flow into the state."""
    if not torch.compiler.is_compiling():
        refuse_transforms("the short convolution before kda", (x, weight))
    if state is not None and torch.is_grad_enabled():
        state = state.detach().clone()  # the backward reads it, and a cache overwrites it before that
    return _Conv.apply(x, weight, state, cu_seqlens)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] normalised over D, times weight [D], times sigmoid(gate [..., D]); in x's dtype, rounded once."""
    with torch.cuda.device(x.device):
        return layer_functions().rms_norm_gated(x, gate, weight, None, activation="sigmoid", eps=eps)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, state, cu_seqlens)
        return torch.ops.kda_layers.conv_silu(x, weight, state, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return *torch.ops.kda_layers.conv_silu_grad(*ctx.saved_tensors, dy), None, None


# ---------------------------------------------------------------- torch ops, which torch.compile does not look into

_INPUTS = "Tensor x, Tensor weight, Tensor? state, Tensor? cu_seqlens"
_library = torch.library.Library("kda_layers", "FRAGMENT")
_library.define(f"conv_silu({_INPUTS}) -> Tensor")
_library.define(f"conv_silu_grad({_INPUTS}, Tensor dy) -> (Tensor, Tensor)")


def _arguments(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> dict[str, Any]:
    table = chunk_table(cu_seqlens, x.shape[1])
    return {
        "x": x,
        "weight": weight.contiguous(),
        "bias": None,
        "residual": None,
        "initial_state": None if state is None else state.contiguous(),
        "activation": "silu",
        "cu_seqlens": cu_seqlens,
        "chunk_indices": table[0] if table else None,
    }


def _conv(*inputs: Any) -> Tensor:
    with torch.cuda.device(inputs[0].device):
        return layer_functions().causal_conv1d_fwd(**_arguments(*inputs))[0]


def _conv_grad(*args: Any) -> tuple[Tensor, Tensor]:
    *inputs, dy = args
    with torch.cuda.device(dy.device):
        dx, dw, *_ = layer_functions().causal_conv1d_bwd(dy=dy, dht=None, **_arguments(*inputs))
    return dx, dw


for _name, _impl, _fake in (
    ("conv_silu", _conv, lambda x, *_: x.new_empty(x.shape)),
    ("conv_silu_grad", _conv_grad, lambda x, weight, *_: (torch.empty_like(x), weight.new_empty(weight.shape))),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kda_layers::{_name}", _fake, lib=_library)
