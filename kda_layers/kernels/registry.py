"""Backends of an operator: discovery, choice, and the explanation of a choice, the same for every operator.

Order of preference: the `backend=` argument, `use_backend`, the environment variable KDA_LAYERS_BACKEND, then
automatically the highest-priority backend that can serve the problem. Nothing falls back silently: a named backend
that cannot serve raises with all its reasons, and an automatic choice is logged once per problem. `use_backend` and the
variable apply to every operator; an operator without a backend of that name chooses automatically.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from . import torch_private

ENVIRONMENT_VARIABLE = "KDA_LAYERS_BACKEND"

logger = logging.getLogger("kda_layers")
_override: ContextVar[str | None] = ContextVar("kda_layers_backend", default=None)  # "": no context, explicitly
AUTOGRAD_KEY = "kda_layers_backend"  # of torch's thread-local objects, which autograd's threads inherit
CHOICES = 4096  # remembered, by the fields of a problem: to make and hash one costs as much as a launch
_registries: dict[str, Registry[Any, Any]] = {}


@dataclass(frozen=True)
class Problem:
    """What a backend may decide on: no length, no batch size and no tensor, so that a choice can be memoised."""

    device: str
    arch: int  # CUDA compute capability times ten (90 for an H200); 0 on other devices
    dtype: torch.dtype

    LACKS: ClassVar[Mapping[str, str]] = {}  # boolean fields that a backend must be able to do; what is said if not

    @property
    def features(self) -> dict[str, str]:
        """Those of LACKS that are set."""
        return {name: lack for name, lack in self.LACKS.items() if getattr(self, name)}

    def details(self) -> list[str]:
        """What the text says between the dtype and the features."""
        return []

    def __str__(self) -> str:
        where = f"{self.device} sm_{self.arch}" if self.arch else self.device
        return ", ".join([where, dtype_name(self.dtype), *self.details(), *self.features])


def best_device(device: str | None) -> tuple[str, int]:
    """(device, arch) of `device`, or of a GPU if there is one."""
    d = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return d.type, arch_of(d)


def dtype_name(dtype: torch.dtype) -> str:
    """bfloat16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


class Allowed(abc.ABC):
    """Values of one field of a problem that a backend serves."""

    @abc.abstractmethod
    def refuses(self, value: Any) -> str | None:
        """ "is <value>, needs <values>", or None for a value that is served."""


class OneOf(Allowed):
    """Some values; numbers of an arch as sm_90."""

    def __init__(self, *values: Any, prefix: str = ""):
        self.values, self.prefix = values, prefix

    def refuses(self, value: Any) -> str | None:
        if value in self.values:
            return None
        value, *needed = (f"{self.prefix}{str(v).removeprefix('torch.')}" for v in (value, *self.values))
        return f"is {value}, needs {one_of(needed)}"


def one_of(names: Sequence[str]) -> str:
    """a, b or c."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


class AtLeast(Allowed):
    """Numbers from one on."""

    def __init__(self, least: int, prefix: str = ""):
        self.least, self.prefix = least, prefix

    def refuses(self, value: Any) -> str | None:
        return None if value >= self.least else f"is {self.prefix}{value}, needs {self.prefix}{self.least} or newer"


class Backend(abc.ABC):
    """One implementation of an operator. It declares what it serves; what is missing becomes a reason."""

    name: str
    priority: int = 0  # automatic choice takes the highest that serves the problem
    serves: Mapping[str, Allowed] = {}  # by field of the problem; a field that is not named does not matter
    features: frozenset[str] = frozenset()  # of those that the operator's problems know

    def unsupported(self, problem: Any) -> list[str]:
        """Every reason why this backend cannot serve `problem` here, each 'what it is, what it needs'; empty: yes."""
        return self.refusals(problem) or self.problems()

    def refusals(self, problem: Any) -> list[str]:
        """Every reason that lies in the problem, whatever is installed."""
        refused = {field: allowed.refuses(getattr(problem, field)) for field, allowed in self.serves.items()}
        if refused.get("device"):
            refused.pop("arch", None)  # another device has none
        reasons = [f"{field} {why}" for field, why in refused.items() if why]
        reasons += [lack for feature, lack in problem.features.items() if feature not in self.features]
        return [*reasons, *self.more_reasons(problem)]

    def more_reasons(self, problem: Any) -> list[str]:
        """Reasons that are no set of values: combinations, shared memory."""
        return []

    def problems(self) -> list[str]:
        """What this machine lacks for any problem (packages, drivers); asked last, as finding out may take seconds."""
        return []

    def variants(self, arch: str) -> Iterable[tuple[str, Mapping[str, str | int]]]:
        """(source, macros) of every CUDA kernel that it may launch on `arch` ("sm_90a"), to compile ahead of use."""
        return ()


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


@functools.cache
def arch_of(device: torch.device) -> int:
    """Compute capability times ten (90 for an H200); 0 where there is none."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
