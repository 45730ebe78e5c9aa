"""The contract between the fused addition and RMSNorm and its backends, which are all differentiable torch code."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from torch import Tensor

from ..declarations import Backend as AnyBackend
from ..declarations import Problem as AnyProblem
from ..fla.layer import FEW_TOKENS


@dataclass(frozen=True)
class Problem(AnyProblem):
    """What a backend may decide on."""

    few_tokens: bool = False

    LACKS = {"few_tokens": FEW_TOKENS}  # noqa: RUF012

    def __str__(self) -> str:
        return f"add rms norm, {super().__str__()}"


class Backend(AnyBackend):
    """One implementation."""

    @abc.abstractmethod
    def normalise(self, residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the result of `add_rms_norm`."""
