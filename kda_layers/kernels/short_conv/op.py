"""Depthwise causal convolution over a few tokens, with SiLU: whole, packed or continued, with its state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import layer_kernels
from ..kda.contract import state_dtype


def short_convs(
    xs: Sequence[Tensor],
    weight: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    keep_state: bool = True,
    backend: str | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """`short_conv` of tensors xs [B, T, D_i] whose channels lie side by side in weight [D, W] and state [N, D, W].

    Returns:
        y_i [B, T, D_i], contiguous where that costs nothing, and the new state, or None without keep_state.
    """
    widths = [x.shape[-1] for x in xs]
    if mask is not None or layer_kernels.conv_refusals(
        xs[0]
    ):  # few large operations, as each of the plain form's is slow
        y, new = short_conv(torch.cat(tuple(xs), -1), weight, state, cu_seqlens, mask, backend)
        return list(y.split(widths, -1)), new if keep_state else None
    states = [None] * len(xs) if state is None else state.split(widths, 1)
    parts = [
        short_conv(x, w, s, cu_seqlens, None, backend) for x, w, s in zip(xs, weight.split(widths), states, strict=True)
    ]  # of its own each: neither copied together before nor apart after
    return [y for y, _ in parts], torch.cat([s for _, s in parts], 1) if keep_state else None


def short_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """SiLU of a depthwise causal convolution, y_t = silu(sum_i weight[:, i] x_{t - W + 1 + i}), and its new state.

    Args:
        x: [B, T, D], any float dtype; computed in fp32 (fp64 for fp64).
        weight: [D, W].
        state: [N, D, W], the last W inputs of each sequence before this call (zeros if None); not changed.
        cu_seqlens: [N + 1] integer offsets of the sequences packed along T (then B = 1), or None (then N = B).
        mask: [B, T] bool, True for real tokens; padding, where x must be 0, is skipped wherever it stands: real
            tokens see the W - 1 real ones before them. None for no padding. Not with cu_seqlens.
        backend: of the operator next to it: with 'eager', plain PyTorch here, too.

    Returns:
        y [B, T, D] in x's dtype, and the new state [N, D, W] in x's dtype.
    """
    _, T, D = x.shape
    W = weight.shape[1]
    if mask is None and not layer_kernels.conv_refusals(x, backend):
        y = layer_kernels.conv_silu(x, weight, state, cu_seqlens)
        return y, state_after(x, W, state, None) if cu_seqlens is None else _packed_state(x, W, state, cu_seqlens)
    if cu_seqlens is None:
        full, place = _with_history(x, W, state, mask)
        y = _convolve(full, weight)
        if place is None:
            return y[:, 1:], full[:, -W:].mT
        return y.gather(1, (place - W + 1).clamp(min=0)), full[:, -W:].mT

    N = cu_seqlens.shape[0] - 1
    history = x.new_zeros(N, W, D) if state is None else state.mT.to(x.dtype)
    # Every sequence, preceded by its W rows of history, in one row of W N + T tokens.
    tokens = torch.arange(T, device=x.device)
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True, out_int32=False)  # 1-based
    tokens = tokens + W * sequence
    columns = torch.arange(W, device=x.device)
    starts = cu_seqlens[:-1, None] + W * torch.arange(N, device=x.device)[:, None] + columns
    full = x.new_zeros(W * N + T, D).index_copy(0, starts.flatten().long(), history.flatten(0, 1))
    full = full.index_copy(0, tokens, x[0])
    y = _convolve(full[None], weight)[:, tokens - W + 1]
    return y, _packed_state(x, W, state, cu_seqlens)


def _packed_state(x: Tensor, W: int, state: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """[N, D, W]: the last W inputs of each packed sequence, its history included."""
    N, D = cu_seqlens.shape[0] - 1, x.shape[2]
    history = x.new_zeros(N, W, D) if state is None else state.mT.to(x.dtype)
    back = torch.arange(-W, 0, device=x.device)
    lengths = cu_seqlens.diff()[:, None]
    inputs = x[0, (cu_seqlens[1:, None] + back).clamp(min=0)]  # [N, W, D]
    earlier = history.gather(1, (lengths + back + W).clamp(0, W - 1).long()[..., None].expand(-1, -1, D))
    return torch.where((lengths + back >= 0)[..., None], inputs, earlier).mT


def state_after(x: Tensor, W: int, state: Tensor | None, mask: Tensor | None) -> Tensor:
    """The new state [B, D, W] of `short_conv` with W taps after x [B, T, D] alone, T >= 0; not for packed sequences."""
    if mask is None and x.shape[1] >= W:
        return x[:, -W:].mT
    return _with_history(x, W, state, mask)[0][:, -W:].mT


def _with_history(x: Tensor, W: int, state: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x after the W inputs before it, [B, W + T, D], with all padding moved before both; each token's place there.

    The places are [B, T, D] for a gather, or None where nothing was moved.
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


def _convolve(full: Tensor, weight: Tensor) -> Tensor:
    """[B, L, D] -> [B, L - W + 1, D] in full's dtype, rounded once: a multiply-add over the rows for each tap."""
    W, length = weight.shape[1], full.shape[1] - weight.shape[1] + 1
    weight = weight.to(state_dtype(weight.dtype))
    y = full[:, :length] * weight[:, 0]
    for i in range(1, W):
        y = torch.addcmul(y, full[:, i : i + length], weight[:, i])
    return torch.nn.functional.silu(y).to(full.dtype)
