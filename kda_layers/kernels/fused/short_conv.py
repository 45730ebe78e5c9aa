"""Depthwise causal convolution over a few tokens, with SiLU, for padded, packed or continued sequences.

B batch    T tokens    N sequences (B, or len(cu_seqlens) - 1 when packed)    D channels    W taps
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import accumulator_dtype
from ..declarations import OneOf
from ..kda.fla.package import chunk_table, layer_functions
from ..operator import Differentiable, Operator
from ..triton_package import FLOATS
from . import mechanism
from .mechanism import FLA, Forms, Plain, Triton, few_tokens


class Inputs(NamedTuple):
    """One to three tensors of one dtype, whose channels are concatenated in weight and state."""

    x0: Tensor  # [B, T, D0]
    x1: Tensor | None  # [B, T, D1]
    x2: Tensor | None  # [B, T, D2]
    weight: Tensor  # [D0 + D1 + D2, W]
    state: Tensor | None  # [N, D0 + D1 + D2, W], or W - 1 for Triton's kernels of packed sequences
    cu_seqlens: Tensor | None  # [N + 1] int32 or int64

    @property
    def xs(self) -> list[Tensor]:
        return given(self)


class Outputs(NamedTuple):
    """The outputs of a fused form, each like its input."""

    y0: Tensor
    y1: Tensor | None
    y2: Tensor | None


class Gradients(NamedTuple):
    """Gradients of the leading fields of `Inputs`."""

    x0: Tensor
    x1: Tensor | None
    x2: Tensor | None
    weight: Tensor


def given(x: Sequence[Any]) -> list[Tensor]:
    """Return those of the first three fields that are there."""
    return [t for t in x[:3] if t is not None]


def three(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return one to three tensors as the first three fields of a NamedTuple."""
    first, second, third = [*tensors, None, None][:3]
    assert first is not None
    return first, second, third


@dataclass(frozen=True)
class Problem(mechanism.Problem):
    """The facts of a call on which a form may decide."""

    masked: bool = False
    W: int = 4

    LABEL: ClassVar[str] = "short convolution"
    LACKS = {**mechanism.Problem.LACKS, "masked": "tokens are masked, needs mask=None"}  # noqa: RUF012

    def details(self) -> list[str]:
        return [f"W={self.W}"]


class _Plain(Plain):
    def backward(self, x: Inputs, saved: list[Tensor], *d_ys: Tensor) -> Gradients:
        """Return the gradients for callers that are no part of a graph, of calls without a mask."""
        xs, d_y, W, wide = torch.cat(x.xs, -1), torch.cat(d_ys, -1), x.weight.shape[1], accumulator_dtype(x.x0.dtype)
        if x.cu_seqlens is None:
            full, _ = _with_history(xs, W, x.state, None)
            places = torch.arange(W, full.shape[1], device=full.device)
        else:
            full, places = _in_a_row(xs, W, x.state, x.cu_seqlens)
        full, taps = full.to(wide), x.weight.to(wide)
        windows = full.unfold(1, W, 1)[:, places - W + 1]  # [B, T, D, W]
        d_z = d_y * silu_slope((windows * taps).sum(-1))
        d_weight = (d_z[..., None] * windows).sum((0, 1))
        B, L, D = full.shape
        d_z = full.new_zeros(B, L - W + 1, D).index_copy_(1, places - W + 1, d_z)
        d_full = (pad(d_z, (0, 0, W - 1, W - 1)).unfold(1, W, 1) * taps.flip(1)).sum(-1)
        d_xs = d_full[:, places].to(xs.dtype).split([t.shape[-1] for t in x.xs], -1)
        return Gradients(*three(d_xs), d_weight.to(x.weight.dtype))


class _Fused(Differentiable):
    def saved_like(self, x: Inputs) -> list[Tensor]:
        return []


class _Triton(_Fused, Triton):
    """One launch for all tensors each way."""

    serves = {"dtype": FLOATS, "W": OneOf(2, 3, 4)}  # noqa: RUF012

    def forward(self, x: Inputs, save: bool) -> tuple[Outputs, list[Tensor]]:
        from .triton.short_conv import forward

        return Outputs(*three(forward(x))), []

    def backward(self, x: Inputs, saved: list[Tensor], *d_ys: Tensor | None) -> Gradients:
        from .triton.short_conv import backward

        d_xs, d_weight = backward(x, _present(x, d_ys))
        return Gradients(*three(d_xs), d_weight)


