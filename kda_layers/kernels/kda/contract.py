"""The contract between the operator and its backends: inputs, problem, the backend base class and the registry.

Sizes in shapes, in every file of this folder:

    B batch     T tokens    N sequences (B, or len(cu_seqlens) - 1 when packed)
    H q/k heads    HV value heads, a multiple of H; value head i reads q/k head i // (HV // H)
    K key width    V value width
    G gates of a head: K, one for each key channel, or 1 for all of them

Callers pass gates of heads without the dimension G, g [B, T, HV] and dt_bias [HV]. `reference.activate`, which every
call passes before its backend, adds it, and repeats the gates for each channel unless the backend lists HEAD_GATES.

Backends get inputs that `checks.py` has accepted; they check only values that need a host read (`sequence_offsets`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..checks import accumulator_dtype as state_dtype
from ..declarations import Allowed, OneOf, best_device, one_of
from ..declarations import Problem as AnyProblem
from ..operator import Differentiable
from ..registry import Registry
from .activations import BETA_CODES, GATE_CODES

CHUNK = 64  # tokens of a chunk, and between two state checkpoints
MOST_SAVED = 0.01  # share of the device's memory that one call may save with recompute="auto"
SEGMENTS = ("never", "auto", "always")
NO_SLOT = -1  # in state_indices: a padded row, or a state that is not stored
MOST_DRAFTED = 16  # tokens of a sequence in one call of `kda_verify`
HEAD_GATES = "head_gates"  # in `Backend.fused`: it takes gates with G = 1


class Inputs(NamedTuple):
    """The arguments of the op of `kda`, in its order."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV, G]  gate logits, or the log-decay itself (natural log, <= 0)
    beta: Tensor  # [B, T, HV]     beta logits, or beta itself
    A_log: Tensor | None  # [HV]
    dt_bias: Tensor | None  # [HV, G]
    initial_state: Tensor | None  # [N, HV, V, K]
    cu_seqlens: Tensor | None  # [N + 1] int32 or int64
    gate_activation: str
    lower_bound: float
    beta_activation: str
    qk_l2norm: bool
    scale: float
    final_state: bool
    checkpoint_every: int
    recompute_above: float = MOST_SAVED  # share of the device's memory: 0.0 to recompute always, 1.0 never
    segments: str = "never"  # one of SEGMENTS
    fine_gradients: bool = False  # v's and beta's with more bits, as gradients of the final state need

    @property
    def checkpoint_count(self) -> int:
        """Number of checkpoints of a batch row, T // 64; packed sequences have at most as many."""
        return self.q.shape[1] // CHUNK


class DecodeInputs(NamedTuple):
    """The arguments of the ops of `kda_step`, which write `state`, `state_scale` and `out`, and of `kda_verify`.

    With `updates` they are those of `kda_verify`: it writes `updates` and `out`, and `state` only where tokens of the
    last call were accepted.
    """

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
    state_scale: Tensor | None  # [slots, HV, V] of an int8 state
    out: Tensor | None  # [B, T, HV, V] contiguous, or None: a new tensor is returned
    updates: Tensor | None  # [slots, tokens, HV, 2 K + V]: decay [K], key [K] and error [V] of each drafted token
    update_indices: Tensor | None  # [N] int32 or int64, slots of updates; None: those of state
    initial_state: Tensor | None  # [slots, HV, V, K], read in place of `state`, which is then only written
    initial_indices: Tensor | None  # [N] int32 or int64, slots of initial_state
    gate_activation: str
    lower_bound: float
    beta_activation: str
    qk_l2norm: bool
    scale: float


class CommitInputs(NamedTuple):
    """The arguments of the op of `kda_commit`, which writes `state`."""

    state: Tensor  # [slots, HV, V, K]
    updates: Tensor  # [slots, tokens, HV, 2 K + V]
    num_accepted: Tensor  # [N] int32 or int64
    state_indices: Tensor | None  # [N] int32 or int64
    update_indices: Tensor | None  # [N] int32 or int64, slots of updates; None: those of state
    initial_indices: Tensor | None  # [N] int32 or int64, slots of state that are read; None: those that are written


class PrefillInputs(NamedTuple):
    """The arguments of the op of `kda_prefill`, which writes `o`, `state` and `checkpoints`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    o: Tensor  # [B, T, HV, V]
    state: Tensor | None  # [slots, HV, V, K], or [N, HV, V, K] without state_indices; None: zero and not kept
    checkpoints: Tensor | None  # [N, HV, V, K]
    A_log: Tensor | None
    dt_bias: Tensor | None
    state_indices: Tensor | None  # [N] int32 or int64
    checkpoint_at: Tensor | None  # [N] int32 or int64
    cu_seqlens: Tensor | None
    gate_activation: str
    lower_bound: float
    beta_activation: str
    qk_l2norm: bool
    scale: float


AnyInputs = TypeVar("AnyInputs", Inputs, DecodeInputs, PrefillInputs)


class KDAOutput(NamedTuple):
    """Outputs of `kda`."""

    o: Tensor  # [B, T, HV, V] in v's dtype
    final_state: Tensor | None  # [N, HV, V, K] in the states' dtype
    checkpoints: Tensor | None  # [B, T // 64, HV, V, K] in the states' dtype


class PrefillOutput(NamedTuple):
    """Outputs of `kda_prefill`."""

    o: Tensor  # [B, T, HV, V] in v's dtype
    checkpoints: Tensor | None  # [N, HV, V, K] in fp32 (fp64 for fp64 inputs)


class Gradients(NamedTuple):
    """Gradients of the leading fields of `Inputs`, same shapes and dtypes; None where the input is None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None


