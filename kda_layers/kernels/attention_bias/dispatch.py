"""Which backend serves a call of `biased_attention`: its registry and the choice. See `kernels.registry`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..registry import Registry, arch_of, constant_to_compile
from .contract import Backend, Inputs, Problem, problem_fields

ATTENTION: Registry[Problem, Backend] = Registry("biased_attention", "kda_layers.kernels.attention_bias.backends")


def problem_of(x: Inputs, needs_grad: bool = False) -> Problem:
    """The problem that a call with these inputs poses."""
    return Problem(x.q.device.type, arch_of(x.q.device), *problem_fields(x, needs_grad))


@constant_to_compile
def choose(backend: str | None, device: torch.device, *fields: Any) -> str:
    """The name of the backend for the problem with these `problem_fields`."""
    return _choose(ATTENTION.requested(backend), device, *fields)


@functools.lru_cache(maxsize=4096)
def _choose(name: str | None, device: torch.device, *fields: Any) -> str:
    return ATTENTION.serving(Problem(device.type, arch_of(device), *fields), name).name


def default_problem(device: str | None = None) -> Problem:
    """A training step in bf16 with a learned bias for each key, on `device` or the best one here."""
    d = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    bf16 = torch.bfloat16
    return Problem(d.type, arch_of(d), bf16, 128, 1, "per key", bf16, needs_grad=True, bias_grad=True)
