"""Backends of an operator: discovery, choice, and the explanation of a choice, the same for every operator.

Order of preference: the `backend=` argument, `use_backend`, the environment variable KDA_LAYERS_BACKEND, then
automatically the highest-priority backend that can serve the problem. Nothing falls back silently: a named backend
that cannot serve raises with all its reasons, and an automatic choice is logged once per problem. `use_backend` and the
variable apply to every operator; an operator without a backend of that name chooses automatically.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar

import torch

ENVIRONMENT_VARIABLE = "KDA_LAYERS_BACKEND"

logger = logging.getLogger("kda_layers")
_override: ContextVar[str | None] = ContextVar("kda_layers_backend", default=None)  # "": no context, explicitly
AUTOGRAD_KEY = (
    "kda_layers_backend"  # torch hands objects of its thread-local storage from backward() to autograd's threads
)
_registries: list[Registry[Any, Any]] = []


class AnyProblem(Protocol):
    """What a backend may decide on; its text names it in logs and errors."""

    @property
    def device(self) -> str: ...


class AnyBackend(Protocol):
    """What a registry asks of a backend."""

    name: str
    priority: int  # automatic choice takes the highest that serves the problem

    def unsupported(self, problem: Any) -> list[str]: ...


P = TypeVar("P", bound=AnyProblem)
B = TypeVar("B", bound=AnyBackend)
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[P, B]):
    """The backends of one operator: each file of a package defines one, as `BACKEND`, under the file's name."""

    def __init__(self, operator: str, package: str):
        self.operator, self.package = operator, package
        self._found: dict[str, B] | None = None
        _registries.append(self)

    def backends(self) -> dict[str, B]:
        """Every backend by name, highest priority first."""
        if self._found is None:
            self._found = self.discover()
        return self._found

    def discover(self) -> dict[str, B]:
        """`backends`, found anew."""
        package = importlib.import_module(self.package)
        modules = (importlib.import_module(f"{self.package}.{m.name}") for m in pkgutil.iter_modules(package.__path__))
        return {b.name: b for b in sorted((module.BACKEND for module in modules), key=lambda b: -b.priority)}

    def requested(self, backend: str | None) -> str | None:
        """The backend that the caller asked this operator for by argument, context or environment; None leaves the
        choice open, as does a name out of the latter two that only another operator knows."""
        if backend is not None:
            return backend
        name = requested(None)
        others = name is not None and name not in self.backends() and any(name in r.backends() for r in _registries)
        return None if others else name

    def select(self, problem: P, backend: str | None = None) -> B:
        """The backend that serves `problem`.

        Raises:
            ValueError: `backend` is unknown (the message lists the known ones), or cannot serve (all its reasons).
        """
        return self.serving(problem, self.requested(backend))

    def serving(self, problem: P, name: str | None) -> B:
        """`select` by what `requested` has said, whatever context and environment say."""
        if name is not None:
            chosen = self._named(name)
            reasons = chosen.unsupported(problem)
            if reasons:
                raise ValueError(f"backend {name!r} cannot serve [{problem}]: " + "; ".join(reasons))
            return chosen
        refusals: list[str] = []
        for candidate in self.backends().values():
            reasons = candidate.unsupported(problem)
            if not reasons:
                logger.info("%s serves [%s]%s", candidate.name, problem, "".join(f"\n  not {r}" for r in refusals))
                if candidate.name == "eager" and problem.device not in ("cpu", "meta"):
                    warnings.warn(
                        f"plain PyTorch serves [{problem}], which is slow on {problem.device}; "
                        f"faster backends refused: {'; '.join(refusals) or 'none is installed'}",
                        stacklevel=4,
                    )
                return candidate
            refusals.append(f"{candidate.name}: {'; '.join(reasons)}")
        raise ValueError(f"no backend can serve [{problem}]: " + "; ".join(refusals))

    def _named(self, name: str) -> B:
        if name not in self.backends():
            raise ValueError(f"unknown backend {name!r}, known: {', '.join(self.backends())}")
        return self.backends()[name]

    def explain(self, problem: P) -> str:
        """For each backend, whether it can serve `problem`, and every reason why not.

        The first line names the problem, the last one the backend that a call would use now.
        """
        lines = [f"problem: {problem}"]
        for b in self.backends().values():
            reasons = b.unsupported(problem)
            lines.append(f"  {b.name:8} {'can serve it' if not reasons else 'cannot: ' + '; '.join(reasons)}")
        try:
            lines.append(f"chosen: {self.select(problem).name}")
        except ValueError as error:
            lines.append(f"chosen: none ({error})")
        return "\n".join(lines)


def requested(backend: str | None) -> str | None:
    """The name that the caller asked for by argument, context or environment, whatever operator it belongs to."""
    if backend is not None:
        return backend
    return _context_choice() or os.environ.get(ENVIRONMENT_VARIABLE) or None


def _context_choice() -> str | None:
    """The name that `use_backend` gives to this call; None or "" without one."""
    name = _override.get()
    if name is None and torch._C._current_graph_task_id() != -1 and torch._C._is_key_in_tls(AUTOGRAD_KEY):
        # A backward in a thread of autograd's, which has no context variables.
        name = torch._C._get_obj_in_tls(AUTOGRAD_KEY)
    return name


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the context every call without a `backend=` argument uses the backend `name`.

    Operators without a backend of this name choose automatically. The context reaches what `backward()` recomputes if
    `backward()` is called within it. Models of this package recompute with the backend of their forward wherever
    `backward()` is called; for torch.utils.checkpoint of your own, `checkpoint(keep_backend(f), ...)` does the same.

    Raises:
        ValueError: no operator has a backend of this name.
    """
    if not any(name in r.backends() for r in _registries):
        known = (f"{', '.join(r.backends())} of {r.operator}" for r in _registries)
        raise ValueError(f"unknown backend {name!r}, known: {'; '.join(known)}")
    with _overriding(name):
        yield


@contextlib.contextmanager
def _overriding(name: str) -> Iterator[None]:
    token = _override.set(name)
    before = torch._C._get_obj_in_tls(AUTOGRAD_KEY) if torch._C._is_key_in_tls(AUTOGRAD_KEY) else None
    torch._C._stash_obj_in_tls(AUTOGRAD_KEY, name)
    try:
        yield
    finally:
        _override.reset(token)
        torch._C._stash_obj_in_tls(AUTOGRAD_KEY, before)


def keep_backend(f: F) -> F:
    """Return `f` bound to the current `use_backend` choice (or to none), whenever and in whatever thread it is called.

    torch.utils.checkpoint calls its function twice, the second time from the backward: `checkpoint(keep_backend(f), x)`
    recomputes with the backend of the forward.
    """
    if torch.compiler.is_compiling():  # the recomputation is then part of the graph, with the choices of its trace
        return f
    return _overriding(_context_choice() or "")(f)


def constant_to_compile(f: F) -> F:
    """torch.compile calls `f` once, while tracing, and guards on its arguments, which must be constants.

    As torch.compiler.assume_constant_result, which would import torch._dynamo, a second, to set one attribute.
    """
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return f


@functools.cache
def arch_of(device: torch.device) -> int:
    """Compute capability times ten (90 for an H200); 0 where there is none."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
