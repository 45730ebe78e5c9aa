"""Shared parts of the backends over flash-linear-attention's layer modules (convolution, gated norm)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..declarations import Backend, OneOf
from .package import problems

MIN_TOKENS = 128  # with fewer, launching takes longer than computing
FEW_TOKENS = f"there are too few tokens, needs B * T of at least {MIN_TOKENS}"


class LayerBackend(Backend):
    """A backend over one of flash-linear-attention's modules."""

    name = "fla"
    priority = 10
    serves = {  # noqa: RUF012
        "device": OneOf("cuda"),
        "dtype": OneOf(torch.bfloat16, torch.float16, torch.float32),
    }

    def problems(self) -> list[str]:
        return problems()


def few_tokens(x: Tensor) -> bool:
    """True if x [B, T, ...] has so few tokens that launching takes longer than computing."""
    # While compiling, a bound on B * T would split the graph's range of sizes. The `if` makes the result a constant.
    few = x.shape[1] == 1 if torch.compiler.is_compiling() else x.shape[0] * x.shape[1] < MIN_TOKENS
    return True if few else False  # noqa: SIM210
