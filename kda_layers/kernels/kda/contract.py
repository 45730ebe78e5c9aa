"""The contract between the operator and its backends: inputs, problem and the backend base class.

Shapes, used in every file below `kernels/`:

    B batch     T tokens    N sequences (B, or len(cu_seqlens) - 1 when packed)
    H q/k heads    HV value heads, a multiple of H; value head i reads q/k head i // (HV // H)
    K key width    V value width

A backend sees inputs that `checks.py` has accepted, so it validates nothing itself except values that would need a
host read (`sequence_offsets`).
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

CHUNK = 64  # tokens between two state checkpoints, and the chunk length of every backend that reports them
NO_SLOT = -1  # in state_indices: where a batch is padded, and for states that are stored nowhere
# 16 tokens at e^-5 span 2^115: the last bound at which a 16-token block stays inside fp32. An integer, because
# torch.compile(dynamic=True) takes a float that it finds in a module for a variable, and then traces twice.
MIN_LOWER_BOUND = -5

GateActivation = Literal["lower_bound", "softplus", "log_decay"]
BetaActivation = Literal["sigmoid", "2sigmoid", "given"]
GATE_ACTIVATIONS, BETA_ACTIVATIONS = get_args(GateActivation), get_args(BetaActivation)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Inputs(NamedTuple):
    """Everything that one call of the chunk operator reads, in the order in which it flattens into the op."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV, K]  gate logits, or the log-decay itself (natural log, <= 0)
    beta: Tensor  # [B, T, HV]     beta logits, or beta itself
    A_log: Tensor | None  # [HV]
    dt_bias: Tensor | None  # [HV, K]
    initial_state: Tensor | None  # [N, HV, V, K]
    cu_seqlens: Tensor | None  # [N + 1] int32 or int64
    gate_activation: str
    lower_bound: float
    beta_activation: str
    qk_l2norm: bool
    scale: float
    final_state: bool
    checkpoint_every: int
    recompute: str = "auto"  # "yes", "no"


class StepInputs(NamedTuple):
    """Everything that one call of the decode operator reads; `state` is also written."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor  # [slots, HV, V, K]
    A_log: Tensor | None
    dt_bias: Tensor | None
    state_indices: Tensor | None  # [N] or [N, T] int32 or int64
    num_accepted: Tensor | None  # [N] int32 or int64
    cu_seqlens: Tensor | None
    gate_activation: str
    lower_bound: float
    beta_activation: str
    qk_l2norm: bool
    scale: float


AnyInputs = TypeVar("AnyInputs", Inputs, StepInputs)


class Gradients(NamedTuple):
    """Gradients of the tensor fields of `Inputs`, same order, shapes and dtypes; None where the input is None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None


@dataclass(frozen=True)
class Problem:
    """What a backend may decide on: no length, no batch size and no tensor, so that a choice can be memoised."""

    device: str
    arch: int  # CUDA compute capability times ten (90 for an H200); 0 on other devices
    dtype: torch.dtype
    beta_dtype: torch.dtype
    K: int
    V: int
    group: int  # HV // H
    gate_activation: str
    beta_activation: str
    qk_l2norm: bool
    step: bool = False
    packed: bool = False
    needs_grad: bool = False
    has_state: bool = False
    checkpoints: bool = False
    narrow_state: bool = False  # of a step: bfloat16, rounded at every call

    def __str__(self) -> str:
        where = f"{self.device} sm_{self.arch}" if self.arch else self.device
        names = ("step", "packed", "needs_grad", "has_state", "checkpoints", "narrow_state")
        flags = [n for n in names if getattr(self, n)]
        return (
            f"{where}, {str(self.dtype).removeprefix('torch.')}, K={self.K}, V={self.V}, HV/H={self.group}, "
            f"gate={self.gate_activation}, beta={self.beta_activation}" + "".join(f", {f}" for f in flags)
        )


class Backend(abc.ABC):
    """One implementation of the operator. One file below `backends/` defines one, as `BACKEND`."""

    name: str
    priority: int  # automatic choice takes the highest that serves the problem
    fused: frozenset[str] = frozenset()  # of {"gate", "beta", "qk_l2norm"}: the rest is applied before the call

    @abc.abstractmethod
    def unsupported(self, problem: Problem) -> list[str]:
        """Every reason why this backend cannot serve `problem`, each 'what it is, what it needs'; empty means yes."""

    def variants(self, arch: str) -> Iterable[tuple[str, Mapping[str, str | int]]]:
        """(source, macros) of every CUDA kernel that it may launch on `arch` ("sm_90a"), for compiling beforehand."""
        return ()

    def replaces(self, x: Inputs) -> tuple[str, ...]:
        """Names of inputs that `chunk_grad` need not see as they came: the first tensors that `chunk` saves, of the
        same shapes and dtypes, are handed to it in their place (and not in `saved`), and the inputs are not kept."""
        return ()

    @abc.abstractmethod
    def saved_like(self, x: Inputs) -> list[Tensor]:
        """Empty tensors with the shapes and dtypes of what `chunk(x, save=True)` saves; must not read any value."""

    @abc.abstractmethod
    def chunk(self, x: Inputs, save: bool) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor]]:
        """(o, final_state or None, checkpoints or None, saved): the whole forward; `saved` is opaque to the caller."""

    @abc.abstractmethod
    def chunk_grad(
        self, x: Inputs, saved: list[Tensor], d_o: Tensor, d_final: Tensor | None, d_checkpoints: Tensor | None
    ) -> Gradients:
        """Gradients of every tensor input, from what the same backend's `chunk` saved (see `replaces`)."""

    @abc.abstractmethod
    def step(self, x: StepInputs) -> Tensor:
        """o [B, T, HV, V]; `x.state` is updated in place, but for sequences without a slot (NO_SLOT), whose o is 0."""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, A_log and dt_bias for inputs of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def state_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes that a caller's states may have for inputs of `dtype`, first the one that they are computed in."""
    wide = state_dtype(dtype)
    return (wide, torch.bfloat16) if dtype in (torch.bfloat16, torch.float16) else (wide,)


def checkpoint_count(x: Inputs) -> int:
    """Rows of checkpoints in a batch row: T // 64, which is also the most that packed sequences can have."""
    return x.q.shape[1] // CHUNK


def sequence_offsets(cu_seqlens: Tensor, T: int) -> list[int]:
    """The offsets of packed sequences as Python integers (a host read), after checking their values."""
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {offsets[0]}")
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        if b < a:
            raise ValueError(f"cu_seqlens must not decrease, got {a} then {b} at positions {n} and {n + 1}")
    if offsets[-1] != T:
        raise ValueError(f"cu_seqlens must end at T = {T}, got {offsets[-1]}")
    return offsets
