"""What a backend declares that it serves, what a call asks for, and the sentences in which the two differ."""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch


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


@functools.cache
def arch_of(device: torch.device) -> int:
    """Compute capability times ten (90 for an H200); 0 where there is none."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
