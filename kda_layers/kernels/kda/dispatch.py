"""Which backend serves a call of KDA: its registry, the problem of a call, and the choice. See `registry`."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from ..attention_bias.contract import Problem as AttentionProblem
from ..attention_bias.dispatch import ATTENTION
from ..registry import (
    ENVIRONMENT_VARIABLE,
    Registry,
    arch_of,
    constant_to_compile,
    keep_backend,
    requested,
    use_backend,
)
from .contract import Backend, Inputs, Problem, StepInputs

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "KDA",
    "backends",
    "choose",
    "constant_to_compile",
    "default_problem",
    "explain",
    "keep_backend",
    "problem_fields",
    "problem_of",
    "requested",
    "select",
    "use_backend",
]

KDA: Registry[Problem, Backend] = Registry("kda", "kda_layers.kernels.kda.backends")


def backends() -> dict[str, Backend]:
    """Every backend by name, highest priority first."""
    return KDA.backends()


def select(problem: Problem, backend: str | None = None) -> Backend:
    """The backend that serves `problem`; a ValueError as of `Registry.select`."""
    return KDA.select(problem, backend)


def problem_fields(x: Inputs | StepInputs, needs_grad: bool = False) -> tuple[Any, ...]:
    """The fields of the problem that a call with these inputs poses, after device and arch."""
    if isinstance(x, StepInputs):
        step, has_state, checkpoints, narrow = True, True, False, x.state.dtype == torch.bfloat16
    else:
        step, has_state, narrow = False, x.initial_state is not None, False
        checkpoints = operator.index(x.checkpoint_every) > 0
    (*_, H, K), (*_, HV, V), index = x.q.shape, x.v.shape, operator.index
    return (
        x.q.dtype, x.beta.dtype, index(K), index(V), index(HV) // index(H), x.gate_activation, x.beta_activation,
        x.qk_l2norm, step, x.cu_seqlens is not None, needs_grad, has_state, checkpoints, narrow,
    )  # fmt: skip


def problem_of(x: Inputs | StepInputs, needs_grad: bool = False) -> Problem:
    """The problem that a call with these inputs poses."""
    return Problem(x.q.device.type, arch_of(x.q.device), *problem_fields(x, needs_grad))


@constant_to_compile
def choose(backend: str | None, device: torch.device, *fields: Any) -> tuple[str, ...]:
    """(name, *fused) of the backend for the problem with these `problem_fields`.

    Constants in, constants out, which is why `problem_fields` turns sizes into plain integers.
    """
    return _choose(KDA.requested(backend), device, *fields)


@functools.lru_cache(maxsize=4096)  # by what makes a Problem: to make and hash one costs as much as a launch
def _choose(name: str | None, device: torch.device, *fields: Any) -> tuple[str, ...]:
    chosen = KDA.serving(Problem(device.type, arch_of(device), *fields), name)
    return chosen.name, *sorted(chosen.fused)


def default_problem(device: str | None = None) -> Problem:
    """A training step of a layer of the default configuration in bf16, on `device` or the best one here."""
    d = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Problem(
        device=d.type,
        arch=arch_of(d),
        dtype=torch.bfloat16,
        beta_dtype=torch.bfloat16,
        K=128,
        V=128,
        group=1,
        gate_activation="lower_bound",
        beta_activation="sigmoid",
        qk_l2norm=True,
        needs_grad=True,
    )


def explain(problem: Problem | AttentionProblem | None = None) -> str:
    """For each backend, whether it can serve `problem` of `kda` (default: `default_problem()`) or of
    `biased_attention`, and every reason why not.

    The first line names the problem, the last one the backend that a call would use now.
    """
    if isinstance(problem, AttentionProblem):
        return ATTENTION.explain(problem)
    return KDA.explain(problem or default_problem())
