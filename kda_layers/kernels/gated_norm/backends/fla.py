"""flash-linear-attention's norm: CUDA, 16 bits and fp32; rounds once."""

from __future__ import annotations

import torch
from torch import Tensor

from ...fla.package import layer_functions, problems
from ...registry import OneOf
from ..contract import Backend, Inputs


class FLABackend(Backend):
    name = "fla"
    priority = 10
    serves = {  # noqa: RUF012
        "device": OneOf("cuda"),
        "dtype": OneOf(torch.bfloat16, torch.float16, torch.float32),
    }

    def problems(self) -> list[str]:
        return problems()

    def normalise(self, x: Inputs) -> Tensor:
        with torch.cuda.device(x.x.device):
            return layer_functions().rms_norm_gated(x.x, x.gate, x.weight, None, activation="sigmoid", eps=x.eps)


BACKEND = FLABackend()
