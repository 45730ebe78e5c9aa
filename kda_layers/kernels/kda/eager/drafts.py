"""Verify drafted tokens without advancing the states, and commit those that were accepted, in plain PyTorch."""

from __future__ import annotations

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


def verify(x: DecodeInputs) -> Tensor:
    """See `Backend.verify`. As in `decode`, sequences of one length without slots need no host read, if nothing is
    committed."""
    assert x.updates is not None
    sequences = None if x.cu_seqlens is None and x.state_indices is None else sequences_of(x)
    longest = max((s.length for s in sequences or ()), default=0)
    if longest > x.updates.shape[1]:
        raise ValueError(f"updates must have room for the {longest} tokens of a sequence, got {x.updates.shape[1]}")
    if x.num_accepted is not None:
        commit(CommitInputs(x.state, x.updates, x.num_accepted, x.state_indices))
    o = torch.zeros_like(x.v, memory_format=torch.contiguous_format) if x.out is None else x.out.zero_()
    T, out, updates = x.q.shape[1], o.view(-1, *o.shape[2:]), x.updates
    x = activate(x)
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
    slots = index([s.source for s in sequences])
    S = read(x, slots)
    for t in range(longest):
        live = [s for s in sequences if s.length > t]
        updates[slots[: len(live)], t] = recur(S[: len(live)], index([s.start + t for s in live]))
    return o


def commit(x: CommitInputs) -> None:
    """See `Backend.commit`."""
    accepted, (count, HV, V, K), most = x.num_accepted.tolist(), x.state.shape, x.updates.shape[1]
    slots = list(range(count)) if x.state_indices is None else x.state_indices.tolist()
    if not slots:
        return
    check_slots_exist(slots, count)
    check_owners({slot} for slot in slots)
    pending = [(m, slot) for m, slot in zip(accepted, slots, strict=True) if slot != NO_SLOT]
    wrong = [m for m, _ in pending if not 0 <= m <= most]
    if wrong:
        raise ValueError(f"num_accepted must be in [0, {most}], the tokens of updates, got {wrong[0]}")
    pending = sorted((p for p in pending if p[0]), key=lambda p: -p[0])  # states with a token i are then a prefix
    if not pending:
        return
    rows = torch.tensor([slot for _, slot in pending], device=x.state.device)
    wide = x.updates.dtype  # in which states are computed
    in_place = x.state.dtype == wide and x.state.is_contiguous() and rows.tolist() == list(range(count))
    S = x.state if in_place else x.state[rows].to(wide)
    live = [HV * sum(m > i for m, _ in pending) for i in range(pending[0][0])]  # heads with a token i
    updates = x.updates[rows, : len(live)].transpose(0, 1).flatten(1, 2)  # [tokens, heads, 2 K + V]
    decay, k, error = (t.contiguous() for t in updates.split((K, K, V), -1))
    heads, size = S.view(-1, V, K), max(1, STEP_ELEMENTS // (V * K))
    for first in range(0, live[0], size):  # every token of a part while it is in L2; parts as in `recur_token`
        for i, count in enumerate(live):
            part = slice(first, min(first + size, count))
            if first < count:
                write(heads[part], decay[i, part, None], k[i, part, None], error[i, part])
    if not in_place:
        x.state[rows] = S.to(x.state.dtype)
