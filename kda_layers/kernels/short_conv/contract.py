"""The contract between the short convolution and its backends.

B batch    T tokens    N sequences (B, or len(cu_seqlens) - 1 when packed)    D channels    W taps
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..declarations import Problem as AnyProblem
from ..fla.layer import FEW_TOKENS
from ..operator import Differentiable


class Inputs(NamedTuple):
    """The inputs of a fused kernel."""

    x: Tensor  # [B, T, D]
    weight: Tensor  # [D, W]
    state: Tensor | None  # [N, D, W]
    cu_seqlens: Tensor | None  # [N + 1] int32 or int64


class Outputs(NamedTuple):
    """The outputs of a fused kernel."""

    y: Tensor  # [B, T, D] in x's dtype


class Gradients(NamedTuple):
    """Gradients of the leading fields of `Inputs`."""

    x: Tensor
    weight: Tensor


class TripleInputs(NamedTuple):
    """The inputs of a kernel that convolves three tensors of one dtype together; their channels are concatenated in
    weight and state."""

    x0: Tensor  # [B, T, D0]
    x1: Tensor  # [B, T, D1]
    x2: Tensor  # [B, T, D2]
    weight: Tensor  # [D0 + D1 + D2, W]
    state: Tensor | None  # [N, D0 + D1 + D2, W]
    cu_seqlens: Tensor | None


class TripleOutputs(NamedTuple):
    """The outputs of a kernel that convolves three tensors together."""

    y0: Tensor
    y1: Tensor
    y2: Tensor


class TripleGradients(NamedTuple):
    """Gradients of the leading fields of `TripleInputs`."""

    x0: Tensor
    x1: Tensor
    x2: Tensor
    weight: Tensor


def silu_slope(z: Tensor) -> Tensor:
    """The derivative of SiLU."""
    sigmoid = z.sigmoid()
    return sigmoid * (1 + z * (1 - sigmoid))


@dataclass(frozen=True)
class Problem(AnyProblem):
    """The facts of a call on which a backend may decide."""

    few_tokens: bool = False
    masked: bool = False
    W: int = 4

    LACKS = {"few_tokens": FEW_TOKENS, "masked": "tokens are masked, needs mask=None"}  # noqa: RUF012

    def __str__(self) -> str:
        return f"short convolution, {super().__str__()}"

    def details(self) -> list[str]:
        return [f"W={self.W}"]


class Backend(Differentiable):
    """One implementation. A transparent one is plain torch code, which autograd and torch.compile trace."""

    transparent = False
    together = False  # forward and backward also take `TripleInputs`

    def convolve(
        self, x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the results of `short_conv`. Only transparent backends have this method."""
        raise NotImplementedError
