"""`Problem`, the properties of a call; `Backend`, which declares the properties that it serves."""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch


@dataclass(frozen=True)
class Problem:
    """The properties of a call that decide on its backend: no length, batch size or tensor, so that it is cached."""

    device: str
    arch: int  # CUDA compute capability times ten (90 for an H200); 0 on other devices
    dtype: torch.dtype

    LACKS: ClassVar[Mapping[str, str]] = {}  # boolean field that needs support -> reason of a backend without it

    @classmethod
    def default(cls, device: str | None = None) -> Self:
        """The problem that `explain` describes: many tokens in bf16 on `device`, or on the best one here."""
        return cls(*best_device(device), torch.bfloat16)

    @staticmethod
    def fields_of(x: Any, needs_grad: bool) -> tuple[Any, ...]:
        """The fields after device and arch for a call with inputs `x`, sizes as plain integers for torch.compile."""
        raise NotImplementedError

    @property
    def features(self) -> dict[str, str]:
        """The items of LACKS whose field is set."""
        return {name: lack for name, lack in self.LACKS.items() if getattr(self, name)}

    def details(self) -> list[str]:
        """The part of the text between the dtype and the features."""
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
    """Some values, written with a prefix: sm_90."""

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
    """Numbers not below one."""

    def __init__(self, least: int, prefix: str = ""):
        self.least, self.prefix = least, prefix

    def refuses(self, value: Any) -> str | None:
        return None if value >= self.least else f"is {self.prefix}{value}, needs {self.prefix}{self.least} or newer"


class Backend(abc.ABC):
    """One implementation of an operator: it declares what it serves, and anything else becomes a reason."""

    name: str
    priority: int = 0  # the highest that serves the problem is chosen
    caveat: str = ""  # what speaks against it although it can serve: `explain` says it, an automatic choice warns
    serves: Mapping[str, Allowed] = {}  # by field of the problem; other fields do not matter
    features: frozenset[str] = frozenset()  # supported keys of the problem's LACKS
    NEEDED_BY: ClassVar[Mapping[str, str]] = {}  # method to be written -> the feature that needs it, "" for all

    def unsupported(self, problem: Any) -> list[str]:
        """Every reason why this backend cannot serve `problem` here, each 'what it is, what it needs'."""
        return self.refusals(problem) or self.problems()

    def refusals(self, problem: Any) -> list[str]:
        """The reasons that do not depend on what is installed."""
        refused = {field: allowed.refuses(getattr(problem, field)) for field, allowed in self.serves.items()}
        if refused.get("device"):
            refused.pop("arch", None)  # the device is reason enough
        reasons = [f"{field} {why}" for field, why in refused.items() if why]
        reasons += [lack for feature, lack in problem.features.items() if feature not in self.features]
        return [*reasons, *self.more_reasons(problem)]

    def more_reasons(self, problem: Any) -> list[str]:
        """Reasons that `serves` cannot express: combinations of fields, shared memory."""
        return []

    def check_declaration(self, problem: type[Problem]) -> None:
        """Raise a ValueError unless the name, `serves`, `features` and the methods go together, for this operator."""
        if not (isinstance(getattr(self, "name", None), str) and self.name):
            raise ValueError(f"{type(self).__qualname__}.name must be a string, got {getattr(self, 'name', None)!r}")
        properties = {*dir(problem), *problem.__dataclass_fields__}
        for what, given, known in (
            ("serves", {*self.serves}, properties),
            ("features", self.features, {*problem.LACKS}),
        ):
            if unknown := sorted(given - known):
                raise ValueError(f"{what} of {self.name!r} must be of {problem.__qualname__}, got {', '.join(unknown)}")
        kind = next(c for c in type(self).__mro__ if "NEEDED_BY" in vars(c))
        for method, feature in self.NEEDED_BY.items():
            if feature in ("", *self.features) and getattr(type(self), method) is getattr(kind, method):
                why = f"with the feature {feature!r}" if feature else "always"
                raise ValueError(f"backend {self.name!r} must define {method}, {why}")

    def notes(self, problem: Any) -> list[str]:
        """Return what a call of `problem` does besides running this backend's kernels: an input is copied first."""
        return []

    def problems(self) -> list[str]:
        """Packages or drivers that this machine lacks; called last, as it may take seconds."""
        return []

    def forms(self, problem: Any, B: int, T: int, HV: int) -> list[str]:
        """Return a line for each form of the kernels of a call of these sizes: its expected time, or why not."""
        return []

    def variants(self, arch: str) -> Iterable[tuple[str, Mapping[str, str | int]]]:
        """(source, macros) of every CUDA kernel that it may launch on `arch` ("sm_90a"), for `precompile`."""
        return ()


@functools.cache
def arch_of(device: torch.device) -> int:
    """Compute capability times ten (90 for an H200); 0 if not a GPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
