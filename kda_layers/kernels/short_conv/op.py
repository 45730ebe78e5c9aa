"""Depthwise causal convolution over a few tokens, with SiLU, for padded, packed or continued sequences."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..fla.layer import few_tokens
from ..operator import Operator
from .contract import Gradients, Inputs, Outputs, TripleGradients, TripleInputs, TripleOutputs
from .dispatch import SHORT_CONV
from .history import packed_state, state_after

__all__ = ["choose", "short_conv", "short_convs", "state_after"]

_short_conv: Operator[Inputs, Outputs] = Operator(
    "short_conv", Inputs, Outputs, Gradients, SHORT_CONV, lambda x: Outputs(x.x.new_empty(x.x.shape))
)
_short_conv_triple: Operator[TripleInputs, TripleOutputs] = Operator(
    "short_conv_triple",
    TripleInputs,
    TripleOutputs,
    TripleGradients,
    SHORT_CONV,
    lambda x: TripleOutputs(*(t.new_empty(t.shape) for t in x[:3])),
)


def short_convs(
    xs: Sequence[Tensor],
    weight: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    keep_state: bool = True,
    backend: str | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """Apply `short_conv` to tensors xs [B, T, D_i] whose channels are concatenated in weight [D, W], state [N, D, W].

    Returns:
        y_i [B, T, D_i], contiguous where that needs no copy, and the new state, or None without keep_state.
    """
    widths = [x.shape[-1] for x in xs]
    name, transparent = choose(backend, xs[0], weight, mask)
    if transparent:  # plain PyTorch is fastest with few large operations
        y, new = short_conv(torch.cat(tuple(xs), -1), weight, state, cu_seqlens, mask, backend)
        return list(y.split(widths, -1)), new if keep_state else None
    if len(xs) == 3 and SHORT_CONV.backend(name).together and xs[0].dtype == xs[1].dtype == xs[2].dtype:
        grads = torch.is_grad_enabled()
        inputs = TripleInputs._make((*xs, weight, _kept(state, grads), cu_seqlens))
        ys = _short_conv_triple(inputs, grads and any(t.requires_grad for t in inputs[:4]), name)
        if not keep_state:
            return list(ys), None
        last = [_new_state(x, weight.shape[1], s, cu_seqlens) for x, s in zip(xs, _split(state, widths), strict=True)]
        return list(ys), torch.cat(last, 1)
    weights = weight.split(widths)  # one call for each tensor needs no copy to concatenate and to split them
    parts = [
        short_conv(x, w, s, cu_seqlens, None, backend)
        for x, w, s in zip(xs, weights, _split(state, widths), strict=True)
    ]
    return [y for y, _ in parts], torch.cat([s for _, s in parts], 1) if keep_state else None


def short_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y_t = silu(sum_i weight[:, i] x_{t - W + 1 + i}), a depthwise causal convolution, and its new state.

    Args:
        x: [B, T, D], any float dtype; computed in fp32 (fp64 for fp64).
        weight: [D, W].
        state: [N, D, W], the last W inputs of each sequence before this call (zeros if None); not changed.
        cu_seqlens: [N + 1] integer offsets of the sequences packed along T (then B = 1), or None (then N = B).
        mask: [B, T] bool, True for real tokens, which see the W - 1 real ones before them; x must be 0 at
            padding, which may be anywhere. None for no padding. Not with cu_seqlens.
        backend: name of a backend, used if it serves this call; None chooses.

    Returns:
        y [B, T, D] in x's dtype, and the new state [N, D, W] in x's dtype.
    """
    name, transparent = choose(backend, x, weight, mask)
    if transparent:
        return SHORT_CONV.backend(name).convolve(x, weight, state, cu_seqlens, mask)
    grads = torch.is_grad_enabled()
    inputs = Inputs(x, weight, _kept(state, grads), cu_seqlens)
    y = _short_conv(inputs, grads and (x.requires_grad or weight.requires_grad), name).y
    return y, _new_state(x, weight.shape[1], state, cu_seqlens)


def choose(backend: str | None, x: Tensor, weight: Tensor, mask: Tensor | None) -> tuple[str, bool]:
    """Return the name of the backend that serves a call, and True if it is transparent."""
    W = operator.index(weight.shape[1])
    return SHORT_CONV.choose(backend, x.device, x.dtype, few_tokens(x), mask is not None, W)


def _kept(state: Tensor | None, grads: bool) -> Tensor | None:
    """Copy the state, which gets no gradient: a cache overwrites it before the backward reads it."""
    return state.detach().clone() if state is not None and grads else state


def _split(state: Tensor | None, widths: list[int]) -> Sequence[Tensor | None]:
    return [None] * len(widths) if state is None else state.split(widths, 1)


def _new_state(x: Tensor, W: int, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    return state_after(x, W, state, None) if cu_seqlens is None else packed_state(x, W, state, cu_seqlens)
