"""Chunk matrices and their gradients where all channels of a head have one gate; see `backends/eager.py`.

Decays between two tokens are then numbers, D_ij = e^{G_i-G_j}, and L and M are one matrix product each, times D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..contract import CHUNK
from .decays import flush, halves, levels

if TYPE_CHECKING:
    from .chunks import Chunks


def chunk_matrices(q: Tensor, k: Tensor, b: Tensor, token_decay: Tensor) -> tuple[Tensor, ...]:
    """p, s, R, M, L and D of each chunk; D by binary anchoring, so that it has no differences of cumulative sums."""
    rows = q.shape[0]
    D = torch.eye(CHUNK, dtype=q.dtype, device=q.device).repeat(rows, 1, 1)
    for h, p, s in levels(token_decay):
        if h == CHUNK:
            break
        (_, from_middle), (to_middle, _) = halves(p, h), halves(s, h)
        torch.mul(from_middle, to_middle.mT, out=_corners(D, h))
    L, M = torch.bmm(k, b.mT).mul_(D), torch.bmm(q, b.mT).mul_(D)
    flush(L)
    flush(M)
    one = torch.eye(CHUNK, dtype=q.dtype, device=q.device).expand_as(L)
    R = torch.linalg.solve_triangular(L, one, upper=False, unitriangular=True)  # reads L below the diagonal only
    flush(R)
    return p, s, R, M, L, D


def _corners(x: Tensor, h: int) -> Tensor:
    """Lower left quarters [rows, 64 / 2h, h, h] of the diagonal blocks of 2h tokens of x [rows, 64, 64]."""
    n = CHUNK // (2 * h)
    return x.view(x.shape[0], n, 2, h, n, 2, h)[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


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
