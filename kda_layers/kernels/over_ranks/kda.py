"""`kda` over a sequence that is cut over the ranks of a process group.

A slice of tokens is an affine map of the state [V, K], its transition: S_out = S_in P + C, with P [K, K] of each value
head. P depends on k, g and beta alone; C is the state after the slice from zero. There are two ways to the state before
each piece:

* A chain: the rank of the piece before sends the state after it. Nothing is computed twice, and the results are those
  of one rank bit by bit if pieces are full chunks. A rank is a scan over its slice behind the one before, once for all
  layers that follow each other, as ranks ahead do not wait for those behind.
* To gather: every rank computes P and C of its pieces, all ranks gather all of them, and the state before each piece is
  a prefix over the pieces before it. No rank waits for another one's scan, but every piece is scanned twice.

Then each piece is an ordinary call with that initial state.

Backward, with D the gradient of the state after a piece. Chain: the gradient of the state before the piece goes to the
rank of the piece before, as soon as the scan has it. To gather: with E the gradient of the state before a piece by its
own outputs, the sum is E + D P^T. E depends on no other piece. All ranks gather E and P, and D of each piece is a
suffix over the pieces after it. Then each piece is an ordinary backward with D as the gradient of its final state. P
and C themselves need no gradient.

Prefix and suffix are computed in fp64: |P| <= 1, but tf32 would not do.
"""

from __future__ import annotations

import typing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_offsets, check_scale, sequence_offsets
from ..deprecation import new_keywords
from ..kda.checks import check_recompute, check_values, check_whole, gate_bound
from ..kda.contract import KDA, Backend, Gradients, Inputs, KDAOutput, Problem, outputs_like, state_dtypes
from ..kda.reference import activate
from ..operator import Differentiable, NoGradOperator, Operator
from ..tracing import may_run_again, needs_gradients
from .shards import Shards, Wrapped, check_chain, check_contiguous

TOKENS = ("q", "k", "v", "g", "beta")  # leading fields of `Inputs`, [B, T, ...]
HINTS: dict[str, Any] = typing.get_type_hints(Inputs)
TENSORS = [(name, kind) for name, kind in HINTS.items() if kind in (Tensor, Tensor | None)]
OPTIONS = [(name, kind) for name, kind in HINTS.items() if (name, kind) not in TENSORS]
PLACE = [("group", str), ("order", str)]
# The fields of `Inputs`, of this rank's tokens, the group and the order of its pieces. Offsets are global.
LocalInputs: Any = typing.cast(Any, NamedTuple)("LocalInputs", [*TENSORS, *OPTIONS, *PLACE])
# The same with what ranks exchanged, and if this one hands its last state on in a chain, as it does not in a
# recomputation.
ShardedInputs: Any = typing.cast(Any, NamedTuple)(
    "ShardedInputs", [*TENSORS, ("exchanged", Tensor), *OPTIONS, *PLACE, ("hands_on", bool)]
)


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
    return_final_state: bool = False,
    recompute: str = "auto",
    memory_share: float | None = None,
    backend: str | None = None,
    final_state: bool | None = None,
) -> KDAOutput:
    """Run `kda` over sequences that are cut over the ranks of a process group; every rank passes its own tokens.

    All ranks must call it, and its backward, in the same order. Gradients are partial: those of the sum of all ranks'
    losses are the gradients returned for q, k, v, g and beta, which belong to one rank, and the sum over ranks of those
    of A_log, dt_bias and initial_state, as data-parallel training sums them.

    Args:
        q, k, v, g, beta: as in `kda`, [B, T, ...] this rank's tokens; T is the same on all ranks.
        shards: where they lie in the sequence.
        initial_state: [B, HV, V, K], the state before the full sequence, the same on all ranks; None for zero.
        cu_seqlens: [N + 1] offsets of the sequences packed along the tokens of all ranks (then B = 1), the same on all
            ranks. Only with contiguous shards, and without states.
        A_log, dt_bias, gate_activation, lower_bound, beta_activation, qk_l2norm, scale, recompute, memory_share,
            backend: as in `kda`.
        return_final_state: also return the state after the full sequence, on all ranks.
        final_state: deprecated, the old name of return_final_state.

    Returns:
        KDAOutput: o [B, T, HV, V] of this rank's tokens; final_state [B, HV, V, K] or None; no checkpoints.

    Raises:
        TypeError, ValueError: as `kda`; T is no multiple of the number of pieces; a chain with several pieces for each
            rank; packed sequences with states or with shards that are not contiguous.
    """
    if not isinstance(shards, Shards):
        raise TypeError(f"shards must be a Shards, such as Shards.contiguous(group), got {type(shards).__name__}")
    if final_state is not None:
        if return_final_state:
            raise TypeError("kda_over_ranks() got return_final_state under its old name, too")
        return_final_state = new_keywords("kda", dict(final_state=final_state))["return_final_state"]
    kept = check_recompute(recompute, memory_share)
    x = LocalInputs(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,
        gate_activation, gate_bound(gate_activation, lower_bound), beta_activation, bool(qk_l2norm),
        check_scale(q, scale), bool(return_final_state), 0, 0.0 if may_run_again() else kept, "never",
        bool(return_final_state), shards.group, shards.order,
    )  # fmt: skip
    check_whole(inputs_of(x)._replace(cu_seqlens=None))
    _check_cut(x, shards)
    needs_grad = needs_gradients(x)
    with_state = inputs_of(x)._replace(initial_state=q)  # every piece has one; no value is read
    name, *fused = KDA.choose(backend, q.device, *Problem.fields_of(with_state, needs_grad))
    check_values(inputs_of(x)._replace(cu_seqlens=None))
    if initial_state is not None:
        x = x._replace(initial_state=initial_state.to(state_dtypes(q.dtype)[0]))
    x = activate(x, fused)
    known = None if return_final_state else shards.recall("kda")
    if known is None:
        with torch.no_grad():
            exchanged = _states_before(x, name)
        shards.remember("kda", exchanged)
    else:
        exchanged = known
    sharded = ShardedInputs(**x._asdict(), exchanged=exchanged, hands_on=known is None)
    out = _kda_over_ranks(sharded, needs_grad, name)
    if out.final_state is None or initial_state is None:
        return out
    return out._replace(final_state=out.final_state.to(initial_state.dtype))


