"""Plain PyTorch: any device, any dtype; torch.compile fuses it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import accumulator_dtype
from ..contract import Backend, Inputs


class EagerBackend(Backend):
    name = "eager"
    features = frozenset(("few_tokens", "compiled"))

    def normalise(self, x: Inputs) -> Tensor:
        if x.plain is not None:
            return x.plain(x.x, x.gate)
        dtype = accumulator_dtype(x.x.dtype)
        y = torch.nn.functional.rms_norm(x.x.to(dtype), x.weight.shape, x.weight.to(dtype), x.eps)
        return (y * torch.sigmoid(x.gate.to(dtype))).to(x.x.dtype)


BACKEND = EagerBackend()
