"""The scale of each operator is a finite number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kda_layers import kda, kda_step
from kda_layers.kernels import biased_attention


def inputs() -> dict[str, Any]:
    q, k, v = (torch.randn(1, 1, 2, 4) for _ in range(3))
    return dict(q=q, k=k, v=v, g=-torch.rand(1, 1, 2, 4), beta=torch.rand(1, 1, 2))


GATE: dict[str, Any] = dict(gate_activation="lower_bound", lower_bound=-5.0)
CALLS = {
    "kda": lambda scale: kda(**inputs(), **GATE, scale=scale),
    "kda_step": lambda scale: kda_step(**inputs(), state=torch.zeros(1, 2, 4, 4), **GATE, scale=scale),
    "biased_attention": lambda scale: biased_attention(
        *(inputs()[n] for n in "qkv"), torch.zeros(1, 2, 1, 1), scale=scale
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_scales_that_are_not_finite(call: str, scale: float) -> None:
    CALLS[call](0.5)
    with pytest.raises(ValueError, match=f"scale must be finite, got {scale}"):
        CALLS[call](scale)
