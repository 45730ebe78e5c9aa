"""The pieces of sequences that a rank holds, as the local sequences of an ordinary call of `kda`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kda.contract import Inputs
from .shards import Shards

TOKENS = ("q", "k", "v", "g", "beta")  # leading fields of `Inputs`, [B, T, ...]


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

    def transitions(self, P: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        """Transitions that are passed on, [pieces, B, HV, ., K], of those of all local sequences."""
        return self.of_pieces(P), self.of_pieces(C)

    def last(self, final: Tensor) -> Tensor:
        """The states that this rank passes on, [pieces, B, HV, V, K], from those after all local sequences."""
        return self.of_pieces(final)

    def initial(self, before: Tensor) -> Tensor:
        """Initial states of the local sequences from the states passed on, [pieces, B, HV, V, K]."""
        return self.of_rows(before)

    def passed_on(self, gradient: Tensor) -> Tensor:
        """Gradients of the states passed on from those of all initial states."""
        return self.of_pieces(gradient)

    def final(self, after: Tensor) -> Tensor:
        """Gradients of all final states from those of the states that this rank passes on."""
        return self.of_rows(after)


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
