"""The short convolution over a sequence that is cut over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..operator import Differentiable, Operator
from ..short_conv.op import short_convs
from .shards import Shards, check_contiguous


def short_convs_over_ranks(
    xs: Sequence[Tensor], weight: Tensor, shards: Shards, cu_seqlens: Tensor | None = None, backend: str | None = None
) -> list[Tensor]:
    """Apply `short_convs` to sequences that are cut over the ranks of a group; every rank passes its own tokens.

    The inputs before each piece come from the rank that has them. All ranks must call it, and its backward, in the same
    order. The gradient of the weight is partial: that of the sum of all ranks' losses is the sum over ranks.

    Args:
        xs: tensors [B, T, D_i] of this rank's tokens; T is the same on all ranks.
        weight: [D, W], whose channels are those of xs one after the other.
        shards: where the tokens lie in the sequence.
        cu_seqlens: [N + 1] offsets of the sequences packed along the tokens of all ranks, with contiguous shards.

    Returns:
        y_i [B, T, D_i].

    Raises:
        ValueError: T is no multiple of the number of pieces; a piece has fewer than W - 1 tokens; packed sequences with
            shards that are not contiguous.
    """
    W, pieces, (B, T) = weight.shape[1], shards.pieces, xs[0].shape[:2]
    if cu_seqlens is not None:
        check_contiguous(shards)
    if T % pieces:
        raise ValueError(
            f"hidden_states must have as many tokens in each of {pieces} pieces of a rank, got T = {T} tokens"
        )
    if T // pieces < W - 1:
        raise ValueError(
            f"hidden_states must have at least W - 1 = {W - 1} tokens in each of the {pieces} pieces of a rank, got "
            f"{T // pieces}: use fewer ranks"
        )
    rows = [x.reshape(B * pieces, T // pieces, x.shape[-1]) for x in xs]
    if W == 1:
        return [y.reshape(x.shape) for y, x in zip(short_convs(rows, weight, backend=backend)[0], xs, strict=True)]
    ends = torch.cat([x[:, 1 - W :] for x in rows], -1)
    ends = ends.unflatten(0, (B, pieces)).transpose(0, 1).contiguous()
    before = _inputs_before(_Ends(ends, shards.group, shards.order), ends.requires_grad and torch.is_grad_enabled(), "")
    halo, offsets = before.inputs.transpose(0, 1).flatten(0, 1), None
    if cu_seqlens is not None:
        start = shards.rank * T
        first = torch.searchsorted(cu_seqlens, cu_seqlens.new_tensor([start]), right=True) - 1
        others = torch.arange(start - W + 1, start, device=halo.device) < cu_seqlens[first]  # not the first one's here
        halo = halo.masked_fill(others[:, None], 0)
        offsets = (cu_seqlens - start).clamp(0, T)
        offsets = torch.where(offsets > 0, offsets + W - 1, offsets)
    widths = [x.shape[-1] for x in xs]
    rows = [torch.cat(both, 1) for both in zip(halo.split(widths, -1), rows, strict=True)]
    ys, _ = short_convs(rows, weight, cu_seqlens=offsets, keep_state=False, backend=backend)
    return [y[:, W - 1 :].reshape(x.shape) for y, x in zip(ys, xs, strict=True)]


class _Ends(NamedTuple):
    ends: Tensor  # [pieces, B, W - 1, D], the last inputs of each piece
    group: str
    order: str


class _Before(NamedTuple):
    inputs: Tensor  # like `ends`: those of the piece before, zeros before the first


class _Gradients(NamedTuple):
    ends: Tensor


class _Exchange(Differentiable):
    """Hands the ends of pieces on to the pieces after them."""

    def saved_like(self, x: _Ends) -> list[Tensor]:
        return []

    def forward(self, x: _Ends, save: bool) -> tuple[_Before, list[Tensor]]:
        shards = Shards.read(x.group, x.order)
        ends = shards.gathered(x.ends)
        return _Before(shards.own([torch.zeros_like(ends[0]), *ends[:-1]])), []

    def backward(self, x: _Ends, saved: list[Tensor], d_inputs: Tensor) -> _Gradients:
        shards = Shards.read(x.group, x.order)
        gradients = shards.gathered(d_inputs)
        return _Gradients(shards.own([*gradients[1:], torch.zeros_like(gradients[0])]))


class _Only:
    """A registry of one backend."""

    exchange = _Exchange()

    def backend(self, name: str) -> _Exchange:
        return self.exchange


_inputs_before: Operator[_Ends, _Before] = Operator(
    "inputs_before",
    _Ends,
    _Before,
    _Gradients,
    _Only(),
    lambda x: _Before(x.ends.new_empty(x.ends.shape)),
)
