"""The schedule: which tokens form each chunk, and which chunks are processed together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...checks import sequence_offsets
from ..contract import CHUNK, Inputs, state_dtype, state_shape

# Most elements of a segment's [.., C, K] intermediate, and most tokens of a sequence. On a CPU 1 MiB in fp32 stays in
# cache; other devices compute on 16 MiB while the next operations are launched.
CPU_SEGMENT, DEVICE_SEGMENT = (2**18, 512), (2**22, 4096)
# Tokens of a chunk with one gate a head on a CPU: fewer operations than with 64. With 16 the forward is as fast, and
# training slower, as products are smaller. Other devices would wait for launches.
CPU_HEAD_CHUNK = 32


class Sizes(NamedTuple):
    """Tokens of a chunk and of a sequence's segment.

    They depend on device and shapes alone, and determine the size of saved tensors.
    """

    chunk: int
    segment: int

    @classmethod
    def of(cls, x: Inputs) -> Sizes:
        on_cpu, (N, HV, V, K) = x.q.device.type == "cpu", state_shape(x)
        chunk = CPU_HEAD_CHUNK if on_cpu and x.g.shape[3] != K else CHUNK
        elements, most = CPU_SEGMENT if on_cpu else DEVICE_SEGMENT
        chunks = torch.sym_min(most // chunk, elements // (N * HV * chunk * max(int(K), int(V))))
        return cls(chunk, chunk * torch.sym_max(1, chunks))


def with_flat_tokens(x: Inputs) -> Inputs:
    """`x` with tensors [B, T, ...] whose dimensions (B, T) flatten without a copy."""

    def flat(t: Tensor) -> Tensor:
        return t if t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1) else t.contiguous()

    return x._replace(q=flat(x.q), k=flat(x.k), v=flat(x.v), g=flat(x.g), beta=flat(x.beta))


class Segment(NamedTuple):
    """Chunks `first`, `first + 1`, ... of every sequence that has them; R = sum(active) * HV rows."""

    first: int
    active: list[int]  # sequences (longest first) that have chunk first + i
    chunk: int  # tokens of a chunk, C below
    tokens: Tensor  # [sum(active) * C] row of the flattened [B * T] tokens; 0 in padding
    padding: Tensor | None  # mask of `tokens` that are padding, or None
    span: slice | None = None  # `tokens` as a slice of every row of the batch, which is read in place, or None

    def lanes(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """For each i, the rows of chunks `first + i` of tensors [R, ...]."""
        heads = tensors[0].shape[0] // sum(self.active)
        return zip(*(t.split([a * heads for a in self.active]) for t in tensors), strict=True)

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [..., C, ...], `sum(active)` chunks in one or two dimensions; padding holds token 0."""
        if self.span is not None:
            return x[:, self.span].unflatten(1, (-1, self.chunk)).transpose(0, 1)
        return x.flatten(0, 1).index_select(0, self.tokens).view(-1, self.chunk, *x.shape[2:])

    def by_head(self, x: Tensor, factor: Tensor | float = 1.0, group: int = 1, out: Tensor | None = None) -> Tensor:
        """[..., C, H, D] -> contiguous [R, C, D], each head `group` times; 0 in padding.

        `factor`, a number or [..., C, H, 1], is multiplied in. `out` [R, C, D] may be rows of a wider tensor.
        """
        H, D = x.shape[-2:]
        if isinstance(factor, Tensor):
            factor = factor.transpose(-3, -2).unsqueeze(-3)
        x = x.transpose(-3, -2).unsqueeze(-3)
        if out is None:
            out = x.new_empty(sum(self.active) * H * group, self.chunk, D)
        rows = out.unflatten(0, (*x.shape[:-3], group))
        torch.mul(x.expand(rows.shape), factor, out=rows)
        if self.padding is not None:
            out.unflatten(0, (-1, H * group)).masked_fill_(self.padding.view(-1, 1, self.chunk, 1), 0.0)
        return out

    def by_token(self, x: Tensor, HV: int) -> Tensor:
        """[R, C, D] -> [real tokens, HV, D], without padding."""
        x = x.view(-1, HV, *x.shape[1:]).transpose(1, 2).flatten(0, 1)
        return x if self.padding is None else x[~self.padding]

    def real_tokens(self) -> Tensor:
        return self.tokens if self.padding is None else self.tokens[~self.padding]

    def scatter(self, out: Tensor, x: Tensor) -> None:
        """Write x [R, C, D] to the tokens of out [B, T, HV, D]."""
        HV = out.shape[2]
        if self.span is not None:
            self.gather(out).copy_(x.unflatten(0, (-1, out.shape[0], HV)).transpose(2, 3))
            return
        values = self.by_token(x, HV).to(out.dtype)
        out.view(-1, *out.shape[2:]).index_copy_(0, self.real_tokens(), values)


