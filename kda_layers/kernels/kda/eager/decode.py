"""Decode one or a few tokens per sequence, updating the state in place; check the values of slots and boundaries."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checks import sequence_offsets
from ..contract import CHUNK, HEAD_GATES, NO_SLOT, DecodeInputs, PrefillInputs, state_dtype
from ..int8_state import dequantize_state, quantize_state
from ..reference import activate

STEP_ELEMENTS = 2**18  # elements of the state updated at a time, so that the three passes stay in L2


class _Sequence(NamedTuple):
    start: int  # its first row of the flattened [B * T] tokens
    length: int
    source: int  # slot of the state before its first token
    targets: list[int]  # slot of the state after each token; NO_SLOT: not stored


def decode(x: DecodeInputs) -> Tensor:
    """See `Backend.decode`. Sequences of one length without slots need no host read: a CUDA graph can capture them."""
    sequences = None if x.cu_seqlens is None and x.state_indices is None else sequences_of(x)
    o = torch.zeros_like(x.v, memory_format=torch.contiguous_format) if x.out is None else x.out.zero_()
    T, out = x.q.shape[1], o.view(-1, *o.shape[2:])
    x = activate(x, (HEAD_GATES,))
    operands = operands_of(x)

    def recur(S: Tensor, tokens: slice | Tensor) -> None:
        out[tokens] = recur_token(S, x.scale, *(y[tokens].contiguous() for y in operands))[0].to(o.dtype)

    if sequences is None:
        S = read(x, ...).contiguous()
        for t in range(T):
            recur(S, slice(t, None, T))
            if S is not x.state:
                _store(x, ..., S, ...)
        return o

    def index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=o.device)

    sequences.sort(key=lambda s: -s.length)  # sequences with a token t are then a prefix
    sources = [s.source for s in sequences]
    in_place = x.state.dtype == state_dtype(x.q.dtype) and x.state_indices is None and x.state.is_contiguous()
    in_place = in_place and sources == list(range(len(x.state)))
    S = x.state if in_place else read(x, index(sources))
    for t in range(sequences[0].length if sequences else 0):
        live = [s for s in sequences if s.length > t]
        updated = S[: len(live)]
        recur(updated, index([s.start + t for s in live]))
        if not in_place:
            kept = [(s.targets[t], i) for i, s in enumerate(live) if s.targets[t] != NO_SLOT]
            _store(x, index([slot for slot, _ in kept]), updated, index([i for _, i in kept]))
    return o


def read(x: DecodeInputs, slots: Any) -> Tensor:
    """The states of some slots, in the dtype in which they are computed."""
    if x.state_scale is not None:
        return dequantize_state(x.state[slots], x.state_scale[slots])
    return (x.state if x.initial_state is None else x.initial_state)[slots].to(state_dtype(x.q.dtype))


def _store(x: DecodeInputs, slots: Any, S: Tensor, rows: Any) -> None:
    """Write rows of S to slots; if states are int8, round S itself, as after every token."""
    if x.state_scale is None:
        x.state[slots] = S[rows].to(x.state.dtype)
        return
    n, scale = quantize_state(S)
    S.copy_(dequantize_state(n, scale))
    x.state[slots], x.state_scale[slots] = n[rows], scale[rows]


def operands_of(x: DecodeInputs) -> tuple[Tensor, ...]:
    """Return q, k, v, decay and beta of every token and value head, [B * T, HV, ...], as `recur_token` takes them.

    Args:
        x: inputs that `activate` has returned
    """
    wide = state_dtype(x.q.dtype)
    heads = torch.arange(x.v.shape[2], device=x.q.device) // (x.v.shape[2] // x.q.shape[2])
    q, k = (t.to(wide).flatten(0, 1)[:, heads] for t in (x.q, x.k))
    return q, k, *(t.flatten(0, 1) for t in (x.v.to(wide), x.g.to(wide).exp(), x.beta.to(wide)))


def sequences_of(x: DecodeInputs) -> list[_Sequence]:
    """Check tokens and slots of every sequence and return them as Python integers (host reads)."""
    B, T = x.q.shape[:2]
    offsets = [n * T for n in range(B + 1)] if x.cu_seqlens is None else sequence_offsets(x.cu_seqlens, T)
    lengths = [b - a for a, b in itertools.pairwise(offsets)]
    if x.state_indices is None:
        sources = list(range(len(lengths)))
        targets = after_last(sources, lengths)
    else:
        sources, targets = slots_of(x.state_indices, x.num_accepted, lengths, x.state.shape[0])
    if x.initial_state is not None and x.initial_indices is not None:
        initial = x.initial_indices.tolist()
        check_slots_exist(initial, x.initial_state.shape[0], "initial_indices")
        sources = [NO_SLOT if first == NO_SLOT else slot for first, slot in zip(sources, initial, strict=True)]
    sequences = [_Sequence(*s) for s in zip(offsets, lengths, sources, targets, strict=False)]
    sequences = [s for s in sequences if s.length and s.source != NO_SLOT]
    own = x.initial_state is None  # other sequences may read the same slot of `initial_state`
    check_owners({*s.targets[: s.length], *((s.source,) if own else ())} for s in sequences)
    return sequences


def slots_of(
    indices: Tensor, accepted: Tensor | None, lengths: list[int], count: int
) -> tuple[list[int], list[list[int]]]:
    """Return each sequence's slot before the call, and those after each token; checked, of `count` slots."""
    if indices.ndim == 1:
        sources = indices.tolist()
        check_slots_exist(sources, count)
        return sources, after_last(sources, lengths)
    targets = indices.tolist()
    columns = len(targets[0])
    if columns < max(lengths):
        raise ValueError(f"state_indices must have at least {max(lengths)} columns, one per token, got {columns}")
    read = [1] * len(targets) if accepted is None else accepted.tolist()
    read = [1 if set(row) == {NO_SLOT} else m for row, m in zip(targets, read, strict=True)]
    if min(read) < 1 or max(read) > columns:
        raise ValueError(f"num_accepted must be in [1, {columns}], got {min(read)} to {max(read)}")
    check_slots_exist([slot for row in targets for slot in row], count)
    return [row[m - 1] for row, m in zip(targets, read, strict=True)], targets