@dataclass(frozen=True)
class Problem(AnyProblem):
    """The properties of a call of one of the operators that decide on its backend."""

    beta_dtype: torch.dtype
    K: int
    V: int
    group: int  # HV // H
    gate_activation: str
    beta_activation: str
    qk_l2norm: bool
    decode: bool = False
    packed: bool = False
    needs_grad: bool = False
    has_state: bool = False
    checkpoints: bool = False
    bf16_state: bool = False  # of a decode step
    int8_state: bool = False  # of a decode step
    segments: bool = False  # always
    prefill: bool = False  # of an engine, in place
    verify: bool = False  # of drafts, or their commit
    head_gates: bool = False  # g is [B, T, HV]

    LACKS = {  # noqa: RUF012
        "decode": "decodes, needs whole sequences",
        "packed": "sequences are packed, needs cu_seqlens=None",
        "needs_grad": "gradients are needed, needs torch.no_grad()",
        "has_state": "has an initial state, needs None",
        "checkpoints": "checkpoints are asked for, needs checkpoint_every=0",
        "bf16_state": "state is bfloat16, needs float32",
        "int8_state": "state is int8, needs float32",
        "segments": "segments is 'always', needs 'never' or 'auto'",
        "prefill": "prefills states in place, needs kda with return_final_state=True",
        "verify": "verifies drafts without a state for each, needs kda_step with state_indices [N, T]",
    }

    @classmethod
    def default(cls, device: str | None = None) -> Problem:
        """A training step of a layer of the default configuration in bf16, on `device` or the best one here."""
        bf16 = torch.bfloat16
        return cls(*best_device(device), bf16, bf16, 128, 128, 1, "lower_bound", "sigmoid", True, needs_grad=True)

    @staticmethod
    def fields_of(x: Inputs | DecodeInputs | PrefillInputs | CommitInputs, needs_grad: bool = False) -> tuple[Any, ...]:
        if isinstance(x, CommitInputs):  # the inputs of the tokens are gone: a commit depends on none of their dtypes
            dtype = torch.float64 if x.state.dtype == torch.float64 else torch.bfloat16
            K, V = x.state.shape[3], x.state.shape[2]
            sizes = operator.index(K), operator.index(V), 1
            flags = True, False, False, True, False, x.state.dtype == torch.bfloat16, False, False, False, True
            return dtype, dtype, *sizes, "log_decay", "given", False, *flags
        if isinstance(x, DecodeInputs):
            decode, has_state, checkpoints, narrow = True, True, False, x.state.dtype
        elif isinstance(x, PrefillInputs):
            decode, has_state, narrow = False, x.state is not None, None
            checkpoints = x.checkpoint_at is not None
        else:
            decode, has_state, narrow = False, x.initial_state is not None, None
            checkpoints = operator.index(x.checkpoint_every) > 0
        (*_, H, K), (*_, HV, V), index = x.q.shape, x.v.shape, operator.index
        return (
            x.q.dtype, x.beta.dtype, index(K), index(V), index(HV) // index(H), x.gate_activation, x.beta_activation,
            x.qk_l2norm, decode, x.cu_seqlens is not None, needs_grad, has_state, checkpoints,
            narrow == torch.bfloat16, narrow == torch.int8, isinstance(x, Inputs) and x.segments == "always",
            isinstance(x, PrefillInputs), isinstance(x, DecodeInputs) and x.updates is not None, x.g.ndim == 3,
        )  # fmt: skip

    @property
    def widths(self) -> tuple[int, int]:
        return self.K, self.V

    def details(self) -> list[str]:
        sizes = f"K={self.K}", f"V={self.V}", f"HV/H={self.group}"
        gate = f"gate={self.gate_activation}{' of a head' if self.head_gates else ''}"
        return [*sizes, gate, f"beta={self.beta_activation}"]


ALL_FEATURES = frozenset(Problem.LACKS)


class Widths(Allowed):
    """K = V of some widths."""

    def __init__(self, *values: int):
        self.values = values

    def refuses(self, value: tuple[int, int]) -> str | None:
        K, V = value
        if K == V and K in self.values:
            return None
        return f"are K = {K} and V = {V}, needs {one_of([f'both {n}' for n in self.values])}"


class Names(OneOf):
    """Names of gates or betas; unknown ones raise."""

    def __init__(self, *names: str):
        super().__init__(*names)
        if unknown := set(names) - {*GATE_CODES, *BETA_CODES}:
            raise ValueError(f"names must be of kda/activations.py, got {', '.join(sorted(unknown))}")


