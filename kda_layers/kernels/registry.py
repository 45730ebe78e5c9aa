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
import importlib.util
import logging
import os
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch

from . import torch_private
from .declarations import Backend, Problem, arch_of

ENVIRONMENT_VARIABLE = "KDA_LAYERS_BACKEND"

logger = logging.getLogger("kda_layers")
_override: ContextVar[str | None] = ContextVar("kda_layers_backend", default=None)  # "": no context, explicitly
AUTOGRAD_KEY = "kda_layers_backend"  # of torch's thread-local objects, which autograd's threads inherit
CHOICES = 4096  # remembered, by the fields of a problem: to make and hash one costs as much as a launch
_registries: dict[str, Registry[Any, Any]] = {}


P = TypeVar("P", bound=Problem)
B = TypeVar("B", bound=Backend)
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[P, B]):
    """The backends of one operator: each file of a package defines one, as `BACKEND`, under the file's name."""

    def __init__(self, operator: str, package: str, problem: type[P], default: Callable[[], P], advisory: bool = False):
        """Registry of the operator whose folder is `package`.

        Args:
            problem: the class of its problems
            default: the problem that `explain` describes
            advisory: a name asked for is taken where that backend serves and else leaves the choice open, for
                operators that accompany another one
        """
        self.operator, self.package, self.problem, self.default = operator, f"{package}.backends", problem, default
        self.advisory = advisory
        self._found: dict[str, B] | None = None
        self._serving = functools.lru_cache(CHOICES)(self._serving_fields)
        _registries[operator] = self

    def backends(self) -> dict[str, B]:
        """Every backend by name, highest priority first."""
        if self._found is None:
            self._found = self.discover()
        return self._found

    def discover(self) -> dict[str, B]:
        """Import the backends of the folder: each file's `BACKEND`, or its `BACKENDS`, a class for several GPUs."""
        package = importlib.import_module(self.package)
        modules = [importlib.import_module(f"{self.package}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
        found: list[B] = [b for m in modules for b in (m.BACKENDS if hasattr(m, "BACKENDS") else (m.BACKEND,))]
        return {b.name: b for b in sorted(found, key=lambda b: -b.priority)}

    def requested(self, backend: str | None) -> str | None:
        """The backend that the caller asked this operator for by argument, context or environment; None leaves the
        choice open, as does a name out of the latter two that only another operator knows."""
        if backend is not None:
            return backend
        name = requested(None)
        others = name is not None and name not in self.backends() and any(name in r.backends() for r in registries())
        return None if others else name

    def choose(self, backend: str | None, device: torch.device, *fields: Any) -> B:
        """`select` for the problem with these fields after device and arch, remembered."""
        return self._serving(self.requested(backend), device, *fields)

    def _serving_fields(self, name: str | None, device: torch.device, *fields: Any) -> B:
        problem: Any = self.problem
        return self.serving(problem(device.type, arch_of(device), *fields), name)

    def select(self, problem: P, backend: str | None = None) -> B:
        """The backend that serves `problem`.

        Raises:
            ValueError: `backend` is unknown (the message lists the known ones), or cannot serve (all its reasons).
        """
        return self.serving(problem, self.requested(backend))

    def serving(self, problem: P, name: str | None) -> B:
        """`select` by what `requested` has said, whatever context and environment say."""
        if name is not None and not (self.advisory and name not in self.backends()):
            chosen = self._named(name)
            reasons = chosen.unsupported(problem)
            if not reasons:
                return chosen
            if not self.advisory:
                raise ValueError(f"backend {name!r} cannot serve [{problem}]: " + "; ".join(reasons))
        refusals: list[str] = []
        for candidate in self.backends().values():
            reasons = candidate.unsupported(problem)
            if not reasons:
                logger.info("%s serves [%s]%s", candidate.name, problem, "".join(f"\n  not {r}" for r in refusals))
                if candidate.name == "eager" and problem.device not in ("cpu", "meta") and not self.advisory:
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


@functools.cache
def registries() -> tuple[Registry[Any, Any], ...]:
    """Those of all operators: every folder here with a file `dispatch`."""
    folder = importlib.import_module(__package__)
    for m in pkgutil.iter_modules(folder.__path__):
        if m.ispkg and importlib.util.find_spec(f"{__package__}.{m.name}.dispatch"):
            importlib.import_module(f"{__package__}.{m.name}.dispatch")
    return tuple(_registries.values())


def explain(problem: Any = None) -> str:
    """For each backend, whether it can serve `problem` (default: a training step of a KDA layer in bf16 on the best
    device here), and every reason why not.

    The first line names the problem, the last one the backend that a call would use now.
    """
    if problem is None:
        kda = next(r for r in registries() if r.operator == "kda")
        return kda.explain(kda.default())
    return next(r for r in registries() if isinstance(problem, r.problem)).explain(problem)


def requested(backend: str | None) -> str | None:
    """The name that the caller asked for by argument, context or environment, whatever operator it belongs to."""
    if backend is not None:
        return backend
    return _context_choice() or os.environ.get(ENVIRONMENT_VARIABLE) or None


def _context_choice() -> str | None:
    """The name that `use_backend` gives to this call; None or "" without one."""
    name = _override.get()
    if name is None and torch_private.in_backward():
        name = torch_private.thread_object(AUTOGRAD_KEY)  # autograd's threads have no context variables
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
    if not any(name in r.backends() for r in registries()):
        known = (f"{', '.join(r.backends())} of {r.operator}" for r in registries() if not r.advisory)
        raise ValueError(f"unknown backend {name!r}, known: {'; '.join(known)}")
    with _overriding(name):
        yield


@contextlib.contextmanager
def _overriding(name: str) -> Iterator[None]:
    token = _override.set(name)
    before = torch_private.thread_object(AUTOGRAD_KEY)
    torch_private.store_thread_object(AUTOGRAD_KEY, name)
    try:
        yield
    finally:
        _override.reset(token)
        torch_private.store_thread_object(AUTOGRAD_KEY, before)


def keep_backend(f: F) -> F:
    """Return `f` bound to the current `use_backend` choice (or to none), whenever and in whatever thread it is called.

    torch.utils.checkpoint calls its function twice, the second time from the backward: `checkpoint(keep_backend(f), x)`
    recomputes with the backend of the forward.
    """
    if torch.compiler.is_compiling():  # the recomputation is then part of the graph, with the choices of its trace
        return f
    return _overriding(_context_choice() or "")(f)
