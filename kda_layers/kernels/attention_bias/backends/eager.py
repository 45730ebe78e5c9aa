"""Plain PyTorch: any device, any dtype, tiles of queries against all keys that they see, in fp32 (fp64)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...checks import accumulator_dtype, sequence_offsets
from ..contract import Backend, Gradients, Inputs, empty_lse

SCORES = 2**22  # as many scores at once fit into a cache or not far from it
MIN_ROWS = 16  # queries of a tile: with fewer, products of matrices are slow


class Tile(NamedTuple):
    """Queries `rows` of all batch rows and the keys `keys` that any of them sees."""

    rows: slice
    keys: slice
    hidden: Tensor | None  # [rows, keys]: which of them a query does not see


class EagerBackend(Backend):
    name = "eager"
    priority = 0

    def attend(self, x: Inputs) -> tuple[Tensor, Tensor]:
        o, lse = x.v.new_empty(x.q.shape), empty_lse(x)
        heads = _Heads(x)
        for tile in _tiles(x):
            scores = heads.scores(tile)
            # A row without a visible key has only -inf: its maximum must not be subtracted from itself.
            top = scores.amax(-1, keepdim=True).nan_to_num_(neginf=0.0)
            p = (scores - top).exp_()
            total = p.sum(-1, keepdim=True)
            seen = total > 0
            o[:, tile.rows] = heads.join((p @ heads.v[..., tile.keys, :]) / torch.where(seen, total, 1))
            lse[:, :, tile.rows] = heads.merge(torch.where(seen, top + total.log(), torch.inf))
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
            p = (heads.scores(tile) - heads.group(lse[:, :, tile.rows])).exp_()
            dv[..., tile.keys, :] += heads.over_group(p.mT @ do)
            ds = (do @ v.mT).sub_(delta).mul_(p)
            dq[:, tile.rows] = heads.join(ds @ k).mul_(x.scale)
            dk[..., tile.keys, :] += heads.over_group(ds.mT @ q).mul_(x.scale)
            if d_bias is not None:
                rows = tile.rows if d_bias.shape[2] > 1 else slice(None)
                d_bias[:, :, rows, tile.keys] += heads.sum_to(d_bias, ds)
        d_bias = None if bias is None or d_bias is None else d_bias.to(bias.dtype)
        dk, dv = (t.squeeze(2).transpose(1, 2).to(x.k.dtype).contiguous() for t in (dk, dv))
        return Gradients(dq, dk, dv, d_bias)


class _Heads:
    """Keys and values as [B, H_kv, 1, S, D], and queries brought to them as [B, H_kv, G, rows, D]; in fp32 (fp64)."""

    def __init__(self, x: Inputs):
        self.x, self.dtype = x, accumulator_dtype(x.q.dtype)
        self.H_kv = x.k.shape[2]
        self.k, self.v = (t.to(self.dtype).transpose(1, 2).unsqueeze(2).contiguous() for t in (x.k, x.v))

    def group(self, t: Tensor) -> Tensor:
        """[B, H, rows] to [B, H_kv, G, rows, 1]."""
        return t.unflatten(1, (self.H_kv, -1)).unsqueeze(-1)

    def merge(self, t: Tensor) -> Tensor:
        """[B, H_kv, G, rows, 1] to [B, H, rows]."""
        return t.squeeze(-1).flatten(1, 2)

    def split(self, t: Tensor, rows: slice) -> Tensor:
        """Rows of [B, T, H, D] to [B, H_kv, G, rows, D]."""
        return t[:, rows].to(self.dtype).transpose(1, 2).unflatten(1, (self.H_kv, -1))

    def join(self, t: Tensor) -> Tensor:
        """[B, H_kv, G, rows, D] to [B, rows, H, D]."""
        return t.flatten(1, 2).transpose(1, 2)

    def over_group(self, t: Tensor) -> Tensor:
        """The sum over the query heads of each key head: [B, H_kv, G, keys, D] to [B, H_kv, 1, keys, D]."""
        return t.sum(2, keepdim=True)

    def scores(self, tile: Tile) -> Tensor:
        """[B, H_kv, G, rows, keys], -inf where a query does not see a key."""
        x = self.x
        s = (self.split(x.q, tile.rows) * x.scale) @ self.k[..., tile.keys, :].mT
        if x.bias is not None:
            bias = x.bias[..., tile.keys] if x.bias.shape[2] == 1 else x.bias[:, :, tile.rows, tile.keys]
            per_head = bias.shape[1] == x.q.shape[2]
            s += bias.unflatten(1, (self.H_kv, -1)) if per_head else bias.unsqueeze(2)
        return s if tile.hidden is None else s.masked_fill_(tile.hidden, -torch.inf)

    def sum_to(self, bias: Tensor, ds: Tensor) -> Tensor:
        """[B, H_kv, G, rows, keys] summed over what `bias` is broadcast in."""
        ds = ds.flatten(1, 2) if bias.shape[1] == self.x.q.shape[2] else ds.sum(2)
        dims = [d for d in (0, 1, 2) if bias.shape[d] == 1 < ds.shape[d]]
        return ds.sum(dims, keepdim=True) if dims else ds


def _tiles(x: Inputs) -> Iterator[Tile]:
    """From the first sequence's first query to the last one's last."""
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
                # Query i sees the keys up to i + S - T: the last query of the tile all of them.
                hidden = x.q.new_ones(b - a, last - first_key, dtype=torch.bool).triu_(last - first_key - (b - a) + 1)
            yield Tile(slice(a, b), slice(first_key, last), hidden)


BACKEND = EagerBackend()
