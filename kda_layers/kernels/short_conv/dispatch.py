"""Which backend serves a call of `short_conv`. See `registry`."""

from __future__ import annotations

import torch

from ..declarations import best_device
from ..registry import Registry
from ..torch_private import constant_to_compile
from .contract import Backend, Problem


def default_problem(device: str | None = None) -> Problem:
    """A long sequence in bf16 on `device` or the best one here."""
    return Problem(*best_device(device), torch.bfloat16)


SHORT_CONV: Registry[Problem, Backend] = Registry("short_conv", __package__, Problem, default_problem, advisory=True)


@constant_to_compile
def choose(
    backend: str | None, device: torch.device, dtype: torch.dtype, few_tokens: bool, masked: bool
) -> tuple[str, bool]:
    """(name, transparent) of the backend for the problem."""
    chosen = SHORT_CONV.choose(backend, device, dtype, few_tokens, masked)
    return chosen.name, chosen.transparent
