"""Which backend serves a call of `kda` or `kda_step`. See `registry`."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..declarations import arch_of, best_device
from ..registry import Registry
from ..torch_private import constant_to_compile
from .contract import Backend, DecodeInputs, Inputs, Problem


def default_problem(device: str | None = None) -> Problem:
    """A training step of a layer of the default configuration in bf16, on `device` or the best one here."""
    bf16 = torch.bfloat16
    return Problem(*best_device(device), bf16, bf16, 128, 128, 1, "lower_bound", "sigmoid", True, needs_grad=True)


KDA: Registry[Problem, Backend] = Registry("kda", __package__, Problem, default_problem)


def problem_fields(x: Inputs | DecodeInputs, needs_grad: bool = False) -> tuple[Any, ...]:
    """The fields of the problem that a call with these inputs poses, after device and arch."""
    if isinstance(x, DecodeInputs):
        decode, has_state, checkpoints, bf16_state = True, True, False, x.state.dtype == torch.bfloat16
    else:
        decode, has_state, bf16_state = False, x.initial_state is not None, False
        checkpoints = operator.index(x.checkpoint_every) > 0
    (*_, H, K), (*_, HV, V), index = x.q.shape, x.v.shape, operator.index
    return (
        x.q.dtype, x.beta.dtype, index(K), index(V), index(HV) // index(H), x.gate_activation, x.beta_activation,
        x.qk_l2norm, decode, x.cu_seqlens is not None, needs_grad, has_state, checkpoints, bf16_state,
    )  # fmt: skip


def problem_of(x: Inputs | DecodeInputs, needs_grad: bool = False) -> Problem:
    """The problem that a call with these inputs poses."""
    return Problem(x.q.device.type, arch_of(x.q.device), *problem_fields(x, needs_grad))


@constant_to_compile
def choose(backend: str | None, device: torch.device, *fields: Any) -> tuple[str, ...]:
    """(name, *fused) of the backend for the problem with these `problem_fields`.

    Constants in, constants out, which is why `problem_fields` turns sizes into plain integers.
    """
    chosen = KDA.choose(backend, device, *fields)
    return chosen.name, *sorted(chosen.fused)
