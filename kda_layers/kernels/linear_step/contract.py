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


# What is faster than cuBLAS (docs/internals/kernels/linear_step.md).
MOST_ROWS = 4
MOST_PRODUCTS = 2**25  # rows times elements of the weight, for more than one row
MOST_IN_TILE = 64  # rows


def work_of(x: Inputs) -> str:
    """Return the kind of a call by its number of tokens.

    "row" is one token, or a few of a small weight; "tile" is up to `MOST_IN_TILE` onto a residual, without norm or
    activation; "product" is everything else.
    """
    rows = x.x.shape[0] * x.x.shape[1]
    if rows == 1 or (rows <= MOST_ROWS and rows * x.weight.numel() <= MOST_PRODUCTS):
        return "row"
    if rows <= MOST_IN_TILE and x.residual is not None and x.norm_weight is None and not x.swiglu:
        return "tile"
    return "product"


@dataclass(frozen=True)
class Problem(AnyProblem):
    """What a backend may decide on."""

    work: str = "product"  # see `work_of`

    def __str__(self) -> str:
        return f"linear layer of a decode step, {super().__str__()}, {self.work}"


class Backend(AnyBackend):
    """One implementation. A transparent one is plain torch code, which torch.compile traces."""

    transparent = False

    @abc.abstractmethod
    def apply(self, x: Inputs) -> Tensor:
        """Return the result of `linear_step`, [B, T, N]."""
