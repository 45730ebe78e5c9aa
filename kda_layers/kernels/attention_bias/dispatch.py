"""Which backend serves a call of `biased_attention`. See `registry`."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..declarations import arch_of, best_device
from ..registry import Registry
from ..torch_private import constant_to_compile
from .contract import Backend, Inputs, Problem


def default_problem(device: str | None = None) -> Problem:
    """A training step in bf16 with a learned bias for each key, on `device` or the best one here."""
    bf16 = torch.bfloat16
    return Problem(*best_device(device), bf16, 128, 1, "per key", bf16, needs_grad=True, bias_grad=True)


ATTENTION: Registry[Problem, Backend] = Registry("biased_attention", __package__, Problem, default_problem)


def problem_fields(x: Inputs, needs_grad: bool = False) -> tuple[Any, ...]:
    """The fields of the problem that a call with these inputs poses, after device and arch."""
    (*_, H, D), H_kv, bias = x.q.shape, x.k.shape[2], x.bias
    kind = "none" if bias is None else "per key" if bias.shape[2] == 1 else "per query and key"
    return (
        x.q.dtype, operator.index(D), operator.index(H) // operator.index(H_kv), kind,
        None if bias is None else bias.dtype, x.causal, x.cu_seqlens is not None, needs_grad, x.bias_grad,
    )  # fmt: skip


def problem_of(x: Inputs, needs_grad: bool = False) -> Problem:
    """The problem that a call with these inputs poses."""
    return Problem(x.q.device.type, arch_of(x.q.device), *problem_fields(x, needs_grad))


@constant_to_compile
def choose(backend: str | None, device: torch.device, *fields: Any) -> str:
    """The name of the backend for the problem with these `problem_fields`."""
    return ATTENTION.choose(backend, device, *fields).name