class Plan(NamedTuple):
    """Sequences sorted longest first, so that those with a chunk c are a prefix of the state."""

    starts: Tensor | None  # [N] first token, on the CPU; None if not packed
    lengths: Tensor  # [N] on the CPU, descending
    order: Tensor | None  # [N] on the device, original index of each sorted sequence; None if not packed
    checkpoint_starts: Tensor  # [N] first checkpoint row, on the device
    sizes: Sizes
    device: torch.device

    @classmethod
    def of(cls, x: Inputs) -> Plan:
        B, T = x.q.shape[:2]
        if x.cu_seqlens is None:
            starts = order = None
            lengths = torch.full((B,), T, device="cpu")
            first = torch.arange(B, device=x.q.device) * (T // CHUNK)
        else:
            offsets = torch.tensor(sequence_offsets(x.cu_seqlens, T), device="cpu")
            lengths, by_length = offsets.diff().sort(descending=True, stable=True)
            starts, order = offsets[:-1][by_length], by_length.to(x.q.device)
            counts = offsets.diff() // CHUNK
            first = (counts.cumsum(0) - counts)[by_length].to(x.q.device)
        return cls(starts, lengths, order, first, Sizes(*map(int, Sizes.of(x))), x.q.device)

    def segments(self) -> Iterator[Segment]:
        C, count = self.sizes.chunk, self.sizes.segment // self.sizes.chunk
        chunks = -(-int(self.lengths[0]) // C)  # of the longest sequence
        for first in range(0, chunks, count):
            steps = range(first, min(first + count, chunks))
            starts = torch.arange(steps.start, steps.stop, device="cpu") * C
            active = (self.lengths[:, None] > starts).sum(0).tolist()
            if self.starts is None:
                yield self._equal(steps, active)
            else:
                yield self._packed(self.starts, steps, active)

    def _equal(self, steps: range, active: list[int]) -> Segment:
        """Sequences of equal length. Their tokens are computed on the device: a CUDA graph can capture that."""
        C, T = self.sizes.chunk, int(self.lengths[0])
        span = slice(steps.start * C, steps.stop * C)
        place = torch.arange(span.start, span.stop, device=self.device).view(-1, 1, C)
        row = torch.arange(len(self.lengths), device=self.device).view(1, -1, 1)
        tokens = (place + row * T).flatten()
        if span.stop <= T:
            return Segment(steps.start, active, C, tokens, None, span)
        padding = (place >= T).expand(-1, len(self.lengths), -1).flatten()
        return Segment(steps.start, active, C, tokens.masked_fill_(padding, 0), padding)

    def _packed(self, starts: Tensor, steps: range, active: list[int]) -> Segment:
        """Packed sequences with these first tokens, whose lengths only the host knows."""
        C = self.sizes.chunk
        place = torch.arange(C, device="cpu")
        first = torch.cat([starts[:a] + c * C for a, c in zip(active, steps, strict=True)])
        left = torch.cat([self.lengths[:a] - c * C for a, c in zip(active, steps, strict=True)])
        tokens = (first[:, None] + place).flatten()
        padding = (place >= left[:, None]).flatten()
        if not padding.any():
            return Segment(steps.start, active, C, tokens.to(self.device), None)
        tokens.masked_fill_(padding, 0)
        return Segment(steps.start, active, C, tokens.to(self.device), padding.to(self.device))

    def sort(self, state: Tensor) -> Tensor:
        """A contiguous copy in sorted order."""
        if self.order is None:
            return state.clone(memory_format=torch.contiguous_format)
        return state[self.order].contiguous()

    def unsort(self, state: Tensor) -> Tensor:
        return state if self.order is None else torch.empty_like(state).index_copy_(0, self.order, state)

    def initial_state(self, x: Inputs) -> Tensor:
        """A new tensor [N, HV, V, K] in sorted order."""
        if x.initial_state is not None:
            return self.sort(x.initial_state)
        return x.q.new_zeros(state_shape(x), dtype=state_dtype(x.q.dtype))

    def checkpoint_rows(self, chunk: int) -> Tensor:
        """Checkpoint rows of the sequences, a prefix, that have a boundary state after chunk `chunk`."""
        end = (chunk + 1) * self.sizes.chunk
        count = 0 if end % CHUNK else int((self.lengths >= end).sum())
        return self.checkpoint_starts[:count] + (end // CHUNK - 1)
