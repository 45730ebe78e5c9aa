"""Which backend serves a call of `gated_rms_norm`. See `registry`."""

from __future__ import annotations

import torch

from ..registry import Registry, arch_of
from .contract import Backend, Problem


def default_problem(device: str | None = None) -> Problem:
    """Many tokens in bf16 on `device` or the best one here."""
    d = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Problem(d.type, arch_of(d), torch.bfloat16)


GATED_NORM: Registry[Problem, Backend] = Registry("gated_norm", __package__, Problem, default_problem, advisory=True)
