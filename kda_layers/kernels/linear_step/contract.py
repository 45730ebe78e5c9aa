"""The contract between linear layers of a decode step and their backends."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..declarations import Backend as AnyBackend
from ..declarations import Problem as AnyProblem


class Inputs(NamedTuple):
    """The arguments of the op, in its order."""

    x: Tensor  # [B, T, D]
    weight: Tensor  # [N, D], or [2 N, D] with swiglu: the gate's rows first
    norm_weight: Tensor | None  # [D]
    residual: Tensor | None  # [B, T, N]
    norm_eps: float
    swiglu: bool
    overlap: bool


@dataclass(frozen=True)
class Problem(AnyProblem):
    """What a backend may decide on."""

    many_products: bool = False

    LACKS = {"many_products": "a matrix product is faster for so many tokens of such a weight"}  # noqa: RUF012

    def __str__(self) -> str:
        return f"linear layer of a decode step, {super().__str__()}"


class Backend(AnyBackend):
    """One implementation. A transparent one is plain torch code, which torch.compile traces."""

    transparent = False

    @abc.abstractmethod
    def apply(self, x: Inputs) -> Tensor:
        """Return the result of `linear_step`, [B, T, N]."""
