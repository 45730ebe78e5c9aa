"""flash-linear-attention's norm: CUDA, 16 bits and fp32; rounds once."""

from __future__ import annotations

import torch
from torch import Tensor

from ...fla.layer import LayerBackend
from ...fla.package import layer_functions
from ..contract import Backend, Inputs


class FLABackend(LayerBackend, Backend):
    def normalise(self, x: Inputs) -> Tensor:
        with torch.cuda.device(x.x.device):
            return layer_functions().rms_norm_gated(x.x, x.gate, x.weight, None, activation="sigmoid", eps=x.eps)


BACKEND = FLABackend()
