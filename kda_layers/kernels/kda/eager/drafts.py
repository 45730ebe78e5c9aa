"""Verify drafted tokens without advancing the states, and commit those that were accepted, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import NO_SLOT, CommitInputs, DecodeInputs
from ..reference import activate
from .decode import (
    STEP_ELEMENTS,
    check_owners,
    check_slots_exist,
    operands_of,
    read,
    recur_token,
    sequences_of,
    write,
)


class Commit(NamedTuple):
    """The state of one sequence and the updates that it advances by."""

    tokens: int
    slot: int  # that is written
    row: int  # of the updates
    source: int  # slot that is read


def verify(x: DecodeInputs) -> Tensor:
    """See `Backend.verify`. As in `decode`, sequences of one length without slots need no host read, if nothing is
    committed."""
    assert x.updates is not None
    indexed = x.cu_seqlens is not None or x.state_indices is not None or x.update_indices is not None
    sequences = sequences_of(x) if indexed else None
    count = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    rows = _rows_of(x, count) if indexed else {}
    sequences = sequences and [s for s in sequences if rows[s.source] != NO_SLOT]
    longest = max((s.length for s in sequences or ()), default=0)
    if longest > x.updates.shape[1]:
        raise ValueError(f"updates must have room for the {longest} tokens of a sequence, got {x.updates.shape[1]}")
    if x.num_accepted is not None:
        commit(CommitInputs(x.state, x.updates, x.num_accepted, x.state_indices, x.update_indices, None))
    o = torch.zeros_like(x.v, memory_format=torch.contiguous_format) if x.out is None else x.out.zero_()
    T, out, updates = x.q.shape[1], o.view(-1, *o.shape[2:]), x.updates
    x = activate(x)  # also repeats gates of heads: updates have a decay for each channel
    operands = operands_of(x)

    def recur(S: Tensor, tokens: slice | Tensor) -> Tensor:
        of_token = [y[tokens].contiguous() for y in operands]
        y, error = recur_token(S, x.scale, *of_token)
        out[tokens] = y.to(o.dtype)
        _, k, _, decay, _ = of_token
        return torch.cat((decay, k, error), -1)

    if sequences is None:
        S = read(x, ...).clone(memory_format=torch.contiguous_format)
        for t in range(T):
            updates[:, t] = recur(S, slice(t, None, T))
        return o

    def index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=o.device)

    sequences.sort(key=lambda s: -s.length)  # sequences with a token t are then a prefix
    written = index([rows[s.source] for s in sequences])
    S = read(x, index([s.source for s in sequences]))
    for t in range(longest):
        live = [s for s in sequences if s.length > t]
        updates[written[: len(live)], t] = recur(S[: len(live)], index([s.start + t for s in live]))
    return o


def commit(x: CommitInputs) -> None:
    """See `Backend.commit`."""
    accepted, (count, HV, V, K), most = x.num_accepted.tolist(), x.state.shape, x.updates.shape[1]
    slots = _slots_of(x, len(accepted))
    if not slots:
        return
    check_slots_exist(slots, count)
    check_owners({slot} for slot in slots)
    rows, sources = _rows_of(x, len(accepted)), slots
    if x.initial_indices is not None:
        sources = x.initial_indices.tolist()
        check_slots_exist(sources, count, "initial_indices")
    given = [Commit(m, slot, rows[slot], first) for m, slot, first in zip(accepted, slots, sources, strict=True)]
    pending = [p for p in given if NO_SLOT not in p[1:]]
    wrong = [p.tokens for p in pending if not 0 <= p.tokens <= most]
    if wrong:
        raise ValueError(f"num_accepted must be in [0, {most}], the tokens of updates, got {wrong[0]}")
    moved = [p for p in pending if p.tokens or p.source != p.slot]
    pending = sorted(moved, key=lambda p: -p.tokens)  # states with a token i are then a prefix
    if not pending:
        return

    def index(values: Iterable[int]) -> Tensor:
        return torch.tensor([*values], device=x.state.device)

    wide = x.updates.dtype  # in which states are computed
    in_place = x.state.dtype == wide and x.state.is_contiguous()
    in_place = in_place and [p.slot for p in pending] == [p.source for p in pending] == list(range(count))
    S = x.state if in_place else x.state[index(p.source for p in pending)].to(wide)
    live = [HV * sum(p.tokens > i for p in pending) for i in range(pending[0].tokens)]  # heads with a token i
    updates = x.updates[index(p.row for p in pending), : len(live)]
    updates = updates.transpose(0, 1).flatten(1, 2)  # [tokens, heads, 2 K + V]
    decay, k, error = (t.contiguous() for t in updates.split((K, K, V), -1))
    heads, size = S.view(-1, V, K), max(1, STEP_ELEMENTS // (V * K))
    for first in range(0, max(live, default=0), size):  # all tokens of a part while in L2; parts as in `recur_token`
        for i, count in enumerate(live):
            part = slice(first, min(first + size, count))
            if first < count:
                write(heads[part], decay[i, part, None], k[i, part, None], error[i, part])
    if not in_place:
        x.state[index(p.slot for p in pending)] = S.to(x.state.dtype)


def _slots_of(x: DecodeInputs | CommitInputs, sequences: int) -> list[int]:
    """Return the slot of each sequence's state."""
    slots: list[int] = list(range(sequences)) if x.state_indices is None else x.state_indices.tolist()
    return slots


def _rows_of(x: DecodeInputs | CommitInputs, sequences: int) -> dict[int, int]:
    """Return the slot of the updates of each slot of a state that the call has; checked."""
    slots = _slots_of(x, sequences)
    if x.update_indices is None:
        return dict(zip(slots, slots, strict=True))
    assert x.updates is not None
    rows = x.update_indices.tolist()
    check_slots_exist(rows, x.updates.shape[0], "update_indices")
    check_owners(({row} for slot, row in zip(slots, rows, strict=True) if slot != NO_SLOT), "update_indices")
    return dict(zip(slots, rows, strict=True))
