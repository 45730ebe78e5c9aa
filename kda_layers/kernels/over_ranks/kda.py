"""`kda` over a sequence that is cut over the ranks of a process group.

A run of tokens is an affine map of the state [V, K]: S_out = S_in P + C, with P [K, K] of each value head. P depends on
k, g and beta alone; C is the state after the run from zero. Every rank computes P and C of its pieces, all ranks gather
all of them, and the state before each piece is a prefix over the pieces before it. Then each piece is an ordinary call
with that initial state.

Backward: with D the gradient of the state after a piece and E the gradient of the state before it by the piece's own
outputs, the gradient of the state before it is E + D P^T. E depends on no other piece. All ranks gather E and P, and D
of each piece is a suffix over the pieces after it. Then each piece is an ordinary backward with D as the gradient of
its final state. P and C themselves need no gradient.

Prefix and suffix are computed in fp64: |P| <= 1, but tf32 would not do.
"""

from __future__ import annotations

import functools
import typing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_offsets, check_scale, sequence_offsets
from ..kda.checks import check_lower_bound, check_recompute, check_values, check_whole
from ..kda.contract import Backend, Gradients, Inputs, KDAOutput, Problem, outputs_like, state_dtypes
from ..kda.dispatch import KDA
from ..kda.reference import activate
from ..operator import Differentiable, Operator
from .shards import Shards, check_contiguous

# The fields of `Inputs`, of this rank's tokens, then the group and the order of its pieces. Offsets are global.
ShardedInputs: Any = typing.cast(Any, NamedTuple)(
    "ShardedInputs", [*typing.get_type_hints(Inputs).items(), ("group", str), ("order", str)]
)


TOKENS = ("q", "k", "v", "g", "beta")  # leading fields, [B, T, ...]


def kda_over_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    shards: Shards,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    gate_activation: str = "lower_bound",
    lower_bound: float | None = None,
    beta_activation: str = "sigmoid",
    qk_l2norm: bool = True,
    scale: float | None = None,
    final_state: bool = False,
    recompute: bool | float | str = "auto",
    backend: str | None = None,
) -> KDAOutput:
    """Run `kda` over sequences that are cut over the ranks of a process group; every rank passes its own tokens.

    All ranks must call it, and its backward, in the same order. Gradients are partial: those of the sum of all ranks'
    losses are the gradients returned for q, k, v, g and beta, which belong to one rank, and the sum over ranks of those
    of A_log, dt_bias and initial_state, as data-parallel training sums them.

    Args:
        q, k, v, g, beta: as in `kda`, [B, T, ...] this rank's tokens; T is the same on all ranks.
        shards: where they lie in the sequence.
        initial_state: [B, HV, V, K], the state before the whole sequence, the same on all ranks; None for zero.
        cu_seqlens: [N + 1] offsets of the sequences packed along the tokens of all ranks (then B = 1), the same on all
            ranks. Only with contiguous shards, and without states.
        A_log, dt_bias, gate_activation, lower_bound, beta_activation, qk_l2norm, scale, recompute, backend: as in
            `kda`.
        final_state: also return the state after the whole sequence, on all ranks.

    Returns:
        KDAOutput: o [B, T, HV, V] of this rank's tokens; final_state [B, HV, V, K] or None; no checkpoints.

    Raises:
        TypeError, ValueError: as `kda`; T is no multiple of the number of pieces; packed sequences with states or with
            shards that are not contiguous.
    """
    if not isinstance(shards, Shards):
        raise TypeError(f"shards must be a Shards, such as Shards.contiguous(group), got {type(shards).__name__}")
    x = ShardedInputs(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,
        gate_activation, check_lower_bound(gate_activation, lower_bound), beta_activation, bool(qk_l2norm),
        check_scale(q, scale), bool(final_state), 0, check_recompute(recompute), shards.group, shards.order,
    )  # fmt: skip
    check_whole(_inputs(x)._replace(cu_seqlens=None))
    _check_cut(x, shards)
    needs_grad = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in x)
    with_state = _inputs(x)._replace(initial_state=q)  # every piece has one; no value is read
    name, *fused = KDA.choose(backend, q.device, *Problem.fields_of(with_state, needs_grad))
    check_values(_inputs(x)._replace(cu_seqlens=None))
    if initial_state is not None:
        x = x._replace(initial_state=initial_state.to(state_dtypes(q.dtype)[0]))
    out = _kda_over_ranks(activate(x, fused), needs_grad, name)
    if out.final_state is None or initial_state is None:
        return out
    return out._replace(final_state=out.final_state.to(initial_state.dtype))


