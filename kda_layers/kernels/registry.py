"""Backends of an operator: discovery, choice, and the explanation of a choice, the same for every operator.

Order of preference: the `backend=` argument, `use_backend`, the environment variable KDA_LAYERS_BACKEND, then the
highest-priority backend that can serve the problem. A named backend that cannot serve raises with all its reasons, and
an automatic choice is logged once per problem. `use_backend` and the variable apply to every operator; an operator
without a backend of that name chooses automatically.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import logging
import os
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch

from . import torch_private
from .call_cache import CallCache, leading_tensors
from .declarations import Backend, Problem, arch_of
from .namespace import NAMESPACE
from .torch_private import constant_to_compile

ENVIRONMENT_VARIABLE = "KDA_LAYERS_BACKEND"
OPERATORS = "attention_bias.contract", "fused", "kda.contract", "kda.cuda.layer_step.contract"  # make the registries
ENTRY_POINTS = "kda_layers.backends"  # group of other distributions' entry points, each a backend

logger = logging.getLogger("kda_layers")
_override: ContextVar[str | None] = ContextVar("kda_layers_backend", default=None)  # "": explicitly no context
AUTOGRAD_KEY = f"{NAMESPACE}_backend"  # of torch's thread-local objects, which autograd's threads inherit
CHOICES = 4096  # cached by the fields of a problem: making and hashing a Problem costs as much as a launch
_registries: dict[str, Registry[Any, Any]] = {}

P = TypeVar("P", bound=Problem)
B = TypeVar("B", bound=Backend)
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[P, B]):
    """The backends of one operator: those of `backends`, a folder or a module, and those of other distributions."""

    def __init__(
        self,
        operator: str,
        package: str | None,
        problem: type[P],
        answer: Callable[[B], Any] = lambda backend: backend.name,
        advisory: bool = False,
        kind: type[B] | None = None,
    ):
        """Register the operator whose folder is `package`.

        Args:
            problem: the class of its problems
            answer: what `choose` returns for a backend, a constant to torch.compile
            advisory: a requested backend that cannot serve leaves the choice open instead of raising, for operators
                that accompany another one
            kind: the class of its backends, by which those of other distributions are known; None: there are none
        """
        self.kind = kind
        self.broken: dict[str, str] = {}  # entry points that gave no backend, and why
        self.operator, self.package, self.problem = operator, f"{package}.backends", problem
        self.answer, self.advisory = answer, advisory
        self._found: dict[str, B] | None = None
        self._serving = functools.lru_cache(CHOICES)(self._serving_fields)
        self._call_caches: list[CallCache[Any]] = []
        _registries[operator] = self

    def call_cache(self, inputs: type[Any]) -> CallCache[Any]:
        """Return a new `CallCache` of inputs of this class, for values that depend on the choice of a backend."""
        self._call_caches.append(CallCache(leading_tensors(inputs), requested))
        return self._call_caches[-1]

    def clear_caches(self) -> None:
        """Drop every cached choice; needed after the set of backends has changed."""
        self._serving.cache_clear()
        for cache in self._call_caches:
            cache.clear()

    def backends(self) -> dict[str, B]:
        """Every backend by name, highest priority first."""
        if self._found is None:
            self._found = self.discover()
            if self.kind is not None and NAMESPACE == "kda_layers":  # not in a Hub kernel, whose classes are others
                self._load_entry_points()
        return self._found

    def register(self, backend: B) -> None:
        """Add a backend; see `register_backend`."""
        known = self.backends()
        backend.check_declaration(self.problem)
        if backend.name in known:
            raise ValueError(f"backend must have a new name, got {backend.name!r}, known: {', '.join(known)}")
        self._found = dict(sorted([*known.items(), (backend.name, backend)], key=lambda item: -item[1].priority))
        self.clear_caches()

    def _load_entry_points(self) -> None:
        """Register the backends of other distributions; one that fails stays out, with a warning and in `broken`."""
        for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
            name = f"entry point {point.name} = {point.value} of {point.dist.name if point.dist else 'no distribution'}"
            try:
                backend = point.load()
                if registry_of(backend) is self:
                    self.register(backend)
            except Exception as error:  # anything that the code of others raises
                self.broken[name] = f"{type(error).__name__}: {error}"
                warnings.warn(f"{name} gives no backend: {self.broken[name]}", stacklevel=2)

    def backend(self, name: str) -> B:
        """The backend of this name; torch.compile may trace this."""
        self._ensure_found()
        return self._found[name]  # type: ignore[index]

    @constant_to_compile  # a trace, which may be the first to ask, cannot import
    def _ensure_found(self) -> bool:
        return bool(self.backends())

    def discover(self) -> dict[str, B]:
        """Import the modules and return what each defines as `BACKEND`, or as `BACKENDS` if several."""
        package = importlib.import_module(self.package)
        names = [f"{self.package}.{m.name}" for m in pkgutil.iter_modules(getattr(package, "__path__", []))]
        modules = [importlib.import_module(name) for name in names] or [package]
        found: list[B] = [b for m in modules for b in (m.BACKENDS if hasattr(m, "BACKENDS") else (m.BACKEND,))]
        return {b.name: b for b in sorted(found, key=lambda b: -b.priority)}

    def requested(self, backend: str | None) -> str | None:
        """The backend that the caller asks this operator for by argument, context or environment; None to choose.

        In context and environment, a name that only another operator has leaves the choice open.
        """
        if backend is not None:
            return backend
        name = requested()
        others = name is not None and name not in self.backends() and any(name in r.backends() for r in registries())
        return None if others else name

    @constant_to_compile
    def choose(self, backend: str | None, device: torch.device, *fields: Any) -> Any:
        """The `answer` of the backend that `select` returns for the problem with `fields` after device and arch."""
        return self._serving(self.requested(backend), device, *fields)

    def _serving_fields(self, name: str | None, device: torch.device, *fields: Any) -> Any:
        return self.answer(self.select(self.problem(device.type, arch_of(device), *fields), name))

    def problem_of(self, x: Any, needs_grad: bool = False) -> P:
        """The problem that a call with inputs `x` poses."""
        device = x[0].device
        return self.problem(device.type, arch_of(device), *self.problem.fields_of(x, needs_grad))

    def select(self, problem: P, backend: str | None = None) -> B:
        """The backend that serves `problem`.

        Raises:
            ValueError: `backend` is unknown (the message lists the known ones), or cannot serve (all its reasons).
        """
        known, name = self.backends(), self.requested(backend)
        if name is not None and name in known:
            reasons = known[name].unsupported(problem)
            if not reasons:
                return known[name]
            if not self.advisory:
                raise ValueError(f"backend {name!r} cannot serve [{problem}]: " + "; ".join(reasons))
        elif name is not None and not self.advisory:
            raise ValueError(f"unknown backend {name!r}, known: {', '.join(known)}" + self._broken("; "))
        refusals: list[str] = []
        for candidate in known.values():
            reasons = candidate.unsupported(problem)
            if not reasons:
                notes = "".join(f"; {note}" for note in candidate.notes(problem))
                others = "".join(f"\n  not {r}" for r in refusals)
                logger.info("%s serves [%s]%s%s", candidate.name, problem, notes, others)
                if candidate.caveat and not self.advisory:
                    warnings.warn(
                        f"{candidate.name} serves [{problem}], but {candidate.caveat}; backend='eager' is plain "
                        f"PyTorch; others refused: {'; '.join(refusals) or 'none is installed'}",
                        stacklevel=4,
                    )
                if candidate.name == "eager" and problem.device not in ("cpu", "meta") and not self.advisory:
                    warnings.warn(
                        f"plain PyTorch serves [{problem}], which is slow on {problem.device}; "
                        f"faster backends refused: {'; '.join(refusals) or 'none is installed'}",
                        stacklevel=4,
                    )
                return candidate
            refusals.append(f"{candidate.name}: {'; '.join(reasons)}")
        raise ValueError(f"no backend can serve [{problem}]: " + "; ".join(refusals))

    def explain(self, problem: P, B: int = 1, T: int = 8192, HV: int = 16) -> str:
        """See `explain` below."""
        lines = [f"problem: {problem}"]
        for b in self.backends().values():
            reasons = b.unsupported(problem)
            can = f"can serve it, but {b.caveat}; backend={b.name!r} chooses it" if b.caveat else "can serve it"
            can += "".join(f"; {note}" for note in b.notes(problem))
            lines.append(f"  {b.name:8} {can if not reasons else 'cannot: ' + '; '.join(reasons)}")
        if self.broken:
            lines.append(self._broken("  "))
        try:
            chosen = self.select(problem)
            lines.append(f"chosen: {chosen.name}")
            if forms := chosen.forms(problem, B, T, HV):
                lines += [f"its forms for B={B}, T={T}, HV={HV}:", *(f"  {line}" for line in forms)]
        except ValueError as error:
            lines.append(f"chosen: none ({error})")
        return "\n".join(lines)

    def _broken(self, separator: str) -> str:
        return "".join(f"{separator}{name} gives no backend: {why}" for name, why in self.broken.items())


@functools.cache
def registries() -> tuple[Registry[Any, Any], ...]:
    """The registries of all operators."""
    for module in OPERATORS:
        importlib.import_module(f"{__package__}.{module}")
    return tuple(_registries.values())


def registry_of(backend: Any) -> Registry[Any, Any]:
    """Return the registry of the operator that `backend` implements, or raise a TypeError."""
    known = {r.kind: r for r in registries() if r.kind is not None}
    for kind, registry in known.items():
        if isinstance(backend, kind):
            return registry
    kinds = " or ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in known)
    raise TypeError(f"backend must be an instance of {kinds}, got {backend!r}")


def register_backend(backend: Any) -> None:
    """Add a backend of `kda`, `kda_prefill` and `kda_step` that is not part of this package, for this process.

    It is chosen, refused and explained as ours are. A distribution that has an entry point for it in the group
    `kda_layers.backends` need not call this. See the guide on backends.

    Args:
        backend: an instance of `kda_layers.kernels.kda.contract.Backend`.

    Raises:
        TypeError: it is no such instance.
        ValueError: its name is taken, it declares what the operator does not know, or a feature without its method.
    """
    registry_of(backend).register(backend)


def explain(problem: Any = None, *, B: int = 1, T: int = 8192, HV: int = 16) -> str:
    """List for each backend whether it can serve `problem`, or every reason why not.

    The first line names the problem (by default a training step of a KDA layer in bf16 on the best device here). After
    the backend that a call would use now come the forms of its kernels, if it has several, each with its expected time
    in microseconds or every reason against it.

    Args:
        B, T, HV: sequences, tokens of each and value heads of the call whose forms are listed; a problem has no sizes.

    Raises:
        TypeError: `problem` is not that of an operator.
    """
    for r in registries():
        if isinstance(problem, r.problem) or (problem is None and r.operator == "kda"):
            return r.explain(r.problem.default() if problem is None else problem, B, T, HV)
    raise TypeError(f"expected a model, a layer, the Problem of an operator or None, got {type(problem).__name__}")


def requested() -> str | None:
    """The name that context or environment ask for, of any operator."""
    return _context_choice() or os.environ.get(ENVIRONMENT_VARIABLE) or None


def _context_choice() -> str | None:
    """The name that `use_backend` set for this call; None or "" without one."""
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
    if torch.compiler.is_compiling():  # the graph contains the recomputation with the choices of the trace
        return f
    return _overriding(_context_choice() or "")(f)
