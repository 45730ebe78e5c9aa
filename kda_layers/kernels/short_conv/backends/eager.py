"""Plain PyTorch for any device and dtype, with masks; torch.compile fuses it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...checks import accumulator_dtype
from ..contract import Backend, Gradients, Inputs, silu_slope
from ..history import packed_state, with_history


class EagerBackend(Backend):
    name = "eager"
    features = frozenset(("few_tokens", "masked"))
    transparent = True

    def convolve(
        self, x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        W = weight.shape[1]
        if cu_seqlens is None:
            full, place = with_history(x, W, state, mask)
            y = _convolve(full, weight)
            if place is None:
                return y[:, 1:], full[:, -W:].mT
            return y.gather(1, (place - W + 1).clamp(min=0)), full[:, -W:].mT

        full, places = _in_a_row(x, W, state, cu_seqlens)
        return _convolve(full, weight)[:, places - W + 1], packed_state(x, W, state, cu_seqlens)

    def backward(self, x: Inputs, saved: list[Tensor], d_y: Tensor) -> Gradients:
        """For callers that are no part of a graph, of calls without a mask."""
        W, wide = x.weight.shape[1], accumulator_dtype(x.x.dtype)
        if x.cu_seqlens is None:
            full, _ = with_history(x.x, W, x.state, None)
            places = torch.arange(W, full.shape[1], device=full.device)
        else:
            full, places = _in_a_row(x.x, W, x.state, x.cu_seqlens)
        full, taps = full.to(wide), x.weight.to(wide)
        windows = full.unfold(1, W, 1)[:, places - W + 1]  # [B, T, D, W]
        d_z = d_y * silu_slope((windows * taps).sum(-1))
        d_weight = (d_z[..., None] * windows).sum((0, 1))
        B, L, D = full.shape
        d_z = full.new_zeros(B, L - W + 1, D).index_copy_(1, places - W + 1, d_z)
        d_full = (pad(d_z, (0, 0, W - 1, W - 1)).unfold(1, W, 1) * taps.flip(1)).sum(-1)
        return Gradients(d_full[:, places].to(x.x.dtype), d_weight.to(x.weight.dtype))


def _in_a_row(x: Tensor, W: int, state: Tensor | None, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed sequences, each after its history of W tokens, [1, W N + T, D], and the places of x's tokens."""
    (_, T, D), N = x.shape, cu_seqlens.shape[0] - 1
    history = x.new_zeros(N, W, D) if state is None else state.mT.to(x.dtype)
    tokens = torch.arange(T, device=x.device)
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True, out_int32=False)  # 1-based
    tokens = tokens + W * sequence
    columns = torch.arange(W, device=x.device)
    starts = cu_seqlens[:-1, None] + W * torch.arange(N, device=x.device)[:, None] + columns
    full = x.new_zeros(W * N + T, D).index_copy(0, starts.flatten().long(), history.flatten(0, 1))
    return full.index_copy(0, tokens, x[0])[None], tokens


def _convolve(full: Tensor, weight: Tensor) -> Tensor:
    """Convolve [B, L, D] to [B, L - W + 1, D] in full's dtype, rounded once: one multiply-add for each tap."""
    W, length = weight.shape[1], full.shape[1] - weight.shape[1] + 1
    weight = weight.to(accumulator_dtype(weight.dtype))
    y = full[:, :length] * weight[:, 0]
    for i in range(1, W):
        y = torch.addcmul(y, full[:, i : i + length], weight[:, i])
    return torch.nn.functional.silu(y).to(full.dtype)


BACKEND = EagerBackend()
