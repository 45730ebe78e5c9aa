"""Its modules for what surrounds the operator in a layer: where they serve, and when they are too slow to launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..declarations import Backend, OneOf
from .package import problems

MIN_TOKENS = 128  # with fewer, launching takes longer than computing
FEW_TOKENS = f"there are too few tokens, needs B * T of at least {MIN_TOKENS}"


class LayerBackend(Backend):
    """A backend over one of its modules."""

    name = "fla"
    priority = 10
    serves = {  # noqa: RUF012
        "device": OneOf("cuda"),
        "dtype": OneOf(torch.bfloat16, torch.float16, torch.float32),
    }

    def problems(self) -> list[str]:
        return problems()


def few_tokens(x: Tensor) -> bool:
    """True if x [B, T, ...] is too short for a kernel that is slow to launch."""
    # A bound on B * T would make two graphs of one. The branch makes a constant of what is symbolic.
    few = x.shape[1] == 1 if torch.compiler.is_compiling() else x.shape[0] * x.shape[1] < MIN_TOKENS
    return True if few else False  # noqa: SIM210
