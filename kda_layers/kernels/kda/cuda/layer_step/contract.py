"""The contract between the layer's decode step and its backends.

B sequences    H q/k heads    HV value heads    K, V widths    D channels, 2 H K + HV V
W taps of the convolution    R, R' ranks of the factors of decays and gate    slots: B, or those of a pool
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....declarations import Backend as AnyBackend
from ....declarations import Problem as AnyProblem
from ....declarations import best_device
from ....registry import Registry


class Inputs(NamedTuple):
    """The arguments of the op, in its order; it writes `conv_state`, `state` and `out`."""

    q: Tensor  # [B, 1, H, K]   before the convolution, as are k and v
    k: Tensor  # [B, 1, H, K]
    v: Tensor  # [B, 1, HV, V]
    f: Tensor  # [B, 1, R]      the decays' logits are f_weight f; without f_weight [B, 1, HV K], or [B, 1, HV] of heads
    gate: Tensor  # [B, 1, R']  the same of the output gate; without gate_weight [B, 1, HV V]
    beta: Tensor  # [B, 1, HV]  logits
    conv_weight: Tensor  # [D, W], q's dtype or fp32
    conv_state: Tensor  # [slots, D, W or W - 1]
    state: Tensor  # [slots, HV, V, K]
    f_weight: Tensor | None  # [HV K, R]
    gate_weight: Tensor | None  # [HV V, R']
    gate_bias: Tensor | None  # [HV V], with gate_weight
    norm_weight: Tensor  # [V]
    A_log: Tensor | None  # [HV]
    dt_bias: Tensor | None  # [HV, K], or [HV] of heads
    state_indices: Tensor | None  # [B] int32 or int64
    out: Tensor | None  # as o [B, 1, HV, V], which is written there
    gate_activation: str
    lower_bound: float
    beta_activation: str
    scale: float
    norm_eps: float
    overlap: bool = False
    first_slot: int = 0
    output_activation: str = "sigmoid"


def of_heads(x: Inputs) -> bool:
    """Return True if a head has one decay, instead of one for each key channel."""
    return x.f_weight is None and x.f.shape[2] == x.v.shape[2] != x.v.shape[2] * x.q.shape[3]


@dataclass(frozen=True)
class Problem(AnyProblem):
    """The properties of a call that decide on its backend."""

    state_dtype: torch.dtype
    K: int
    V: int
    group: int  # HV // H
    taps: int
    decay_rank: int  # 0: logits are given
    gate_rank: int  # the same of the output gate
    gate_activation: str
    beta_activation: str
    head_gates: bool = False  # one decay of a head
    output_activation: str = "sigmoid"

    @classmethod
    def default(cls, device: str | None = None) -> Problem:
        """One token of a layer of the default configuration in bf16, on `device` or the best one here."""
        where = best_device(device)
        return cls(*where, torch.bfloat16, torch.float32, 128, 128, 1, 4, 128, 128, "lower_bound", "sigmoid")

    @staticmethod
    def fields_of(x: Inputs, needs_grad: bool = False) -> tuple[Any, ...]:
        (H, K), (HV, V), index = x.q.shape[2:], x.v.shape[2:], operator.index
        return (
            x.q.dtype, x.state.dtype, index(K), index(V), index(HV) // index(H), index(x.conv_weight.shape[1]),
            *(0 if weight is None else index(weight.shape[1]) for weight in (x.f_weight, x.gate_weight)),
            x.gate_activation, x.beta_activation, of_heads(x), x.output_activation,
        )  # fmt: skip

    @property
    def widths(self) -> tuple[int, int]:
        return self.K, self.V

    def details(self) -> list[str]:
        sizes = f"K={self.K}", f"V={self.V}", f"HV/H={self.group}"
        ranks = f"ranks={self.decay_rank},{self.gate_rank}"
        gate = f"gate={self.gate_activation}{' of a head' if self.head_gates else ''}"
        return [*sizes, ranks, gate, f"beta={self.beta_activation}", f"output={self.output_activation}"]

    def __str__(self) -> str:
        return f"decode step of a layer, {super().__str__()}"


class Backend(AnyBackend):
    """One implementation."""

    @abc.abstractmethod
    def step(self, x: Inputs) -> Tensor:
        """Return o [B, 1, HV, V], or `x.out`, and update `x.conv_state` and `x.state` in place; see `op.layer_step`."""

    def repeated(self, x: Inputs) -> Callable[[Inputs], Tensor]:
        """Return `step` for inputs that differ from `x` only in the addresses and values of tensors."""
        return self.step


LAYER_STEP: Registry[Problem, Backend] = Registry("layer_step", __package__, Problem, advisory=True)
