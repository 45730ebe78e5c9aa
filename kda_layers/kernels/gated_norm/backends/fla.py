"""flash-linear-attention's gated norm: CUDA, 16 bits and fp32; rounds once."""

from __future__ import annotations

import torch
from torch import Tensor

from ...fla.layer import LayerBackend
from ...fla.package import layer_functions
from ..contract import Backend, Plain


class FLABackend(LayerBackend, Backend):
    def normalise(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, plain: Plain | None) -> Tensor:
        with torch.cuda.device(x.device):
            return layer_functions().rms_norm_gated(x, gate, weight, None, activation="sigmoid", eps=eps)


BACKEND = FLABackend()
