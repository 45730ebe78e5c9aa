"""The contract between the gated norm and its backends, which are all differentiable torch code.

D width of what is normalised
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..fla import few_tokens
from ..registry import Backend as AnyBackend


class Inputs(NamedTuple):
    """Everything that one call reads."""

    x: Tensor  # [..., D]
    gate: Tensor  # [..., D] logits
    weight: Tensor  # [D]
    eps: float
    plain: Callable[[Tensor, Tensor], Tensor] | None  # (x, gate): the norm as the caller's module rounds it


@dataclass(frozen=True)
class Problem:
    """What a backend may decide on."""

    device: str
    arch: int  # CUDA compute capability times ten; 0 on other devices
    dtype: torch.dtype
    few_tokens: bool = False
    compiled: bool = False

    @property
    def features(self) -> dict[str, str]:
        """What a backend must be able to do, and what is said where it is not."""
        lacks = {
            "few_tokens": few_tokens.LACK,
            "compiled": "torch.compile fuses the plain form",
        }
        return {name: lack for name, lack in lacks.items() if getattr(self, name)}

    def __str__(self) -> str:
        flags = "".join(f", {name}" for name in self.features)
        return f"gated norm, {self.device}, {str(self.dtype).removeprefix('torch.')}{flags}"


class Backend(AnyBackend):
    """One implementation."""

    @abc.abstractmethod
    def normalise(self, x: Inputs) -> Tensor:
        """What `gated_rms_norm` returns."""
