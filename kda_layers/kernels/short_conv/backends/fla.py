"""flash-linear-attention's convolution: CUDA, 16 bits and fp32. Inductor's kernel takes twice as long."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...fla.chunk_table import chunk_table
from ...fla.layer import LayerBackend
from ...fla.package import layer_functions
from ..contract import Backend, Gradients, Inputs, Outputs


class FLABackend(LayerBackend, Backend):
    def saved_like(self, x: Inputs) -> list[Tensor]:
        return []

    def forward(self, x: Inputs, save: bool) -> tuple[Outputs, list[Tensor]]:
        with torch.cuda.device(x.x.device):
            return Outputs(layer_functions().causal_conv1d_fwd(**_arguments(x))[0]), []

    def backward(self, x: Inputs, saved: list[Tensor], d_y: Tensor) -> Gradients:
        with torch.cuda.device(d_y.device):
            d_x, d_weight, *_ = layer_functions().causal_conv1d_bwd(dy=d_y, dht=None, **_arguments(x))
        return Gradients(d_x, d_weight)


def _arguments(x: Inputs) -> dict[str, Any]:
    table = chunk_table(x.cu_seqlens, x.x.shape[1])
    return {
        "x": x.x,
        "weight": x.weight.contiguous(),
        "bias": None,
        "residual": None,
        "initial_state": None if x.state is None else x.state.contiguous(),
        "activation": "silu",
        "cu_seqlens": x.cu_seqlens,
        "chunk_indices": table[0] if table else None,
    }


BACKEND = FLABackend()
