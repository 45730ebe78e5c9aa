"""The contract between the gated norm and its backends, which are all differentiable torch code."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..declarations import Backend as AnyBackend
from ..declarations import Problem as AnyProblem
from ..fla.layer import FEW_TOKENS

Plain = Callable[[Tensor, Tensor], Tensor]  # (x, gate): the gated norm as the caller's module rounds it


@dataclass(frozen=True)
class Problem(AnyProblem):
    """What a backend may decide on."""

    few_tokens: bool = False

    LACKS = {"few_tokens": FEW_TOKENS}  # noqa: RUF012

    def __str__(self) -> str:
        return f"gated norm, {super().__str__()}"


class Backend(AnyBackend):
    """One implementation."""

    @abc.abstractmethod
    def normalise(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, plain: Plain | None) -> Tensor:
        """Return the result of `gated_rms_norm`."""