def after_last(slots: list[int], lengths: list[int]) -> list[list[int]]:
    """The slots after each token where only the state after the last one is kept."""
    return [[NO_SLOT] * (n - 1) + [slot] for n, slot in zip(lengths, slots, strict=True)]


def check_slots_exist(slots: list[int], count: int, name: str = "state_indices") -> None:
    """Raise unless every slot is one of `count`, or none."""
    if min(slots) < NO_SLOT or max(slots) >= count:
        raise ValueError(f"{name} must be in [0, {count - 1}], got {min(slots)} to {max(slots)}; -1 is no slot")


def check_indices(x: PrefillInputs) -> None:
    """Raise a ValueError for a slot that does not exist or is given twice, or a boundary outside of its sequence."""
    B, T = x.q.shape[:2]
    offsets = [n * T for n in range(B + 1)] if x.cu_seqlens is None else sequence_offsets(x.cu_seqlens, T)
    if x.state_indices is not None and x.state is not None:
        slots = x.state_indices.tolist()
        check_slots_exist(slots, x.state.shape[0])
        check_owners({slot} for slot in slots)
    if x.checkpoint_at is None:
        return
    for n, (at, (start, end)) in enumerate(zip(x.checkpoint_at.tolist(), itertools.pairwise(offsets), strict=True)):
        if at != NO_SLOT and (at % CHUNK or not 0 <= at <= end - start):
            raise ValueError(
                f"checkpoint_at must be multiples of {CHUNK} within the sequences, or -1 for none, got {at} for "
                f"sequence {n} of {end - start} tokens"
            )


def check_owners(slots: Iterable[set[int]], name: str = "state_indices") -> None:
    """Raise if two sequences read or write one slot, given the slots of each."""
    owners: dict[int, int] = {}
    for n, own in enumerate(slots):
        for slot in own - {NO_SLOT}:
            if owners.setdefault(slot, n) != n:
                raise ValueError(
                    f"{name} must give each slot to one sequence, got slot {slot} twice: an update would be lost"
                )


def recur_token(
    S: Tensor, scale: float, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Update S [n, HV, V, K] in place with a token: q, k [n, HV, K], decay [n, HV, G], v [n, HV, V], beta [n, HV].

    Returns:
        o and the error beta (v - S k), both [n, HV, V].
    """
    n, HV, V, K = S.shape
    reads = torch.stack((k * decay, q * decay), 2).view(n * HV, 2, K)
    qk = (q * k).sum(-1).view(-1, 1)
    k, v, beta, rows = k.view(-1, 1, K), v.view(-1, V), beta.view(-1, 1), S.view(-1, V, K)
    decay = decay.view(-1, 1, decay.shape[2])
    o, error = torch.empty_like(v), torch.empty_like(v)
    size = max(1, STEP_ELEMENTS // (V * K))
    for i in range(0, n * HV, size):
        part = slice(i, i + size)
        y = torch.bmm(reads[part], rows[part].mT)
        torch.mul(beta[part], v[part] - y[:, 0], out=error[part])
        torch.addcmul(y[:, 1], qk[part], error[part], out=o[part]).mul_(scale)
        write(rows[part], decay[part], k[part], error[part])
    return o.view(n, HV, V), error.view(n, HV, V)


def write(S: Tensor, decay: Tensor, k: Tensor, error: Tensor) -> None:
    """Update S [n, V, K] in place: S <- S decay + error k^T, with decay [n, 1, G], k [n, 1, K], error [n, V]."""
    S.mul_(decay).baddbmm_(error[..., None], k)
