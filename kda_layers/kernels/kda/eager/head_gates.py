"""Chunk matrices and their gradients where all channels of a head have one gate; see `backends/eager.py`.

Decays between two tokens are then numbers, D_ij = e^{G_i-G_j}, and L and M are one matrix product each, times D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..contract import CHUNK
from .decays import flush, flush_decay

if TYPE_CHECKING:
    from .chunks import Chunks


def chunk_matrices(q: Tensor, k: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """The fields of `Chunks` from `token_decay` on, from the log-decays g [rows, 64, 1]."""
    D = _decays(g)
    token_decay = g.exp()
    p, s = token_decay[:, :1] * D[:, :, :1], D[:, -1, :, None]
    L, M = torch.bmm(k, b.mT).mul_(D), torch.bmm(q, b.mT).mul_(D)
    flush(L)
    flush(M)
    one = torch.eye(CHUNK, dtype=q.dtype, device=q.device).expand_as(L)
    R = torch.linalg.solve_triangular(L, one, upper=False, unitriangular=True)  # reads L below the diagonal only
    flush(R)
    return token_decay, p, s, R, M, L, D


def _decays(g: Tensor) -> Tensor:
    """D [rows, 64, 64] from log-decays g [rows, 64, 1].

    Column j sums the log-decays after token j alone: no difference of cumulative sums loses digits where gates reset.
    """
    later = g.expand(-1, -1, CHUNK).tril(-1)
    D = torch.cumsum(later, 1, out=later).exp_().tril_()
    flush_decay(D)
    return D


def matrix_grad(c: Chunks, d_corner: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, b and the log-decay through L and M below their diagonals.

    A pair of tokens i > j decays through every token t with j < t <= i. Its share of the log-decay's gradient is summed
    over exactly those pairs.
    """
    assert c.L is not None
    assert c.D is not None
    d_L, d_M = d_corner[:, :CHUNK], d_corner[:, CHUNK:]
    pairs = torch.mul(d_L, c.L).addcmul_(d_M, c.M).tril_(-1)
    before = torch.ones(CHUNK, CHUNK, dtype=pairs.dtype, device=pairs.device).triu_(1)
    d_g = torch.matmul(pairs, before).tril_().sum(1)  # [i, t]: the pairs of i with tokens before t
    D = c.D.tril(-1)
    d_L, d_M = d_L * D, d_M * D
    d_k, d_q = torch.bmm(d_L, c.b), torch.bmm(d_M, c.b)
    d_b = torch.bmm(d_L.mT, c.k).baddbmm_(d_M.mT, c.q)
    return d_q, d_k, d_b, d_g[..., None]