class Backend(Differentiable):
    """One implementation of `kda` (`forward`, `backward`), `kda_prefill` (`prefill`), `kda_step` (`decode`), and
    `kda_verify` and `kda_commit` (`verify`, `commit`)."""

    NEEDED_BY: ClassVar[Mapping[str, str]] = {
        "forward": "", "saved_like": "needs_grad", "backward": "needs_grad", "prefill": "prefill", "decode": "decode",
        "verify": "verify", "commit": "verify",
    }  # fmt: skip
    fused: frozenset[str] = frozenset()  # of {"gate", "beta", "qk_l2norm", HEAD_GATES}: others are applied before

    def notes(self, problem: Problem) -> list[str]:
        """See `declarations.Backend.notes`."""
        repeats = problem.head_gates and HEAD_GATES not in self.fused
        return ["the gate of a head is repeated for every key channel first"] if repeats else []

    def backward(
        self, x: Inputs, saved: list[Tensor], d_o: Tensor, d_final: Tensor | None, d_checkpoints: Tensor | None
    ) -> Gradients:
        """See `Differentiable.backward`."""
        raise NotImplementedError

    def backward_handing_on(
        self, x: Inputs, saved: list[Tensor], d_o: Tensor, d_final: Tensor, hand_on: Callable[[Tensor], None]
    ) -> Gradients:
        """`backward`, which calls `hand_on` with the gradient of the initial state as soon as it is computed."""
        grads = self.backward(x, saved, d_o, d_final, None)
        assert grads.initial_state is not None, "x has an initial state"
        hand_on(grads.initial_state)
        return grads

    def affine_map(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return P [N, HV, K, K] and C [N, HV, V, K]: each sequence maps an initial state S to the final S P + C.

        Args:
            x: inputs without an initial state, with final_state.
        """
        N, HV, _, K = state_shape(x)
        one = torch.eye(K, dtype=state_dtype(x.q.dtype), device=x.q.device).expand(N, HV, K, K).contiguous()
        without_values = x._replace(v=x.v.new_zeros(*x.v.shape[:3], K), initial_state=one)
        P, C = (self.forward(inputs, False)[0].final_state for inputs in (without_values, x))
        assert P is not None
        assert C is not None
        return P, C

    def initial_gradient(self, x: Inputs, saved: list[Tensor], d_o: Tensor) -> Tensor:
        """Return the gradient of the initial state [N, HV, V, K] by the outputs alone; arguments as of `backward`."""
        d_initial = self.backward(x, saved, d_o, None, None).initial_state
        assert d_initial is not None, "x has an initial state"
        return d_initial

    def prefill(self, x: PrefillInputs) -> None:
        """Run `forward` from and into `x.state`, without a host read; see `slots.prefill_by_forward`.

        Sequences without a slot (NO_SLOT) get o = 0. Rows of `x.checkpoints`, which come as zeros, stay so where
        checkpoint_at is no boundary of the sequence.
        """
        raise NotImplementedError

    def decode(self, x: DecodeInputs) -> Tensor:
        """Return o [B, T, HV, V], which is `x.out` if that is given, and update `x.state` in place.

        Sequences without a slot (NO_SLOT) get o = 0.
        """
        raise NotImplementedError

    def verify(self, x: DecodeInputs) -> Tensor:
        """Commit what was accepted as `commit` does, then return o of the new tokens and write their `x.updates`.

        Sequences without a slot (NO_SLOT) get o = 0. States and updates of a token have the bits of `decode`.
        """
        raise NotImplementedError

    def commit(self, x: CommitInputs) -> None:
        """Advance `x.state` in place by the first `num_accepted` tokens of `x.updates`, with the bits of `decode`."""
        raise NotImplementedError

    def repeated_decode(self, x: DecodeInputs) -> Callable[[DecodeInputs], Tensor]:
        """Return `decode` for inputs that differ from `x` only in the addresses and values of tensors."""
        return self.decode


def state_shape(x: Inputs | DecodeInputs | PrefillInputs) -> tuple[int, int, int, int]:
    """[N, HV, V, K] of the states of the sequences of a call."""
    N = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    return N, x.v.shape[2], x.v.shape[3], x.q.shape[3]


def state_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes of states that go with inputs of `dtype`, first the one in which they are computed."""
    wide = state_dtype(dtype)
    return (wide,) if wide == torch.float64 else (wide, torch.bfloat16)


def outputs_like(x: Inputs) -> KDAOutput:
    """Unwritten outputs; reads no value."""
    (N, *state), B, dtype = state_shape(x), x.q.shape[0], state_dtype(x.q.dtype)
    final = x.q.new_empty(N, *state, dtype=dtype) if x.final_state else None
    checkpoints = x.q.new_empty(B, x.checkpoint_count, *state, dtype=dtype) if x.checkpoint_every else None
    return KDAOutput(x.v.new_empty(x.v.shape), final, checkpoints)


KDA: Registry[Problem, Backend] = Registry(
    "kda", __package__, Problem, lambda b: (b.name, *sorted(b.fused)), kind=Backend
)
default_problem, problem_of = Problem.default, KDA.problem_of
