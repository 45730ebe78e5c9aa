"""The contract between SwiGLU and its backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..declarations import Problem as AnyProblem
from ..operator import Differentiable


class Inputs(NamedTuple):
    """The inputs of a fused kernel."""

    gate: Tensor  # [B, T, D]
    up: Tensor  # [B, T, D], gate's dtype


class Outputs(NamedTuple):
    """The outputs of a fused kernel."""

    y: Tensor  # [B, T, D], contiguous


class Gradients(NamedTuple):
    """Gradients of the fields of `Inputs`."""

    gate: Tensor
    up: Tensor


@dataclass(frozen=True)
class Problem(AnyProblem):
    """What a backend may decide on."""

    def __str__(self) -> str:
        return f"swiglu, {super().__str__()}"


class Backend(Differentiable):
    """One implementation. A transparent one is plain torch code, which autograd and torch.compile trace."""

    transparent = False

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the result of `swiglu`. Only transparent backends have this method."""
        raise NotImplementedError

    def backward_over_output(self, x: Inputs, d_y: Tensor) -> Gradients:
        """Return what `backward` does, and overwrite d_y [B, T, D], contiguous, with y, bit for bit the forward's.

        Transparent backends do not have this method.
        """
        raise NotImplementedError
