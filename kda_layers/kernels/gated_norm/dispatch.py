"""Which backend serves a call of `gated_rms_norm`. See `registry`."""

from __future__ import annotations

import torch

from ..declarations import best_device
from ..registry import Registry
from .contract import Backend, Problem


def default_problem(device: str | None = None) -> Problem:
    """Many tokens in bf16 on `device` or the best one here."""
    return Problem(*best_device(device), torch.bfloat16)


GATED_NORM: Registry[Problem, Backend] = Registry("gated_norm", __package__, Problem, default_problem, advisory=True)