def _check_cut(x: Any, shards: Shards) -> None:
    T = x.q.shape[1]
    check_chain(shards)
    if T == 0 or T % shards.pieces:
        raise ValueError(f"q must have as many tokens in each of {shards.pieces} pieces and at least one, got T = {T}")
    if x.cu_seqlens is None:
        return
    check_offsets(x.cu_seqlens, x.q)
    check_contiguous(shards)
    for name, given in (("initial_state", x.initial_state is not None), ("return_final_state", x.final_state)):
        if given:
            raise ValueError(f"{name} must not be given with cu_seqlens over ranks: packed sequences start from zero")
    if x.cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():  # no wait for a device
        sequence_offsets(x.cu_seqlens, len(shards.places) * T)


def cut_of(x: Any) -> Rows | Packed:
    """Return the pieces of this rank.

    Args:
        x: the fields of `Inputs` with this rank's tokens and offsets over all ranks; `group`, `order` of its `Shards`.
    """
    return (Rows if x.cu_seqlens is None else Packed)(x, Shards.read(x.group, x.order))


def inputs_of(x: Any) -> Inputs:
    """The fields of `Inputs` as they are."""
    return Inputs(**{name: getattr(x, name) for name in Inputs._fields})


class Rows:
    """Pieces of sequences in rows: rows [B, T] are seen as [B pieces, T / pieces], all views."""

    def __init__(self, x: Any, shards: Shards):
        self.shards, self.B, self.pieces = shards, x.q.shape[0], shards.pieces
        self.N = self.B * self.pieces
        per_token = {n: t.reshape(self.B * self.pieces, -1, *t.shape[2:]) for n, t in zip(TOKENS, x, strict=False)}
        self.inputs = inputs_of(x)._replace(**per_token, initial_state=None, final_state=True)

    def of_pieces(self, t: Tensor) -> Tensor:
        """A tensor of the rows [B pieces, ...] for each piece, [pieces, B, ...]."""
        return t.unflatten(0, (self.B, self.pieces)).transpose(0, 1)

    def of_rows(self, t: Tensor) -> Tensor:
        return t.transpose(0, 1).flatten(0, 1).contiguous()

    # The states that this rank passes on, [pieces, B, HV, V, K], from those after all local sequences, and the initial
    # states of these from what is passed on. In the backward the same of gradients, passed on the other way.
    last = passed_on = of_pieces
    initial = final = of_rows

    def transitions(self, P: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        """Transitions that are passed on, [pieces, B, HV, ., K], of those of all local sequences."""
        return self.of_pieces(P), self.of_pieces(C)


class Packed:
    """A slice of packed sequences: every sequence keeps its number; those of other ranks are empty.

    Of a slice only the first sequence may continue. Every slice hands on the state of its last one; the next slice
    drops it unless its own first one continues.
    """

    def __init__(self, x: Any, shards: Shards):
        self.shards, T, offsets = shards, x.q.shape[1], x.cu_seqlens
        start = shards.rank * T
        ends = offsets.new_tensor([start, start + T - 1])
        places = torch.searchsorted(offsets, ends, right=True) - 1
        self.first_one, self.last_one = places.unbind()
        # `through`: the last one began before this slice. An index tensor of no dimension would make the host wait.
        self.continues, self.through = (offsets.index_select(0, places) < start).unbind()
        local = (offsets - start).clamp(0, T)
        self.inputs = inputs_of(x)._replace(cu_seqlens=local, initial_state=None, final_state=True)
        self.N = offsets.shape[0] - 1

    def transitions(self, P: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        P, C = P.index_select(0, self.last_one[None]), self.last(C)
        return P.masked_fill(~self.through, 0)[None], C

    def last(self, final: Tensor) -> Tensor:
        return final.index_select(0, self.last_one[None])[None]

    def initial(self, before: Tensor) -> Tensor:
        return self._placed(before.masked_fill(~self.continues, 0), self.first_one)

    def passed_on(self, gradient: Tensor) -> Tensor:
        return gradient.index_select(0, self.first_one[None]).masked_fill(~self.continues, 0)[None]

    def final(self, after: Tensor) -> Tensor:
        return self._placed(after, self.last_one)

    def _placed(self, state: Tensor, index: Tensor) -> Tensor:
        """Return states [N, HV, V, K] of zeros but for one sequence's, [1, 1, HV, V, K]."""
        return state.new_zeros(self.N, *state.shape[2:]).index_copy_(0, index[None].long(), state[0])


class OverRanks(Differentiable):
    """A backend of `kda`, over ranks."""

    def __init__(self, inner: Backend):
        self.inner = inner

    def replaces(self, x: Any) -> tuple[str, ...]:
        return self.inner.replaces(inputs_of(x))

    def saved_like(self, x: Any) -> list[Tensor]:
        cut = cut_of(x)
        initial = x.q.new_empty(cut.N, *_state_shape(x)[1:], dtype=_wide(x))
        saved = self.inner.saved_like(cut.inputs._replace(initial_state=initial, final_state=cut.shards.chain))
        return self._with_shapes(x, saved)

    def states_before(self, x: Any) -> Tensor:
        """Return what ranks tell each other before a forward.

        Returns:
            In a chain the state before this rank's piece, [1, B, HV, V, K]. Else [pieces + 1, B, HV, V + K, K], the
            states before the pieces and below them their P, and last the state after the full sequence.
        """
        shards = Shards.read(x.group, x.order)
        if shards.chain:
            first = shards.neighbour(-1) is None and x.initial_state is not None
            return x.initial_state[None].clone() if first else shards.receive(states_before_like(x), -1)
        cut = cut_of(x)
        P, C = cut.transitions(*self.inner.affine_map(cut.inputs))
        V = C.shape[-2]
        gathered = [t.double() for t in shards.gathered(torch.cat((C, P), -2))]
        state = torch.zeros_like(gathered[0][..., :V, :]) if x.initial_state is None else x.initial_state.double()
        before = []
        for both in gathered:
            before.append(state)
            state = _mapped(state, both[..., V:, :]) + both[..., :V, :]
        mine = torch.cat((shards.own(before).to(P.dtype), P), -2)
        return torch.cat((mine, torch.cat((state.to(P.dtype), torch.zeros_like(P[0])), -2)[None]))

    def forward(self, x: Any, save: bool) -> tuple[KDAOutput, list[Tensor]]:
        cut, V = cut_of(x), x.v.shape[3]
        chain = cut.shards.chain
        out, saved = self.inner.forward(_local(x, cut), save)
        final = x.exchanged[-1, ..., :V, :].clone(memory_format=torch.contiguous_format) if x.final_state else None
        if chain:
            after = cut.last(out.final_state)
            if x.hands_on:
                cut.shards.send(after, 1)
            if x.final_state:
                final = cut.shards.gathered(after)[-1].clone()
        return KDAOutput(out.o.view(x.v.shape), final, None), self._with_shapes(x, saved) if save else []

    def backward(self, x: Any, saved: list[Tensor], d_o: Tensor, d_final: Tensor | None, _: Any) -> Gradients:
        cut = cut_of(x)
        shards, local = cut.shards, _local(x, cut)
        d_o, end = d_o.reshape(local.v.shape), None
        if x.final_state:  # each rank's loss may read it, and which do, only they know
            mine = d_o.new_zeros(_state_shape(x), dtype=_wide(x)) if d_final is None else d_final
            end = shards.everyones(mine).double().sum(0)
        if shards.chain:
            like = d_o.new_empty(1, *_state_shape(x), dtype=_wide(x))
            last = shards.neighbour(1) is None
            after = end[None].to(_wide(x)) if last and end is not None else shards.receive(like, 1)
            grads = self.inner.backward_handing_on(
                local, saved, d_o, cut.final(after), lambda d: shards.send(cut.passed_on(d), -1)
            )
            assert grads.initial_state is not None, "every piece has an initial state"
            before = cut.passed_on(grads.initial_state)[0]
        else:
            before, after = self._suffix(x, cut, self.inner.initial_gradient(local, saved, d_o), end)
            grads = self.inner.backward(local, saved, d_o, cut.final(after), None)
        tokens: dict[str, Any] = {n: getattr(grads, n).reshape(getattr(x, n).shape) for n in TOKENS}
        d_initial = None
        if x.initial_state is not None:
            begins = 0 in shards.places[shards.rank]  # a sum over ranks counts it once
            d_initial = before.contiguous() if begins else torch.zeros_like(x.initial_state)
        return grads._replace(**tokens, initial_state=d_initial)

    def _suffix(self, x: Any, cut: Any, d_initial: Tensor, end: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the gradients of the state before the sequence and of those after the local pieces."""
        E, V = cut.passed_on(d_initial), x.v.shape[3]
        P = x.exchanged[:-1, ..., V:, :]
        gathered = [t.double() for t in cut.shards.gathered(torch.cat((E, P), -2))]
        state = torch.zeros_like(gathered[0][..., :V, :]) if end is None else end
        after: list[Tensor] = []
        for both in reversed(gathered):
            after.insert(0, state)
            state = both[..., :V, :] + _mapped(state, both[..., V:, :].mT)
        return state.to(_wide(x)), cut.shards.own(after).to(_wide(x))

    def _with_shapes(self, x: Any, saved: list[Tensor]) -> list[Tensor]:
        """Return the saved tensors, with those that replace inputs of their shapes."""
        names = self.replaces(x)
        replacing = [t.reshape(getattr(x, n).shape) for n, t in zip(names, saved, strict=False)]
        return [*replacing, *saved[len(names) :]]


def _local(x: Any, cut: Rows | Packed) -> Inputs:
    """Return the inputs of the local sequences, which start from the states that ranks exchanged."""
    chain, V = cut.shards.chain, x.v.shape[3]
    initial = cut.initial(x.exchanged if chain else x.exchanged[:-1, ..., :V, :])
    return cut.inputs._replace(initial_state=initial, final_state=chain)


def states_before_like(x: Any) -> Tensor:
    """An unwritten result of `OverRanks.states_before`."""
    shards, (B, HV, V, K) = Shards.read(x.group, x.order), _state_shape(x)
    shape = (1, B, HV, V, K) if shards.chain else (shards.pieces + 1, B, HV, V + K, K)
    return x.q.new_empty(shape, dtype=_wide(x))


def _state_shape(x: Any) -> tuple[int, ...]:
    """[B, HV, V, K] of a state that a rank hands on."""
    return x.q.shape[0], *x.v.shape[2:], x.q.shape[3]


def _mapped(state: Tensor, P: Tensor) -> Tensor:
    """Return state @ P, but 0 where P is 0: NaN and inf must not reach a sequence that begins inside the piece."""
    return (state @ P).masked_fill((P == 0).all(-1).all(-1)[..., None, None], 0)


def _wide(x: Any) -> torch.dtype:
    return state_dtypes(x.q.dtype)[0]


_BACKENDS = Wrapped(lambda name: OverRanks(KDA.backend(name)))
_states_before: NoGradOperator[Any] = NoGradOperator(
    "states_before", LocalInputs, (), _BACKENDS, "states_before", states_before_like
)
_kda_over_ranks: Operator[Any, KDAOutput] = Operator(
    "kda_over_ranks",
    ShardedInputs,
    KDAOutput,
    Gradients,
    _BACKENDS,
    lambda x: outputs_like(inputs_of(x)),
)
