"""Decode: one or a few tokens per sequence, the state updated in place."""

from __future__ import annotations

import torch
from torch import Tensor

from kda_layers.kernels.contract import StepInputs, sequence_offsets
from kda_layers.kernels.reference import activate

STEP_ELEMENTS = 2**18  # elements of the state updated at a time, so that its three passes stay in L2


def step(x: StepInputs) -> Tensor:
    """Token after token; the sequences of a token side by side.

    Sequences of one length need nothing from the host, so that a CUDA graph can capture them.
    """
    o = torch.zeros_like(x.v, memory_format=torch.contiguous_format)
    B, T = x.q.shape[:2]
    offsets = None if x.cu_seqlens is None else torch.tensor(sequence_offsets(x.cu_seqlens, T), device="cpu")
    longest = T if offsets is None else int(offsets.diff().max())
    slots = _slots(x, longest)
    x = activate(x)
    wide = x.state.dtype
    heads = torch.arange(x.v.shape[2], device=x.q.device) // (x.v.shape[2] // x.q.shape[2])
    q, k = (t.to(wide).flatten(0, 1)[:, heads] for t in (x.q, x.k))
    v, decay, beta = x.v.to(wide).flatten(0, 1), x.g.to(wide).exp().flatten(0, 1), x.beta.to(wide).flatten(0, 1)
    out = o.view(-1, *o.shape[2:])
    for t in range(longest):
        tokens, live, count = (slice(t, None, T), slice(None), B) if offsets is None else _live(offsets, t, o.device)
        whole = slots is None and count == x.state.shape[0] and x.state.is_contiguous()
        S = x.state if whole else x.state[_source(x, slots, live, t)].contiguous()
        out[tokens] = _recur(S, x.scale, *(y[tokens].contiguous() for y in (q, k, v, decay, beta))).to(o.dtype)
        if not whole:
            x.state[live if slots is None else slots[live, t]] = S
    return o


def _live(offsets: Tensor, t: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Of the packed sequences that have a token t: its place along T, their numbers, and how many they are."""
    live = (offsets.diff() > t).nonzero()[:, 0]
    return (offsets[live] + t).to(device), live.to(device), len(live)


def _source(x: StepInputs, slots: Tensor | None, live: Tensor | slice, t: int) -> Tensor | slice:
    """Slots that hold the states of the sequences `live` before their token t."""
    if slots is None:
        return live
    if t > 0:
        return slots[live, t - 1]
    if x.num_accepted is None:
        return slots[live, 0]
    return slots[live].gather(1, x.num_accepted.long()[live, None] - 1)[:, 0]


def _slots(x: StepInputs, tokens: int) -> Tensor | None:
    """[N, >= tokens] slot of the state after each token, after checking the values of both index tensors."""
    slots = x.state_indices
    if slots is None:
        return None
    slots = slots.long() if slots.ndim == 2 else slots.long()[:, None].expand(-1, max(tokens, 1))
    if slots.shape[1] < tokens:
        raise ValueError(f"state_indices must have at least {tokens} columns, one for each token, got {slots.shape[1]}")
    _check_range("state_indices", slots, 0, x.state.shape[0] - 1)
    if x.num_accepted is not None:
        _check_range("num_accepted", x.num_accepted, 1, slots.shape[1])
    return slots


def _check_range(name: str, t: Tensor, low: int, high: int) -> None:
    least, most = int(t.min()), int(t.max())
    if least < low or most > high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {least} to {most}")


def _recur(S: Tensor, scale: float, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One token for S [n, HV, V, K], updated in place; q, k, decay [n, HV, K], v [n, HV, V], beta [n, HV] -> o."""
    n, HV, V, K = S.shape
    reads = torch.stack((k * decay, q * decay), 2).view(n * HV, 2, K)
    qk = (q * k).sum(-1).view(-1, 1)
    k, v, decay, beta, rows = k.view(-1, 1, K), v.view(-1, V), decay.view(-1, 1, K), beta.view(-1, 1), S.view(-1, V, K)
    o = torch.empty_like(v)
    size = max(1, STEP_ELEMENTS // (V * K))
    for i in range(0, n * HV, size):
        part = slice(i, i + size)
        y = torch.bmm(reads[part], rows[part].mT)
        error = beta[part] * (v[part] - y[:, 0])
        torch.addcmul(y[:, 1], qk[part], error, out=o[part]).mul_(scale)
        rows[part].mul_(decay[part]).baddbmm_(error[..., None], k[part])
    return o.view(n, HV, V)
