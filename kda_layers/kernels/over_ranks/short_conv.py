"""The short convolution over a sequence that is cut over the ranks of a process group.

The W - 1 inputs before a piece, its halo, come from the rank that has them, and begin the state of an ordinary
convolution of the piece. They reach its first W - 1 outputs alone: their gradient is computed from these, and added to
that of the inputs they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import accumulator_dtype
from ..declarations import Backend
from ..fused.short_conv import SHORT_CONV, Gradients, Inputs, Outputs, choose, given, short_convs, silu_slope, three
from ..operator import Differentiable, NoGradOperator, Operator
from .shards import Shards, Wrapped, check_chain, check_contiguous


def short_convs_over_ranks(
    xs: Sequence[Tensor], weight: Tensor, shards: Shards, cu_seqlens: Tensor | None = None, backend: str | None = None
) -> list[Tensor]:
    """Apply `short_convs` to sequences that are cut over the ranks of a group; every rank passes its own tokens.

    All ranks must call it, and its backward, in the same order. The gradient of the weight is partial: that of the sum
    of all ranks' losses is the sum over ranks.

    Args:
        xs: up to three tensors [B, T, D_i] of this rank's tokens; T is the same on all ranks.
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
    check_chain(shards)
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
        ys, _ = short_convs(rows, weight, backend=backend)
    else:
        halo = shards.recall("convolution")
        if halo is None:
            with torch.no_grad():
                ends = torch.cat([x.detach()[:, 1 - W :] for x in rows], -1)
                halo = _halo(_Ends(ends, cu_seqlens, shards.group, shards.order, T), "")
            shards.remember("convolution", halo)
        x = _Inputs(*three(rows), weight, halo, cu_seqlens, shards.group, shards.order)
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*rows, weight))
        name = choose(backend, rows[0], weight, None)
        ys = given(_short_convs_over_ranks(x, needs_grad, name))
    return [y.reshape(x.shape) for y, x in zip(ys, xs, strict=False)]


class _Inputs(NamedTuple):
    x0: Tensor  # [B pieces, T / pieces, D_i]
    x1: Tensor | None
    x2: Tensor | None
    weight: Tensor
    halo: Tensor
    cu_seqlens: Tensor | None
    group: str
    order: str


class _OverRanks(Differentiable):
    """A form of the short convolution, over ranks."""

    def __init__(self, name: str, inner: Any):
        self.name, self.inner = name, inner

    def saved_like(self, x: _Inputs) -> list[Tensor]:
        return []

    def forward(self, x: _Inputs, save: bool) -> tuple[Outputs, list[Tensor]]:
        call = _Call(x)
        ys, _ = short_convs(call.xs, x.weight, call.state, call.offsets, keep_state=False, backend=self.name)
        return Outputs(*three([y.contiguous() for y in ys])), []

    def backward(self, x: _Inputs, saved: list[Tensor], *d_outputs: Tensor | None) -> Gradients:
        call = _Call(x)
        d_ys = [torch.zeros_like(t) if d is None else d for t, d in zip(call.xs, d_outputs, strict=False)]
        inputs = Inputs(*three(call.xs), call.weight, call.state, call.offsets)  # the state is a constant
        gradients = self.inner.backward(inputs, [], *d_ys)
        d_xs = given(gradients)
        d_ends = _shifted(call.halo_gradient(d_ys), call.shards, 1)
        for d_x, d_end in zip(d_xs, d_ends.split(call.widths, -1), strict=True):
            d_x[:, -d_end.shape[1] :] += d_end
        return Gradients(*three(d_xs), gradients.weight)


