"""Fused kernels for what surrounds the operator in a layer, where they are installed: short convolution, gated norm.

They are flash-linear-attention's. Under torch.compile the plain forms are used, which Inductor fuses as well, and
where plain PyTorch is asked for by name they are left out, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_layers.kernels.contract import CHUNK
from kda_layers.kernels.dispatch import requested
from kda_layers.kernels.fla.chunk_table import chunk_table
from kda_layers.kernels.fla.package import layer_functions, problems

MIN_TOKENS = 2 * CHUNK  # below, launching takes longer than computing, and these are slow to launch
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refusals(x: Tensor) -> list[str]:
    """Why the fused kernels do not serve activations x [B, T, ...]; empty where they do."""
    reasons = []
    if x.device.type != "cuda":
        reasons.append(f"device is {x.device.type}, needs cuda")
    if x.dtype not in DTYPES:
        reasons.append(f"dtype is {x.dtype}, needs bfloat16, float16 or float32")
    if torch.compiler.is_compiling():
        reasons.append("torch.compile fuses the plain form")
    elif requested(None) == "eager":
        reasons.append("backend 'eager' is asked for")
    elif x.shape[0] * x.shape[1] < MIN_TOKENS:
        reasons.append(f"B * T is {x.shape[0] * x.shape[1]}, needs at least {MIN_TOKENS}")
    return reasons or problems()


def conv_silu(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """y of `short_conv` without a mask; the gradient does not flow into the state."""
    table = chunk_table(cu_seqlens, x.shape[1])
    with torch.cuda.device(x.device):
        y, _ = layer_functions().causal_conv1d(
            x,
            weight.contiguous(),
            initial_state=None if state is None else state.detach().contiguous(),
            activation="silu",
            cu_seqlens=cu_seqlens,
            chunk_indices=table[0] if table else None,
        )
    return y


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] normalised over D, times weight [D], times sigmoid(gate [..., D]); in x's dtype, rounded once."""
    with torch.cuda.device(x.device):
        return layer_functions().rms_norm_gated(x, gate, weight, None, activation="sigmoid", eps=eps)
