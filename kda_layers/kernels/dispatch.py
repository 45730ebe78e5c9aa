"""Which backend serves a problem: discovery, choice, and the explanation of a choice.

Order of preference: the `backend=` argument, `use_backend`, the environment variable KDA_LAYERS_BACKEND, then
automatically the highest-priority backend that can serve the problem. Nothing falls back silently: a named backend
that cannot serve raises with all its reasons, and an automatic choice is logged once per problem.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import operator
import os
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from kda_layers.kernels.contract import Backend, Inputs, Problem, StepInputs

ENVIRONMENT_VARIABLE = "KDA_LAYERS_BACKEND"

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("kda_layers")
_override: ContextVar[str | None] = ContextVar("kda_layers_backend", default=None)


@functools.cache
def backends() -> dict[str, Backend]:
    """Every backend by name, highest priority first."""
    package = importlib.import_module("kda_layers.kernels.backends")
    modules = (importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__))
    found = sorted((module.BACKEND for module in modules), key=lambda b: -b.priority)
    return {b.name: b for b in found}


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the context every call without a `backend=` argument uses the backend `name`; raises if unknown."""
    _named(name)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def requested(backend: str | None) -> str | None:
    """The backend that the caller asked for by argument, context or environment; None leaves the choice open."""
    if backend is not None:
        return backend
    return _override.get() or os.environ.get(ENVIRONMENT_VARIABLE) or None


def select(problem: Problem, backend: str | None = None) -> Backend:
    """The backend that serves `problem`.

    Raises:
        ValueError: `backend` is unknown (the message lists the known ones), or cannot serve (all its reasons).
    """
    return _select(problem, requested(backend))


def _select(problem: Problem, name: str | None) -> Backend:
    if name is not None:
        chosen = _named(name)
        reasons = chosen.unsupported(problem)
        if reasons:
            raise ValueError(f"backend {name!r} cannot serve [{problem}]: " + "; ".join(reasons))
        return chosen
    refusals: list[str] = []
    for candidate in backends().values():
        reasons = candidate.unsupported(problem)
        if not reasons:
            logger.info("%s serves [%s]%s", candidate.name, problem, "".join(f"\n  not {r}" for r in refusals))
            if candidate.name == "eager" and problem.device != "cpu":
                warnings.warn(
                    f"plain PyTorch serves [{problem}], which is slow on {problem.device}; "
                    f"faster backends refused: {'; '.join(refusals) or 'none is installed'}",
                    stacklevel=4,
                )
            return candidate
        refusals.append(f"{candidate.name}: {'; '.join(reasons)}")
    raise ValueError(f"no backend can serve [{problem}]: " + "; ".join(refusals))


def _named(name: str) -> Backend:
    if name not in backends():
        raise ValueError(f"unknown backend {name!r}, known: {', '.join(backends())}")
    return backends()[name]


@functools.cache
def _arch(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


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
    return Problem(x.q.device.type, _arch(x.q.device), *problem_fields(x, needs_grad))


def constant_to_compile(f: F) -> F:
    """torch.compile calls `f` once, while tracing, and guards on its arguments, which must be constants.

    As torch.compiler.assume_constant_result, which would import torch._dynamo, a second, to set one attribute.
    """
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return f


@constant_to_compile
def choose(backend: str | None, device: torch.device, *fields: Any) -> tuple[str, ...]:
    """(name, *fused) of the backend for the problem with these `problem_fields`.

    Constants in, constants out, which is why `problem_fields` turns sizes into plain integers.
    """
    return _choose(requested(backend), device, *fields)


@functools.lru_cache(maxsize=4096)  # by what makes a Problem: to make and hash one costs as much as a launch
def _choose(name: str | None, device: torch.device, *fields: Any) -> tuple[str, ...]:
    chosen = _select(Problem(device.type, _arch(device), *fields), name)
    return chosen.name, *sorted(chosen.fused)


def default_problem(device: str | None = None) -> Problem:
    """A training step of a layer of the default configuration in bf16, on `device` or the best one here."""
    d = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Problem(
        device=d.type,
        arch=_arch(d),
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


def explain(problem: Problem | None = None) -> str:
    """For each backend, whether it can serve `problem` (default: `default_problem()`), and every reason why not.

    The first line names the problem, the last one the backend that a call would use now.
    """
    problem = problem or default_problem()
    lines = [f"problem: {problem}"]
    for b in backends().values():
        reasons = b.unsupported(problem)
        lines.append(f"  {b.name:8} {'can serve it' if not reasons else 'cannot: ' + '; '.join(reasons)}")
    try:
        lines.append(f"chosen: {select(problem).name}")
    except ValueError as error:
        lines.append(f"chosen: none ({error})")
    return "\n".join(lines)
