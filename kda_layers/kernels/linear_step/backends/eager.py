"""Plain PyTorch for any device, dtype and number of tokens; torch.compile fuses what surrounds the product."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ...fused.swiglu import swiglu
from ..contract import Backend, Inputs


class EagerBackend(Backend):
    name = "eager"
    transparent = True

    def apply(self, x: Inputs) -> Tensor:
        y = x.x
        if x.norm_weight is not None:
            y = F.rms_norm(y, x.norm_weight.shape, x.norm_weight, x.norm_eps)
        y = F.linear(y, x.weight)
        if x.swiglu:
            gate, up = y.chunk(2, -1)
            y = swiglu(gate, up)
        return y if x.residual is None else x.residual + y


BACKEND = EagerBackend()