class _Call:
    """A call as an ordinary convolution of the local sequences, whose states begin with the halo."""

    def __init__(self, x: _Inputs):
        self.xs, self.weight, self.halo = given(x), x.weight, x.halo
        self.widths = [t.shape[2] for t in self.xs]
        self.shards, self.packed = Shards.read(x.group, x.order), None
        self.state, self.offsets = pad(x.halo.mT, (1, 0)), None
        if x.cu_seqlens is not None:
            self.packed = _Packed(x.cu_seqlens, self.shards, x.x0.shape[1], x.halo.shape[1])
            self.offsets, N = self.packed.offsets, x.cu_seqlens.shape[0] - 1
            none = self.state.new_zeros(N, *self.state.shape[1:])
            self.state = none.index_copy_(0, self.packed.first, self.state)

    def halo_gradient(self, d_ys: list[Tensor]) -> Tensor:
        """Return the gradient of the halo, [B pieces, W - 1, D] in the accumulator's dtype."""
        wide, n = accumulator_dtype(self.halo.dtype), self.halo.shape[1]
        head, d_y = (torch.cat([t[:, :n] for t in ts], -1).to(wide) for ts in (self.xs, d_ys))
        taps = self.weight.to(wide)
        z = (torch.cat((self.halo.to(wide), head), 1).unfold(1, n + 1, 1) * taps).sum(-1)
        d_z = d_y * silu_slope(z)
        if self.packed is not None:
            d_z = d_z.masked_fill(self.packed.unreached, 0)
        # Input j of the halo reaches output t <= j by tap j - t.
        d_halo = (pad(d_z, (0, 0, n, 0)).unfold(1, n + 1, 1) * taps.flip(1)).sum(-1)
        return d_halo if self.packed is None else d_halo.masked_fill(self.packed.of_others, 0)


class _Packed:
    """Position of a rank's slice, T tokens, among packed sequences.

    Attributes:
        offsets: [N + 1] of its tokens; sequences of other ranks are empty.
        first: [1], the number of the first token's sequence.
        of_others: [n, 1], True for tokens of the halo that are no part of that sequence.
        unreached: [n, 1], True for those of the slice's first n tokens that are no part of it.
    """

    def __init__(self, cu_seqlens: Tensor, shards: Shards, T: int, n: int):
        start = shards.rank * T
        # An index tensor of no dimension would make the host wait.
        self.first = torch.searchsorted(cu_seqlens, cu_seqlens.new_tensor([start]), right=True) - 1
        self.offsets = (cu_seqlens - start).clamp(0, T)
        token = torch.arange(n, device=cu_seqlens.device)
        self.of_others = (start - n + token < cu_seqlens[self.first])[:, None]
        self.unreached = (token >= self.offsets[self.first + 1])[:, None]


class _Ends(NamedTuple):
    ends: Tensor  # [B pieces, W - 1, D], the last inputs of each piece
    cu_seqlens: Tensor | None
    group: str
    order: str
    T: int  # tokens of a piece


def _shifted(rows: Tensor, shards: Shards, step: int) -> Tensor:
    """Return the tensors [B pieces, ...] of the pieces `step` places after those in `rows`."""
    pieces = rows.unflatten(0, (-1, shards.pieces)).transpose(0, 1).contiguous()
    return shards.shifted(pieces, step).transpose(0, 1).flatten(0, 1)


class _Exchange(Backend):
    """Hands the ends of pieces on to the pieces after them."""

    def halo(self, x: _Ends) -> Tensor:
        """Return the inputs before each piece, like `ends`, zeros before the first one."""
        shards = Shards.read(x.group, x.order)
        halo = _shifted(x.ends, shards, -1)
        if x.cu_seqlens is None:
            return halo
        return halo.masked_fill(_Packed(x.cu_seqlens, shards, x.T, halo.shape[1]).of_others, 0)


_halo: NoGradOperator[_Ends] = NoGradOperator(
    "short_convs_halo", _Ends, (), Wrapped(lambda _: _Exchange()), "halo", lambda x: x.ends.new_empty(x.ends.shape)
)
_short_convs_over_ranks: Operator[_Inputs, Outputs] = Operator(
    "short_convs_over_ranks",
    _Inputs,
    Outputs,
    Gradients,
    Wrapped(lambda name: _OverRanks(name, SHORT_CONV.backend(name))),
    lambda x: Outputs(*three([t.new_empty(t.shape) for t in given(x)])),
)
