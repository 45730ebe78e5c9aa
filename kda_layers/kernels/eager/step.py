"""Decode: one or a few tokens per sequence, the state updated in place."""

from __future__ import annotations

import torch
from torch import Tensor

from kda_layers.kernels.contract import StepInputs, sequence_offsets
from kda_layers.kernels.reference import activate

STEP_ELEMENTS = 2**18  # elements of the state updated at a time, so that its three passes stay in L2


def step(x: StepInputs) -> Tensor:
    """Token after token; the sequences of a token side by side."""
    o = torch.zeros_like(x.v, memory_format=torch.contiguous_format)
    B, T = x.q.shape[:2]
    if x.cu_seqlens is None:
        starts, lengths = torch.arange(B) * T, torch.full((B,), T)
    else:
        offsets = torch.tensor(sequence_offsets(x.cu_seqlens, T))
        starts, lengths = offsets[:-1], offsets.diff()
    slots = x.state_indices
    if slots is not None:
        slots = slots.long() if slots.ndim == 2 else slots.long()[:, None].expand(-1, max(int(lengths.max()), 1))
        if int(lengths.max()) > slots.shape[1]:
            raise ValueError(f"state_indices has {slots.shape[1]} slots for sequences of {int(lengths.max())} tokens")
        if int(slots.min()) < 0 or int(slots.max()) >= x.state.shape[0]:
            raise ValueError(
                f"state_indices must be in [0, {x.state.shape[0]}), got {int(slots.min())} to {int(slots.max())}"
            )
    x = activate(x)
    wide = x.state.dtype
    heads = torch.arange(x.v.shape[2], device=x.q.device) // (x.v.shape[2] // x.q.shape[2])
    q, k = (t.to(wide).flatten(0, 1)[:, heads] for t in (x.q, x.k))
    v, decay, beta = x.v.to(wide).flatten(0, 1), x.g.to(wide).exp().flatten(0, 1), x.beta.to(wide).flatten(0, 1)
    out = o.view(-1, *o.shape[2:])
    for t in range(int(lengths.max())):
        live = (lengths > t).nonzero()[:, 0]
        tokens, live = (starts[live] + t).to(x.q.device), live.to(x.q.device)
        if slots is None:
            S = x.state if len(live) == x.state.shape[0] else x.state[live]
        elif t > 0:
            S = x.state[slots[live, t - 1]]
        elif x.num_accepted is None:
            S = x.state[slots[live, 0]]
        else:
            S = x.state[slots[live, x.num_accepted.long()[live] - 1]]
        out[tokens] = _recur(S, x.scale, *(y[tokens] for y in (q, k, v, decay, beta))).to(o.dtype)
        if slots is not None:
            x.state[slots[live, t]] = S
        elif S is not x.state:
            x.state[live] = S
    return o


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
