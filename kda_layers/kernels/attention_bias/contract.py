"""The contract between `biased_attention` and its backends: inputs, problem and the backend base class.

Shapes, used in every file of this folder:

    B batch     T queries    S keys    N packed sequences, then B = 1 and T = S
    H query heads    H_kv key heads; query head h reads key head h // G, G = H // H_kv    D head width

A bias [1|B, 1|H_kv|H, 1|T, S] that a backend sees is compact: what it is broadcast in has size 1, nothing is expanded.
"""

from __future__ import annotations

import abc
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """Everything that one call of the operator reads, in the order in which it flattens into the op."""

    q: Tensor  # [B, T, H, D]
    k: Tensor  # [B, S, H_kv, D]
    v: Tensor  # [B, S, H_kv, D]
    bias: Tensor | None  # [1|B, 1|H_kv|H, 1|T, S], compact
    cu_seqlens: Tensor | None  # [N + 1] int32 or int64
    scale: float
    causal: bool
    bias_grad: bool  # whether the gradient of the bias is wanted


class Gradients(NamedTuple):
    """Gradients of the leading fields of `Inputs`, same shapes and dtypes, contiguous; None where not wanted."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Problem:
    """What a backend may decide on: no length, no batch size and no tensor, so that a choice can be memoised."""

    device: str
    arch: int  # CUDA compute capability times ten (90 for an H200); 0 on other devices
    dtype: torch.dtype
    D: int
    group: int  # H // H_kv
    bias: str = "none"  # "per key": the same for every query, "per query and key"
    bias_dtype: torch.dtype | None = None
    causal: bool = True
    packed: bool = False
    needs_grad: bool = False
    bias_grad: bool = False

    def __str__(self) -> str:
        where = f"{self.device} sm_{self.arch}" if self.arch else self.device
        bias = self.bias if self.bias_dtype is None else f"{self.bias} ({_name(self.bias_dtype)})"
        flags = [n for n in ("causal", "packed", "needs_grad", "bias_grad") if getattr(self, n)]
        return f"attention, {where}, {_name(self.dtype)}, D={self.D}, H/H_kv={self.group}, bias={bias}" + "".join(
            f", {f}" for f in flags
        )


class Backend(abc.ABC):
    """One implementation of the operator. One file below `backends/` defines one, as `BACKEND`."""

    name: str
    priority: int  # automatic choice takes the highest that serves the problem

    @abc.abstractmethod
    def unsupported(self, problem: Problem) -> list[str]:
        """Every reason why this backend cannot serve `problem`, each 'what it is, what it needs'; empty means yes."""

    @abc.abstractmethod
    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """(o [B, T, H, D] in v's dtype, logsumexp [B, H, T] in `wide`), contiguous; the second one is read by this
        backend's `backward` alone. No size of `x` is zero."""

    @abc.abstractmethod
    def backward(self, x: Inputs, o: Tensor, logsumexp: Tensor, d_o: Tensor) -> Gradients:
        """Gradients of every tensor input, from what the same backend's `forward` returned."""


def problem_fields(x: Inputs, needs_grad: bool = False) -> tuple[Any, ...]:
    """The fields of the problem that a call with these inputs poses, after device and arch."""
    (*_, H, D), H_kv, bias = x.q.shape, x.k.shape[2], x.bias
    kind = "none" if bias is None else "per key" if bias.shape[2] == 1 else "per query and key"
    return (
        x.q.dtype, operator.index(D), operator.index(H) // operator.index(H_kv), kind,
        None if bias is None else bias.dtype, x.causal, x.cu_seqlens is not None, needs_grad, x.bias_grad,
    )  # fmt: skip


def wide(dtype: torch.dtype) -> torch.dtype:
    """What inputs of `dtype` are computed and summed in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_lse(x: Inputs) -> Tensor:
    """Space for the logsumexp of every query and head, [B, H, T] in `wide`."""
    B, T, H, _ = x.q.shape
    return x.q.new_empty(B, H, T, dtype=wide(x.q.dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
