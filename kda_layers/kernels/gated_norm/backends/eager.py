"""Plain PyTorch for any device and dtype; torch.compile fuses it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import accumulator_dtype
from ..contract import Backend, Plain


class EagerBackend(Backend):
    name = "eager"
    features = frozenset(("few_tokens",))

    def normalise(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, plain: Plain | None) -> Tensor:
        if plain is not None:
            return plain(x, gate)
        dtype = accumulator_dtype(x.dtype)
        y = torch.nn.functional.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps)
        return (y * torch.sigmoid(gate.to(dtype))).to(x.dtype)


BACKEND = EagerBackend()
