"""Chunk matrices and their gradients where all channels of a head have one gate; see `backends/eager.py`.

Decays between two tokens are then numbers, D_ij = e^{G_i-G_j}, and L and M are one matrix product each, times D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .decays import flush, flush_decay

if TYPE_CHECKING:
    from .chunks import Chunks


def chunk_matrices(kq: Tensor, beta: Tensor, g: Tensor, group: int) -> tuple[Tensor, ...]:
    """The fields of `Chunks` from `token_decay` on, from the log-decays g [rows, C, 1].

    `group` consecutive rows of kq are one key head's: their value heads share its products.
    """
    D, C = _decays(g), g.shape[1]
    token_decay = g.exp()
    p, s = token_decay[:, :1] * D[:, :, :1], D[:, -1, :, None]
    writes = kq[:, :C] * (s * beta)
    of_head = kq.unflatten(0, (-1, group))[:, 0]
    LM = torch.bmm(of_head, of_head[:, :C].mT).view(-1, 1, 2, C, C)
    LM = (LM * (D * beta.mT).view(-1, group, 1, C, C)).view(-1, 2 * C, C)
    flush(LM)
    L, M = LM.chunk(2, 1)
    one = torch.eye(C, dtype=L.dtype, device=L.device).expand_as(L)
    R = torch.linalg.solve_triangular(L, one, upper=False, unitriangular=True)  # reads L below the diagonal only
    flush(R)
    return token_decay, p, s, writes, R, M, L, D


def _decays(g: Tensor) -> Tensor:
    """D [rows, C, C] from log-decays g [rows, C, 1].

    Column j sums the log-decays after token j alone: no difference of cumulative sums loses digits where gates reset.
    """
    later = g.expand(-1, -1, g.shape[1]).tril(-1)
    D = torch.cumsum(later, 1, out=later).exp_().tril_()
    flush_decay(D)
    return D


def matrix_grad(c: Chunks, b: Tensor, d_corner: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, b and the log-decay through L and M below their diagonals.

    A pair of tokens i > j decays through every token t with j < t <= i. Its share of the log-decay's gradient is summed
    over exactly those pairs.
    """
    assert c.L is not None
    assert c.D is not None
    d_L, d_M = d_corner.chunk(2, 1)
    pairs = torch.mul(d_L, c.L).addcmul_(d_M, c.M).tril_(-1)
    before = torch.ones_like(pairs[0]).triu_(1)
    d_g = torch.matmul(pairs, before).tril_().sum(1)  # [i, t]: the pairs of i with tokens before t
    D = c.D.tril(-1)
    d_L, d_M = d_L * D, d_M * D
    d_k, d_q = torch.bmm(d_L, b), torch.bmm(d_M, b)
    d_b = torch.bmm(d_L.mT, c.k).baddbmm_(d_M.mT, c.q)
    return d_q, d_k, d_b, d_g[..., None]
