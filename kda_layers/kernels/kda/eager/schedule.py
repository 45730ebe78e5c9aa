"""The schedule: which 64 tokens form each chunk, and which chunks are processed together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...checks import sequence_offsets
from ..contract import CHUNK, Inputs, state_dtype, state_shape

# Most elements of a segment's [.., 64, K] intermediate, and most chunks of a sequence. On a CPU 1 MiB in fp32 stays in
# L2; other devices compute on 16 MiB while the next operations are launched.
CPU_SEGMENT, DEVICE_SEGMENT = (2**18, 8), (2**22, 64)


def chunks_per_segment(x: Inputs) -> int:
    """Chunks of each sequence in a segment, from device and shapes alone: it determines the size of saved tensors."""
    elements, most = CPU_SEGMENT if x.q.device.type == "cpu" else DEVICE_SEGMENT
    N, HV, V, K = state_shape(x)
    per_chunk = N * HV * CHUNK * max(int(K), int(V))
    return torch.sym_max(1, torch.sym_min(most, elements // per_chunk))


def with_flat_tokens(x: Inputs) -> Inputs:
    """`x` with tensors [B, T, ...] whose dimensions (B, T) flatten without a copy."""

    def flat(t: Tensor) -> Tensor:
        return t if t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1) else t.contiguous()

    return x._replace(q=flat(x.q), k=flat(x.k), v=flat(x.v), g=flat(x.g), beta=flat(x.beta))


class Segment(NamedTuple):
    """Chunks `first`, `first + 1`, ... of every sequence that has them; R = sum(active) * HV rows."""

    first: int
    active: list[int]  # sequences (longest first) that have chunk first + i
    tokens: Tensor  # [sum(active) * 64] row of the flattened [B * T] tokens; 0 in padding
    padding: Tensor | None  # mask of `tokens` that are padding, or None

    def lanes(self, HV: int) -> Iterator[tuple[int, slice]]:
        """For each i, the rows of chunks `first + i` in the segment's [R, 64, .] tensors."""
        start = 0
        for i, a in enumerate(self.active):
            yield i, slice(start * HV, (start + a) * HV)
            start += a

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [sum(active), 64, ...], a new tensor; padding holds token 0."""
        return x.flatten(0, 1).index_select(0, self.tokens).view(-1, CHUNK, *x.shape[2:])

    def by_head(self, x: Tensor, factor: Tensor | float = 1.0, group: int = 1) -> Tensor:
        """[sum(active), 64, H, D] -> contiguous [R, 64, D], each head `group` times; 0 in padding.

        `factor`, a number or [sum(active), 64, H, 1], is multiplied in.
        """
        chunks, _, H, D = x.shape
        if isinstance(factor, Tensor):
            factor = factor.transpose(1, 2)[:, :, None]
        out = x.new_empty(chunks, H, group, CHUNK, D)
        torch.mul(x.transpose(1, 2)[:, :, None].expand(out.shape), factor, out=out)
        if self.padding is not None:
            out.masked_fill_(self.padding.view(chunks, 1, 1, CHUNK, 1), 0.0)
        return out.view(-1, CHUNK, D)

    def by_token(self, x: Tensor, HV: int) -> Tensor:
        """[R, 64, D] -> [real tokens, HV, D], without padding."""
        x = x.view(-1, HV, *x.shape[1:]).transpose(1, 2).flatten(0, 1)
        return x if self.padding is None else x[~self.padding]

    def real_tokens(self) -> Tensor:
        return self.tokens if self.padding is None else self.tokens[~self.padding]

    def scatter(self, out: Tensor, x: Tensor) -> None:
        """Write x [R, 64, D] to the tokens of out [B, T, HV, D]."""
        values = self.by_token(x, out.shape[2]).to(out.dtype)
        out.view(-1, *out.shape[2:]).index_copy_(0, self.real_tokens(), values)


class Plan(NamedTuple):
    """Sequences sorted longest first, so that those with a chunk c are a prefix of the state."""

    starts: Tensor | None  # [N] first token, on the CPU; None if not packed
    lengths: Tensor  # [N] on the CPU, descending
    order: Tensor | None  # [N] on the device, original index of each sorted sequence; None if not packed
    checkpoint_starts: Tensor  # [N] first checkpoint row, on the device
    chunks_per_segment: int
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
        return cls(starts, lengths, order, first, int(chunks_per_segment(x)), x.q.device)

    def segments(self) -> Iterator[Segment]:
        for first in range(0, self.chunks, self.chunks_per_segment):
            steps = range(first, min(first + self.chunks_per_segment, self.chunks))
            active = [int((self.lengths > c * CHUNK).sum()) for c in steps]
            if self.starts is None:
                tokens, padding = self._equal_tokens(steps)
            else:
                tokens, padding = self._packed_tokens(self.starts, steps, active)
            yield Segment(first, active, tokens, padding)

    @property
    def chunks(self) -> int:
        """Chunks of the longest sequence."""
        return -(-int(self.lengths[0]) // CHUNK)

    def _equal_tokens(self, steps: range) -> tuple[Tensor, Tensor | None]:
        """Tokens and padding of sequences of equal length, computed on the device: a CUDA graph can capture that."""
        T = int(self.lengths[0])
        place = torch.arange(steps.start * CHUNK, steps.stop * CHUNK, device=self.device).view(-1, 1, CHUNK)
        row = torch.arange(len(self.lengths), device=self.device).view(1, -1, 1)
        tokens = (place + row * T).flatten()
        if steps.stop * CHUNK <= T:
            return tokens, None
        padding = (place >= T).expand(-1, len(self.lengths), -1).flatten()
        return tokens.masked_fill_(padding, 0), padding

    def _packed_tokens(self, first: Tensor, steps: range, active: list[int]) -> tuple[Tensor, Tensor | None]:
        """The same of packed sequences with these first tokens, whose lengths only the host knows."""
        place = torch.arange(CHUNK, device="cpu")
        starts = torch.cat([first[:a] + c * CHUNK for a, c in zip(active, steps, strict=True)])
        left = torch.cat([self.lengths[:a] - c * CHUNK for a, c in zip(active, steps, strict=True)])
        tokens = (starts[:, None] + place).flatten()
        padding = (place >= left[:, None]).flatten()
        if not padding.any():
            return tokens.to(self.device), None
        return tokens.masked_fill_(padding, 0).to(self.device), padding.to(self.device)

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
        """Checkpoint rows of the sequences, a prefix, whose chunk `chunk` is full."""
        count = int((self.lengths >= (chunk + 1) * CHUNK).sum())
        return self.checkpoint_starts[:count] + chunk
