"""The state of a short convolution: the last W inputs, which precede the tokens of the next call."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_state(x: Tensor, W: int, state: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Return the new state [N, D, W]: the last W inputs of each packed sequence, its history included."""
    N, D = cu_seqlens.shape[0] - 1, x.shape[2]
    history = x.new_zeros(N, W, D) if state is None else state.mT.to(x.dtype)
    back = torch.arange(-W, 0, device=x.device)
    lengths = cu_seqlens.diff()[:, None]
    inputs = x[0, (cu_seqlens[1:, None] + back).clamp(min=0)]  # [N, W, D]
    earlier = history.gather(1, (lengths + back + W).clamp(0, W - 1).long()[..., None].expand(-1, -1, D))
    return torch.where((lengths + back >= 0)[..., None], inputs, earlier).mT


def state_after(x: Tensor, W: int, state: Tensor | None, mask: Tensor | None) -> Tensor:
    """Return the new state [B, D, W] after x [B, T, D], T >= 0, without the convolution; not for packed sequences."""
    if mask is None and x.shape[1] >= W:
        return x[:, -W:].mT
    return with_history(x, W, state, mask)[0][:, -W:].mT


def with_history(x: Tensor, W: int, state: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the W inputs before x followed by x, [B, W + T, D], with all padding moved to the front, and positions.

    The positions [B, T, D] index the tokens of x in the result, for a gather; None if nothing was moved.
    """
    B, D = x.shape[0], x.shape[2]
    history = x.new_zeros(B, W, D) if state is None else state.mT.to(x.dtype)
    full = torch.cat((history, x), 1)
    if mask is None:
        return full, None
    real = torch.nn.functional.pad(mask, (W, 0), value=True)
    order = real.to(torch.uint8).argsort(dim=1, stable=True)
    place = order.argsort(dim=1)[:, W:, None].expand(-1, -1, D)
    return full.gather(1, order[..., None].expand(-1, -1, D)), place