class _FLA(_Fused, FLA):
    """A launch for each tensor. Inductor's kernel takes twice as long."""

    def forward(self, x: Inputs, save: bool) -> tuple[Outputs, list[Tensor]]:
        with torch.cuda.device(x.x0.device):
            ys = [layer_functions().causal_conv1d_fwd(**arguments)[0] for arguments in _arguments(x)]
        return Outputs(*three(ys)), []

    def backward(self, x: Inputs, saved: list[Tensor], *d_ys: Tensor | None) -> Gradients:
        d_xs, d_weights = [], []
        with torch.cuda.device(x.x0.device):
            for d_y, arguments in zip(_present(x, d_ys), _arguments(x), strict=True):
                d_x, d_weight, *_ = layer_functions().causal_conv1d_bwd(dy=d_y, dht=None, **arguments)
                d_xs.append(d_x)
                d_weights.append(d_weight)
        return Gradients(*three(d_xs), torch.cat(d_weights))


def _present(x: Inputs, d_ys: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients of the outputs, zeros for outputs that were not used."""
    return [torch.zeros_like(t) if d is None else d for t, d in zip(x.xs, d_ys, strict=False)]


def _arguments(x: Inputs) -> Iterator[dict[str, Any]]:
    """Yield the arguments of flash-linear-attention's convolution for each tensor."""
    table, widths = chunk_table(x.cu_seqlens, x.x0.shape[1]), [t.shape[-1] for t in x.xs]
    for t, weight, state in zip(x.xs, x.weight.split(widths), _split(x.state, widths), strict=True):
        yield {
            "x": t,
            "weight": weight.contiguous(),
            "bias": None,
            "residual": None,
            "initial_state": None if state is None else state.contiguous(),
            "activation": "silu",
            "cu_seqlens": x.cu_seqlens,
            "chunk_indices": table[0] if table else None,
        }


def _plain(
    x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    W = weight.shape[1]
    if cu_seqlens is None:
        full, place = _with_history(x, W, state, mask)
        y = _convolve(full, weight)
        if place is None:
            return y[:, 1:], full[:, -W:].mT
        return y.gather(1, (place - W + 1).clamp(min=0)), full[:, -W:].mT
    full, places = _in_a_row(x, W, state, cu_seqlens)
    return _convolve(full, weight)[:, places - W + 1], _packed_state(x, W, state, cu_seqlens)


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


def silu_slope(z: Tensor) -> Tensor:
    """Return the derivative of SiLU."""
    sigmoid = z.sigmoid()
    return sigmoid * (1 + z * (1 - sigmoid))


def _packed_state(x: Tensor, W: int, state: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Return the new state [N, D, W]: the last W inputs of each packed sequence, its history included."""
    N, D = cu_seqlens.shape[0] - 1, x.shape[2]
    history = x.new_zeros(N, W, D) if state is None else state.mT.to(x.dtype)
    if not x.shape[1]:
        return history.mT
    back = torch.arange(-W, 0, device=x.device)
    lengths = cu_seqlens.diff()[:, None]
    inputs = x[0, (cu_seqlens[1:, None] + back).clamp(min=0)]  # [N, W, D]
    earlier = history.gather(1, (lengths + back + W).clamp(0, W - 1).long()[..., None].expand(-1, -1, D))
    return torch.where((lengths + back >= 0)[..., None], inputs, earlier).mT


def state_after(x: Tensor, W: int, state: Tensor | None, mask: Tensor | None) -> Tensor:
    """Return the new state [B, D, W] after x [B, T, D], T >= 0, without the convolution; not for packed sequences."""
    if mask is None and x.shape[1] >= W:
        return x[:, -W:].mT
    return _with_history(x, W, state, mask)[0][:, -W:].mT


def _with_history(x: Tensor, W: int, state: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
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


SHORT_CONV = Forms("short_conv", Problem, _Plain(_plain), _Triton(), _FLA())
_short_conv: Operator[Inputs, Outputs] = Operator(
    "short_conv",
    Inputs,
    Outputs,
    Gradients,
    SHORT_CONV,
    lambda x: Outputs(*three([t.new_empty(t.shape) for t in x.xs])),
)


def short_convs(
    xs: Sequence[Tensor],
    weight: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    keep_state: bool = True,
    backend: str | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """Return y_t = silu(sum_i weight[:, i] x_{t - W + 1 + i}), depthwise causal convolutions, and their new state.

    Args:
        xs: one to three tensors [B, T, D_i] of one float dtype; computed in fp32 (fp64 for fp64).
        weight: [D, W], the channels of xs one after the other.
        state: [N, D, W], the last W inputs of each sequence before this call (zeros if None); not changed. Or without
            the first of them, which is not read: [N, D, W - 1].
        cu_seqlens: [N + 1] integer offsets of the sequences packed along T (then B = 1), or None (then N = B).
        mask: [B, T] bool, True for real tokens, which see the W - 1 real ones before them; xs must be 0 at
            padding, which may be anywhere. None for no padding. Not with cu_seqlens.
        keep_state: False for None in place of the new state.
        backend: name of a backend, used if it serves this call; None chooses.
        into: a pool of states [slots, D, W or W - 1] and the slots [N] to which the new ones of packed sequences are
            written, in place of being returned; what is written for an empty sequence is not defined. No gradients.

    Returns:
        y_i [B, T, D_i] in the dtype of xs, contiguous where that needs no copy, and the new state [N, D, W] or None.
    """
    widths, name = [x.shape[-1] for x in xs], choose(backend, xs[0], weight, mask, cu_seqlens is not None)
    in_triton = name == "triton" and cu_seqlens is not None and not torch.compiler.is_compiling()
    if state is not None and not in_triton and state.shape[2] < weight.shape[1]:
        state = pad(state, (1, 0))
    if name == "eager":  # plain PyTorch is fastest with few large operations
        y, new = SHORT_CONV.backend(name).run(torch.cat(tuple(xs), -1), weight, state, cu_seqlens, mask)
        return list(y.split(widths, -1)), _kept(new, into) if keep_state else None
    grads, W = torch.is_grad_enabled(), weight.shape[1]
    # The state, which gets no gradient, is copied: a cache overwrites it before the backward reads it.
    kept = state.detach().clone() if state is not None and grads else state
    inputs = Inputs(*three(xs), weight, kept, cu_seqlens)
    ys = given(_short_conv(inputs, grads and any(t.requires_grad for t in (*xs, weight)), name))
    if not keep_state:
        return ys, None
    if in_triton:
        assert cu_seqlens is not None
        from .triton.short_conv import packed_state

        new = None if into else xs[0].new_empty(cu_seqlens.shape[0] - 1, sum(widths), W)
        with torch.no_grad():
            packed_state(inputs, *(into or (new, None)))
        return ys, new
    parts = zip(xs, _split(state, widths), strict=True)
    if cu_seqlens is None:
        return ys, torch.cat([state_after(x, W, s, None) for x, s in parts], 1)
    return ys, _kept(torch.cat([_packed_state(x, W, s, cu_seqlens) for x, s in parts], 1), into)


def tokens_of_every_kernel(channels: int) -> list[int]:
    """Return the T of packed inputs [1, T, channels] that together launch every variant of the Triton kernels."""
    from .triton.short_conv import tokens_of_strips

    return tokens_of_strips(channels)


def _kept(new: Tensor, into: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """Return the new states, or write them to slots of a pool."""
    if into is None:
        return new
    pool, slots = into
    pool.index_copy_(0, slots.long(), new[..., -pool.shape[2] :].to(pool.dtype))
    return None


def short_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the results of `short_convs` for one tensor x [B, T, D]: y [B, T, D] and the new state [N, D, W]."""
    (y,), new = short_convs([x], weight, state, cu_seqlens, mask, backend=backend)
    assert new is not None
    return y, new


def choose(backend: str | None, x: Tensor, weight: Tensor, mask: Tensor | None, packed: bool = False) -> str:
    """Return the name of the form that serves a call."""
    W, few = operator.index(weight.shape[1]), few_tokens(x) and not packed  # whose plain form has many launches
    name: str = SHORT_CONV.choose(backend, x.device, x.dtype, few, mask is not None, W)
    return name


def _split(state: Tensor | None, widths: list[int]) -> Sequence[Tensor | None]:
    return [None] * len(widths) if state is None else state.split(widths, 1)