def _check_cut(x: Any, shards: Shards) -> None:
    T = x.q.shape[1]
    if T == 0 or T % shards.pieces:
        raise ValueError(f"q must have as many tokens in each of {shards.pieces} pieces and at least one, got T = {T}")
    if x.cu_seqlens is None:
        return
    check_offsets(x.cu_seqlens, x.q)
    check_contiguous(shards)
    for name, given in (("initial_state", x.initial_state is not None), ("final_state", x.final_state)):
        if given:
            raise ValueError(f"{name} must not be given with cu_seqlens over ranks: packed sequences start from zero")
    if x.cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():  # no wait for a device
        sequence_offsets(x.cu_seqlens, len(shards.places) * T)


def _inputs(x: Any) -> Inputs:
    """The fields of `Inputs` as they are."""
    return Inputs._make(x[: len(Inputs._fields)])


# ---------------------------------------------------------------- the pieces of this rank


class _Rows:
    """Pieces of sequences in rows: rows [B, T] are seen as [B pieces, T / pieces], all views."""

    def __init__(self, x: Any, shards: Shards):
        self.shards, self.B, self.pieces = shards, x.q.shape[0], shards.pieces
        per_token = {n: t.reshape(self.B * self.pieces, -1, *t.shape[2:]) for n, t in zip(TOKENS, x, strict=False)}
        self.inputs = _inputs(x)._replace(**per_token, initial_state=None, final_state=True)

    def of_pieces(self, t: Tensor) -> Tensor:
        """A tensor of the rows [B pieces, ...] for each piece, [pieces, B, ...]."""
        return t.unflatten(0, (self.B, self.pieces)).transpose(0, 1)

    def of_rows(self, t: Tensor) -> Tensor:
        return t.transpose(0, 1).flatten(0, 1).contiguous()

    def maps(self, P: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        """Maps of the state that is handed on, [pieces, B, HV, ., K], of those of all local sequences."""
        return self.of_pieces(P), self.of_pieces(C)

    def initial(self, before: Tensor) -> Tensor:
        """Initial states of the local sequences from the states handed on, [pieces, B, HV, V, K]."""
        return self.of_rows(before)

    def handed_on(self, gradient: Tensor) -> Tensor:
        """Gradients of the states handed on from those of all initial states."""
        return self.of_pieces(gradient)

    def final(self, after: Tensor) -> Tensor:
        """Gradients of all final states from those of the states that this rank hands on."""
        return self.of_rows(after)


class _Packed:
    """A slice of packed sequences: every sequence keeps its number; those of other ranks are empty.

    Of a slice only the first sequence may continue. Every slice hands on the state of its last one; the next slice
    drops it unless its own first one continues.
    """

    def __init__(self, x: Any, shards: Shards):
        self.shards, T, offsets = shards, x.q.shape[1], x.cu_seqlens
        start = shards.rank * T
        ends = offsets.new_tensor([start, start + T - 1])
        places = torch.searchsorted(offsets, ends, right=True) - 1
        self.first, self.last = places.unbind()
        # `through`: the last one began before this slice. An index tensor of no dimension would make the host wait.
        self.continues, self.through = (offsets.index_select(0, places) < start).unbind()
        local = (offsets - start).clamp(0, T)
        self.inputs = _inputs(x)._replace(cu_seqlens=local, initial_state=None, final_state=True)
        self.N = offsets.shape[0] - 1

    def maps(self, P: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        P, C = P.index_select(0, self.last[None]), C.index_select(0, self.last[None])
        return P.masked_fill(~self.through, 0)[None], C[None]

    def initial(self, before: Tensor) -> Tensor:
        return self._placed(before.masked_fill(~self.continues, 0), self.first)

    def handed_on(self, gradient: Tensor) -> Tensor:
        return gradient.index_select(0, self.first[None]).masked_fill(~self.continues, 0)[None]

    def final(self, after: Tensor) -> Tensor:
        return self._placed(after, self.last)

    def _placed(self, state: Tensor, index: Tensor) -> Tensor:
        """Return states [N, HV, V, K] of zeros but for one sequence's, [1, 1, HV, V, K]."""
        return state.new_zeros(self.N, *state.shape[2:]).index_copy_(0, index[None].long(), state[0])


# ---------------------------------------------------------------- the operator


class OverRanks(Differentiable):
    """A backend of `kda`, over ranks."""

    def __init__(self, inner: Backend):
        self.inner = inner

    def replaces(self, x: Any) -> tuple[str, ...]:
        return self.inner.replaces(_inputs(x))

    def saved_like(self, x: Any) -> list[Tensor]:
        local = _cut(x).inputs
        (HV, V), K = x.v.shape[2:], x.q.shape[3]
        N = local.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
        P = x.q.new_empty(Shards.read(x.group, x.order).pieces, x.q.shape[0], HV, K, K, dtype=_wide(x))
        initial = x.q.new_empty(N, HV, V, K, dtype=_wide(x))
        local = local._replace(initial_state=initial, final_state=False)
        return self._packed(x, self.inner.saved_like(local), P, initial)

    def forward(self, x: Any, save: bool) -> tuple[KDAOutput, list[Tensor]]:
        cut = _cut(x)
        P, C = cut.maps(*self.inner.affine_map(cut.inputs))
        V = C.shape[-2]
        gathered = [t.double() for t in cut.shards.gathered(torch.cat((C, P), -2))]
        state = torch.zeros_like(gathered[0][..., :V, :]) if x.initial_state is None else x.initial_state.double()
        before = []
        for both in gathered:
            before.append(state)
            state = _mapped(state, both[..., V:, :]) + both[..., :V, :]
        initial = cut.initial(cut.shards.own(before).to(_wide(x)))
        out, saved = self.inner.forward(cut.inputs._replace(initial_state=initial, final_state=False), save)
        final = state.to(_wide(x)) if x.final_state else None
        if save:
            saved = self._packed(x, saved, P.contiguous(), initial)
        return KDAOutput(out.o.view(x.v.shape), final, None), saved

    def backward(self, x: Any, saved: list[Tensor], d_o: Tensor, d_final: Tensor | None, _: Any) -> Gradients:
        (P, initial), saved, cut = saved[:2], saved[2:], _cut(x)
        shards = cut.shards
        local = cut.inputs._replace(initial_state=initial, final_state=False)
        d_o = d_o.reshape(local.v.shape)
        E = cut.handed_on(self.inner.initial_gradient(local, saved, d_o))
        V = E.shape[-2]
        gathered = [t.double() for t in shards.gathered(torch.cat((E, P), -2))]
        state = torch.zeros_like(gathered[0][..., :V, :])
        if x.final_state:  # each rank's loss may read it, and which do, only they know
            mine = torch.zeros_like(state, dtype=_wide(x)) if d_final is None else d_final
            state = shards.everyones(mine).double().sum(0)
        after: list[Tensor] = []
        for both in reversed(gathered):
            after.insert(0, state)
            state = both[..., :V, :] + _mapped(state, both[..., V:, :].mT)
        grads = self.inner.backward(local, saved, d_o, cut.final(shards.own(after).to(_wide(x))), None)
        tokens: dict[str, Any] = {n: getattr(grads, n).reshape(getattr(x, n).shape) for n in TOKENS}
        d_initial = None
        if x.initial_state is not None:
            begins = 0 in shards.places[shards.rank]  # a sum over ranks counts it once
            d_initial = state.to(_wide(x)) if begins else torch.zeros_like(x.initial_state)
        return grads._replace(**tokens, initial_state=d_initial)

    def _packed(self, x: Any, saved: list[Tensor], P: Tensor, initial: Tensor) -> list[Tensor]:
        """What is saved, with the tensors that replace inputs first and of their shapes."""
        names = self.replaces(x)
        replacing = [t.reshape(getattr(x, n).shape) for n, t in zip(names, saved, strict=False)]
        return [*replacing, P, initial, *saved[len(names) :]]


def _cut(x: Any) -> _Rows | _Packed:
    return (_Rows if x.cu_seqlens is None else _Packed)(x, Shards.read(x.group, x.order))


def _mapped(state: Tensor, P: Tensor) -> Tensor:
    """Return state @ P, but 0 where P is 0: NaN and inf must not reach a sequence that begins inside the piece."""
    return (state @ P).masked_fill((P == 0).all(-1).all(-1)[..., None, None], 0)


def _wide(x: Any) -> torch.dtype:
    return state_dtypes(x.q.dtype)[0]


class _Backends:
    """The backends of `kda`, over ranks, by name."""

    @functools.cache  # noqa: B019  (one object)
    def backend(self, name: str) -> OverRanks:
        return OverRanks(KDA.backend(name))


_kda_over_ranks: Operator[Any, KDAOutput] = Operator(
    "kda_over_ranks",
    ShardedInputs,
    KDAOutput,
    Gradients,
    _Backends(),
    lambda x: outputs_like(_inputs(x)),
)
