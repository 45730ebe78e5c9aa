"""When its modules for what surrounds the operator are too slow to launch."""

from __future__ import annotations

import torch
from torch import Tensor

MIN_TOKENS = 128  # with fewer, launching takes longer than computing
LACK = f"there are too few tokens, needs B * T of at least {MIN_TOKENS}"


def few_tokens(x: Tensor) -> bool:
    """True if x [B, T, ...] is too short for a kernel that is slow to launch."""
    if torch.compiler.is_compiling():  # a bound on B * T would make two graphs of one
        return x.shape[1] == 1
    return x.shape[0] * x.shape[1] < MIN_TOKENS
