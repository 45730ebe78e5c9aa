"""One segment, forward: activated operands and the matrices of each chunk; see `backends/eager.py`.

Loops reuse their buffers: on a CPU allocating a megabyte costs more than the pass that fills it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..activations import log_decay, write_strength
from ..contract import CHUNK, Inputs, state_dtype
from ..reference import L2NORM_EPS
from . import head_gates
from .decays import flush, halves, levels
from .schedule import Segment


class Chunks(NamedTuple):
    """A segment's activated operands and chunk matrices, a row for each chunk of C tokens and value head."""

    kq: Tensor  # [rows, 2C, K] keys, then scaled queries
    v: Tensor  # [rows, C, V]
    beta: Tensor  # [rows, C, 1]
    token_decay: Tensor  # [rows, C, G] e^g
    p: Tensor  # [rows, C, G] decay from the chunk's start to the token, inclusive
    s: Tensor  # [rows, C, G] decay after the token to the chunk's end
    writes: Tensor  # [rows, C, K] s beta k
    R: Tensor  # [rows, C, C] (I + L)^-1
    M: Tensor  # [rows, C, C]
    # With one gate a head, else None: L [rows, C, C], and D [rows, C, C], the decay from a token to a later one
    L: Tensor | None = None
    D: Tensor | None = None

    @property
    def k(self) -> Tensor:
        return self.kq[:, : self.v.shape[1]]

    @property
    def q(self) -> Tensor:
        return self.kq[:, self.v.shape[1] :]

    @property
    def decay(self) -> Tensor:
        """Decay of the state over the chunk, [rows, 1, G]."""
        return self.p[:, -1:]

    def reads(self, out: Tensor | None = None) -> Tensor:
        """The operands that read the state, [rows, 2C, K]: keys and queries, decayed from the chunk's start."""
        out = torch.empty_like(self.kq) if out is None else out
        torch.mul(self.kq.unflatten(1, (2, -1)), self.p[:, None], out=out.unflatten(1, (2, -1)))
        return out


def load(x: Inputs, segment: Segment) -> Chunks:
    """Gather and activate the operands of one segment and compute its chunk matrices."""
    wide, group = state_dtype(x.q.dtype), x.v.shape[2] // x.q.shape[2]
    g = log_decay(segment.gather(x.g).to(wide), x.A_log, x.dt_bias, x.gate_activation, x.lower_bound)
    q, k = (segment.gather(t).to(wide) for t in (x.q, x.k))
    v = segment.by_head(segment.gather(x.v).to(wide))
    kq = v.new_empty(v.shape[0], 2 * v.shape[1], q.shape[-1])
    rows_k, rows_q = kq.chunk(2, 1)
    segment.by_head(k, inverse_norm(k) if x.qk_l2norm else 1.0, group, out=rows_k)
    segment.by_head(q, x.scale * inverse_norm(q) if x.qk_l2norm else x.scale, group, out=rows_q)
    beta = segment.by_head(write_strength(segment.gather(x.beta).to(wide), x.beta_activation)[..., None])
    g = segment.by_head(g)
    if g.shape[2] == kq.shape[2]:
        return Chunks(kq, v, beta, *_chunk_matrices(kq, beta, g))
    return Chunks(kq, v, beta, *head_gates.chunk_matrices(kq, beta, g, group))


def inverse_norm(x: Tensor) -> Tensor:
    """The factor of reference.l2norm, [..., 1]."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(L2NORM_EPS).rsqrt_()


def _chunk_matrices(kq: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """The fields of `Chunks` from `token_decay` to `M`, C = 64, by binary anchoring; g [rows, 64, K] is overwritten."""
    token_decay, (rows, _, K) = g.exp_(), g.shape
    k, q = kq.chunk(2, 1)
    b = k * beta
    reads, writes = torch.empty_like(b), b.new_empty(rows, CHUNK // 2, K)
    R = torch.ones_like(q[..., :1])  # [blocks, h, h], blocks of h tokens
    M = (q * b).sum(-1, keepdim=True)
    for h, p, s in levels(token_decay):
        if h == CHUNK:
            break
        corner = torch.bmm(decayed_reads(q, k, p, h, reads), decayed_writes(b, s, h, writes).mT)
        flush(corner)
        R_first, R_second = R.view(-1, 2, h, h).unbind(1)
        R_corner = torch.bmm(torch.bmm(R_second, corner[:, :h]), R_first).neg_()
        flush(R_corner)
        R, M = _grow(R, R_corner, h), _grow(M, corner[:, h:], h)
    return token_decay, p, s, b.mul_(s), R.view(rows, CHUNK, CHUNK), M.view(rows, CHUNK, CHUNK)


def decayed_reads(q: Tensor, k: Tensor, p: Tensor, h: int, out: Tensor) -> Tensor:
    """[blocks, 2h, K]: the decayed keys of the second half of each block of 2h tokens, then its decayed queries."""
    rows, _, K = q.shape
    decay = halves(p, h)[1]
    blocks = out.view(rows, CHUNK // (2 * h), 2, h, K)
    torch.mul(halves(k, h)[1], decay, out=blocks[:, :, 0])
    torch.mul(halves(q, h)[1], decay, out=blocks[:, :, 1])
    return out.view(-1, 2 * h, K)


def decayed_writes(b: Tensor, s: Tensor, h: int, out: Tensor) -> Tensor:
    """[blocks, h, K]: the decayed written keys of the first half of each block of 2h tokens."""
    torch.mul(halves(b, h)[0], halves(s, h)[0], out=out.view(b.shape[0], CHUNK // (2 * h), h, -1))
    return out.view(-1, h, b.shape[2])


def _grow(blocks: Tensor, corner: Tensor, h: int) -> Tensor:
    """Lower-triangular blocks of 2h from their two diagonal blocks of h and the corner between them."""
    first, second = blocks.view(-1, 2, h, h).unbind(1)
    out = blocks.new_zeros(first.shape[0], 2, h, 2, h)
    out[:, 0, :, 0], out[:, 1, :, 1], out[:, 1, :, 0] = first, second, corner
    return out.view(-1, 2 * h, 2 * h)
