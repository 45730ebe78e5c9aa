"""Plain PyTorch for any device and dtype: tiles of queries against all keys that they see, in fp32 (fp64 for fp64)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...checks import accumulator_dtype, sequence_offsets
from ..contract import Backend, Gradients, Inputs, empty_lse

SCORES = 2**22  # of a tile, to stay near the size of a CPU's cache
MIN_ROWS = 16  # queries of a tile; matrix products with fewer rows are slow


class Tile(NamedTuple):
    """The queries `rows` of all batch rows, and the keys `keys` that any of them sees."""

    rows: slice
    keys: slice
    hidden: Tensor | None  # [rows, keys]: True where the query does not see the key

    def of_bias(self, bias: Tensor) -> Tensor:
        """The part of a bias, or of its gradient, that belongs to the tile."""
        return bias[..., self.keys] if bias.shape[2] == 1 else bias[:, :, self.rows, self.keys]


class EagerBackend(Backend):
    name = "eager"

    def attend(self, x: Inputs) -> tuple[Tensor, Tensor]:
        o, lse = x.v.new_empty(x.q.shape), empty_lse(x)
        heads = _Heads(x)
        for tile in _tiles(x):
            scores = heads.scores(tile)
            # A row without a visible key has only -inf; subtracting its maximum from itself would give NaN.
            top = scores.amax(-1, keepdim=True).nan_to_num_(neginf=0.0)
            p = (scores - top).exp_()
            total = p.sum(-1, keepdim=True)
            seen = total > 0
            o[:, tile.rows] = heads.join((p @ heads.v[..., tile.keys, :]) / torch.where(seen, total, 1))
            lse[:, :, tile.rows] = torch.where(seen, top + total.log(), torch.inf).squeeze(-1).flatten(1, 2)
        return o, lse

    def attend_backward(self, x: Inputs, o: Tensor, lse: Tensor, d_o: Tensor) -> Gradients:
        heads = _Heads(x)
        dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
        dk, dv = torch.zeros_like(heads.k), torch.zeros_like(heads.v)
        bias = x.bias if x.bias_grad else None
        d_bias = None if bias is None else bias.new_zeros(bias.shape, dtype=heads.k.dtype)
        for tile in _tiles(x):
            k, v = (t[..., tile.keys, :] for t in (heads.k, heads.v))
            q, do = heads.split(x.q, tile.rows), heads.split(d_o, tile.rows)
            delta = (heads.split(o, tile.rows) * do).sum(-1, keepdim=True)
            p = (heads.scores(tile) - lse[:, :, tile.rows].unflatten(1, (heads.H_kv, -1)).unsqueeze(-1)).exp_()
            dv[..., tile.keys, :] += (p.mT @ do).sum(2, keepdim=True)
            ds = (do @ v.mT).sub_(delta).mul_(p)
            dq[:, tile.rows] = heads.join(ds @ k).mul_(x.scale)
            dk[..., tile.keys, :] += (ds.mT @ q).sum(2, keepdim=True).mul_(x.scale)
            if d_bias is not None:
                d_tile = tile.of_bias(d_bias)
                ds = ds.flatten(1, 2) if d_bias.shape[1] == x.q.shape[2] else ds.sum(2)
                d_tile += ds.sum_to_size(d_tile.shape)
        d_bias = None if bias is None or d_bias is None else d_bias.to(bias.dtype)
        dk, dv = (t.squeeze(2).transpose(1, 2).to(x.k.dtype).contiguous() for t in (dk, dv))
        return Gradients(dq, dk, dv, d_bias)


class _Heads:
    """Keys and values as [B, H_kv, 1, S, D], and queries reshaped to [B, H_kv, G, rows, D]; in fp32 (fp64)."""

    def __init__(self, x: Inputs):
        self.x, self.dtype = x, accumulator_dtype(x.q.dtype)
        self.H_kv = x.k.shape[2]
        self.k, self.v = (t.to(self.dtype).transpose(1, 2).unsqueeze(2).contiguous() for t in (x.k, x.v))

    def split(self, t: Tensor, rows: slice) -> Tensor:
        """Rows of [B, T, H, D] to [B, H_kv, G, rows, D]."""
        return t[:, rows].to(self.dtype).transpose(1, 2).unflatten(1, (self.H_kv, -1))

    def join(self, t: Tensor) -> Tensor:
        """[B, H_kv, G, rows, D] to [B, rows, H, D]."""
        return t.flatten(1, 2).transpose(1, 2)

    def scores(self, tile: Tile) -> Tensor:
        """[B, H_kv, G, rows, keys], -inf where a query does not see a key."""
        x = self.x
        s = (self.split(x.q, tile.rows) * x.scale) @ self.k[..., tile.keys, :].mT
        if x.bias is not None:
            bias = tile.of_bias(x.bias)
            per_head = bias.shape[1] == x.q.shape[2]
            s += bias.unflatten(1, (self.H_kv, -1)) if per_head else bias.unsqueeze(2)
        return s if tile.hidden is None else s.masked_fill_(tile.hidden, -torch.inf)


def _tiles(x: Inputs) -> Iterator[Tile]:
    """The tiles of every sequence, in the order of the tokens."""
    (B, T, H, _), S = x.q.shape, x.k.shape[1]
    offsets = [0, T] if x.cu_seqlens is None else sequence_offsets(x.cu_seqlens, T)
    for start, end in itertools.pairwise(offsets):
        first_key, end_key = (start, end) if x.cu_seqlens is not None else (0, S)
        step = max(MIN_ROWS, SCORES // (B * H * max(end_key - first_key, 1)))
        for a in range(start, end, step):
            b = min(a + step, end)
            last = end_key - (end - b) if x.causal else end_key
            hidden = None
            if x.causal:
                # Query i sees the keys up to i + S - T, so the tile's last query sees all of its keys.
                hidden = x.q.new_ones(b - a, last - first_key, dtype=torch.bool).triu_(last - first_key - (b - a) + 1)
            yield Tile(slice(a, b), slice(first_key, last), hidden)


BACKEND = EagerBackend()
