"""The contract between `biased_attention` and its backends: inputs, problem, the backend base class and the registry.

Shapes, used in every file of this folder:

    B batch     T queries    S keys    N packed sequences, then B = 1 and T = S
    H query heads    H_kv key heads; query head h reads key head h // G, G = H // H_kv    D head width

Backends get a compact bias [1|B, 1|H_kv|H, 1|T, S]: dimensions that it is broadcast in have size 1, none is expanded.
"""

from __future__ import annotations

import abc
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import accumulator_dtype
from ..declarations import Problem as AnyProblem
from ..declarations import best_device, dtype_name
from ..operator import Differentiable
from ..registry import Registry


class Inputs(NamedTuple):
    """Everything that one call of the operator reads, in the order of the op's arguments."""

    q: Tensor  # [B, T, H, D]
    k: Tensor  # [B, S, H_kv, D]
    v: Tensor  # [B, S, H_kv, D]
    bias: Tensor | None  # [1|B, 1|H_kv|H, 1|T, S], compact
    cu_seqlens: Tensor | None  # [N + 1] int32 or int64
    scale: float
    causal: bool
    bias_grad: bool  # True if the gradient of the bias is wanted


class Gradients(NamedTuple):
    """Gradients of the leading fields of `Inputs`, same shapes and dtypes, contiguous; None where not wanted."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Problem(AnyProblem):
    """The facts on which backends may decide. All serve every combination of flags, so none is a feature."""

    D: int
    group: int  # H // H_kv
    bias: str = "none"  # "per key": the same for every query, "per query and key"
    bias_dtype: torch.dtype | None = None
    causal: bool = True
    packed: bool = False
    needs_grad: bool = False
    bias_grad: bool = False

    @classmethod
    def default(cls, device: str | None = None) -> Problem:
        """A training step in bf16 with a learned bias for each key, on `device` or the best one here."""
        bf16 = torch.bfloat16
        return cls(*best_device(device), bf16, 128, 1, "per key", bf16, needs_grad=True, bias_grad=True)

    @staticmethod
    def fields_of(x: Inputs, needs_grad: bool = False) -> tuple[Any, ...]:
        (*_, H, D), H_kv, bias = x.q.shape, x.k.shape[2], x.bias
        kind = "none" if bias is None else "per key" if bias.shape[2] == 1 else "per query and key"
        return (
            x.q.dtype, operator.index(D), operator.index(H) // operator.index(H_kv), kind,
            None if bias is None else bias.dtype, x.causal, x.cu_seqlens is not None, needs_grad, x.bias_grad,
        )  # fmt: skip

    def details(self) -> list[str]:
        bias = self.bias if self.bias_dtype is None else f"{self.bias} ({dtype_name(self.bias_dtype)})"
        flags = [n for n in ("causal", "packed", "needs_grad", "bias_grad") if getattr(self, n)]
        return [f"D={self.D}", f"H/H_kv={self.group}", f"bias={bias}", *flags]

    def __str__(self) -> str:
        return f"attention, {super().__str__()}"


class Outputs(NamedTuple):
    """The results of the operator."""

    o: Tensor  # [B, T, H, D] in v's dtype


class Backend(Differentiable):
    """One implementation of the operator."""

    def forward(self, x: Inputs, save: bool) -> tuple[Outputs, list[Tensor]]:
        o, logsumexp = (x.v.new_zeros(x.q.shape), empty_lse(x)) if _is_empty(x) else self.attend(x)
        return Outputs(o), [logsumexp] if save else []

    def backward(self, x: Inputs, saved: list[Tensor], d_o: Tensor) -> Gradients:
        if _is_empty(x):
            q, k, v = (t.new_zeros(t.shape) for t in (x.q, x.k, x.v))
            return Gradients(q, k, v, x.bias.new_zeros(x.bias.shape) if x.bias is not None and x.bias_grad else None)
        logsumexp, o = saved
        return self.attend_backward(x, o, logsumexp, d_o)

    def saved_like(self, x: Inputs) -> list[Tensor]:
        return [empty_lse(x)]

    @abc.abstractmethod
    def attend(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return contiguous o [B, T, H, D] in v's dtype and logsumexp [B, H, T] in fp32 or fp64; no size of `x` is 0.

        Only the same backend's `attend_backward` reads the logsumexp.
        """

    @abc.abstractmethod
    def attend_backward(self, x: Inputs, o: Tensor, logsumexp: Tensor, d_o: Tensor) -> Gradients:
        """Gradients of every tensor input, from what the same backend's `attend` returned."""


def _is_empty(x: Inputs) -> bool:
    """True if there are no queries or no keys. Kernels are not called for these."""
    return x.q.numel() == 0 or x.k.shape[1] == 0


def empty_lse(x: Inputs) -> Tensor:
    """An unwritten logsumexp for every query and head, [B, H, T] in fp32 or fp64."""
    B, T, H, _ = x.q.shape
    return x.q.new_empty(B, H, T, dtype=accumulator_dtype(x.q.dtype))


ATTENTION: Registry[Problem, Backend] = Registry("biased_attention", __package__, Problem)
default_problem, problem_of = Problem.default, ATTENTION.problem_of
