"""Plain PyTorch for any device and dtype, with masks; torch.compile fuses it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import accumulator_dtype
from ..contract import Backend
from ..history import packed_state, with_history


class EagerBackend(Backend):
    name = "eager"
    features = frozenset(("few_tokens", "masked"))
    transparent = True

    def convolve(
        self, x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        (_, T, D), W = x.shape, weight.shape[1]
        if cu_seqlens is None:
            full, place = with_history(x, W, state, mask)
            y = _convolve(full, weight)
            if place is None:
                return y[:, 1:], full[:, -W:].mT
            return y.gather(1, (place - W + 1).clamp(min=0)), full[:, -W:].mT

        N = cu_seqlens.shape[0] - 1
        history = x.new_zeros(N, W, D) if state is None else state.mT.to(x.dtype)
        # Concatenate all sequences, each preceded by its history of W tokens, to W N + T tokens.
        tokens = torch.arange(T, device=x.device)
        sequence = torch.searchsorted(cu_seqlens, tokens, right=True, out_int32=False)  # 1-based
        tokens = tokens + W * sequence
        columns = torch.arange(W, device=x.device)
        starts = cu_seqlens[:-1, None] + W * torch.arange(N, device=x.device)[:, None] + columns
        full = x.new_zeros(W * N + T, D).index_copy(0, starts.flatten().long(), history.flatten(0, 1))
        full = full.index_copy(0, tokens, x[0])
        y = _convolve(full[None], weight)[:, tokens - W + 1]
        return y, packed_state(x, W, state, cu_seqlens)


def _convolve(full: Tensor, weight: Tensor) -> Tensor:
    """Convolve [B, L, D] to [B, L - W + 1, D] in full's dtype, rounded once: one multiply-add for each tap."""
    W, length = weight.shape[1], full.shape[1] - weight.shape[1] + 1
    weight = weight.to(accumulator_dtype(weight.dtype))
    y = full[:, :length] * weight[:, 0]
    for i in range(1, W):
        y = torch.addcmul(y, full[:, i : i + length], weight[:, i])
    return torch.nn.functional.silu(y).to(full.dtype)


BACKEND = EagerBackend()
