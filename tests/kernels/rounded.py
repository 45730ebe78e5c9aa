"""KDA by chunks whose matrix products have 16-bit operands: what tensor cores make of an input, without their speed.

On most inputs this differs from the recurrence by a rounding or two. On some the chunk's triangular system amplifies
the rounding of its operands, which a kernel that feeds them to 16-bit matrix units has to pay. Everything else is
exact: sums and decays in fp64, the state never rounded but where it is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_layers import KDAOutput
from kda_layers.kernels.kda.contract import CHUNK, Inputs
from kda_layers.kernels.kda.reference import activate


class _RoundedInverse(torch.autograd.Function):
    """The inverse of unit lower triangular matrices; of its gradient's two products too the operands are rounded."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, r: Callable[[Tensor], Tensor]) -> Tensor:
        eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
        inverse = torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)
        ctx.r, ctx.inverse = r, inverse
        return inverse

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        T = ctx.r(ctx.inverse).mT
        return -(T @ ctx.r(ctx.r(d) @ T)), None


def rounded_chunks(x: Inputs, dtype: torch.dtype) -> KDAOutput:
    """o, final state and states at boundaries of unpacked fp64 inputs with one value head for each q/k head.

    The operands of every product are rounded to `dtype`, gradients included.
    """
    x = activate(x)
    B, T, H, K = x.q.shape
    V = x.v.shape[3]

    def r(t: Tensor) -> Tensor:
        return t.to(dtype).double()

    q, k, v = (r(t).transpose(1, 2) for t in (x.q, x.k, x.v))  # [B, H, T, .]
    g, beta = x.g.transpose(1, 2), x.beta.transpose(1, 2)[..., None]
    S = q.new_zeros(B, H, V, K) if x.initial_state is None else x.initial_state
    o, checkpoints = [], []
    for start in range(0, T, CHUNK):
        qc, kc, vc, gc, bc = (t[:, :, start : start + CHUNK] for t in (q, k, v, g, beta))
        C = qc.shape[2]
        p = gc.cumsum(2)
        # Decay from token j to token i of the chunk; where i < j the exponent is replaced before exp can overflow.
        lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
        decay = (p[:, :, :, None] - p[:, :, None]).masked_fill(~lower[..., None], -torch.inf).exp()
        Aqk = torch.einsum("bhik,bhijk,bhjk->bhij", qc, decay, kc)
        Akk = bc * torch.einsum("bhik,bhijk,bhjk->bhij", kc, decay, kc).tril(-1)
        eye = torch.eye(C, dtype=q.dtype, device=q.device)
        inverse = r(_RoundedInverse.apply(eye + Akk, r))
        W, U = r(inverse @ r(bc * kc * p.exp())), r(inverse @ r(bc * vc))
        E = r(U - W @ r(S).mT)
        o.append(x.scale * (r(qc * p.exp()) @ r(S).mT + r(Aqk) @ E))
        S = S * p[:, :, -1:].exp() + E.mT @ r(kc * (p[:, :, -1:] - p).exp())
        if C == CHUNK:
            checkpoints.append(S)
    return KDAOutput(
        r(torch.cat(o, 2).transpose(1, 2)),
        S if x.final_state else None,
        torch.stack(checkpoints, 1) if x.checkpoint_every else None,
    )
