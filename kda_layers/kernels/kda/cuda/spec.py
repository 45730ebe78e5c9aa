"""Shared by the kernels over whole sequences: dtypes and widths, what the forward saves, the signature of a call."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...cuda.machine import Launchable, Machine
from ..contract import CHUNK, Inputs, KDAOutput, PrefillInputs

TYPES = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
FINE = (torch.bfloat16,)  # where fine gradients differ: in fp16 T' has 11 bits anyway
WIDTHS = (128, 64)
MOST_TOKENS = 2**31 - 1
PLANS = 4096  # cached
TAIL = 4  # tokens after the whole chunks of a sequence that the decode kernel computes, at most (last_tokens.py)


def stage_bytes(K: int) -> int:
    """Size in bytes of one prepared chunk, struct Stage of stage.cuh."""
    return 3 * CHUNK * K * 2 + 2 * CHUNK * CHUNK * 2 + 4 * (K + CHUNK)


def in_chunks(T: int, tails: bool) -> int:
    """Number of a sequence's T tokens that are in chunks: with `tails`, not its last ones (last_tokens.py)."""
    return T - T % CHUNK if tails and T % CHUNK <= TAIL else T


class Cut(NamedTuple):
    """Cuts of sequences into segments, by their own length and number of value heads alone."""

    longer: int  # tokens from which a sequence is cut
    shortest: int = 1024  # tokens of a segment
    tiles: int = 64  # heads times segments of a sequence, about: with two blocks each they fill a GPU
    auto: bool = False  # not asked for: only what gains

    def segment_tokens(self, length: int, heads: int) -> int:
        """Tokens of a segment of a sequence that is cut: a power of two."""
        tokens = self.shortest
        while tokens * self.tiles < length * heads:
            tokens *= 2
        return tokens

    def most_segments(self, tokens: int, heads: int, packed: bool) -> int:
        """Segments of a sequence of `tokens`; if packed, at least those of any sequence of at most so many."""
        if packed:
            return max(1, min(-(-self.tiles // heads), -(-tokens // self.shortest)))
        return -(-tokens // self.segment_tokens(tokens, heads)) if tokens >= self.longer else 1

    def rows(self, x: Inputs, tails: bool = False) -> int:
        """At least the segments of all sequences that are cut, times the value heads."""
        (B, T, HV), packed = x.v.shape[:3], x.cu_seqlens is not None
        tokens = T if packed else in_chunks(T, tails)
        return (T // self.longer if packed else B) * self.most_segments(tokens, HV, packed) * HV

    def defines(self, part: int) -> dict[str, str | int]:
        """Macros of kernels that see segments, in the form `part` of stage.cuh's SEGMENTS."""
        return {"SEGMENTS": part, "SEGMENT_TOKENS": self.shortest, "SEGMENT_TILES": self.tiles}


AUTO_TOKENS, AUTO_HEADS = 2**16, 4  # what "auto" cuts: so many tokens or more of so few heads, measured
ALWAYS, AUTO = Cut(1024 + 1), Cut(AUTO_TOKENS, auto=True)


def cut_of(x: Inputs) -> Cut:
    """The cut of a call whose sequences are cut."""
    return AUTO if x.segments == "auto" else ALWAYS


class Rows(NamedTuple):
    """Strides, in elements, and sizes of a call of an engine, as ForwardParams has them."""

    key_row: int  # stride of tokens of q and k
    value_row: int  # of v
    beta_row: int
    int64_slots: int
    int64_stops: int
    slot_count: int
    slot_stride: int


class Signature(NamedTuple):
    """Everything of a call that chooses the form of its forward and fills the parameters, except addresses."""

    device: torch.device
    dtype: torch.dtype
    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    q_shape: tuple[int, ...]  # [B, T, H, K]
    v_shape: tuple[int, ...]  # [B, T, HV, V]
    offsets: tuple[int, torch.dtype] | None  # length and dtype of cu_seqlens
    gate_activation: str
    lower_bound: float
    beta_activation: str
    qk_l2norm: bool
    scale: float
    initial_state: bool
    final_state: bool
    checkpoints: bool
    cut: Cut | None = None  # None: sequences stay whole
    saves: bool = False  # what the backward reads
    fine: bool = False  # T' in fp16, too
    tails: bool = False  # the decode kernel computes last tokens
    rows: Rows | None = None  # of an engine: states in slots of a pool, rows of tokens with strides

    @classmethod
    def of(cls, x: Inputs, saves: bool = False, tails: bool = False) -> Signature:
        """Return the signature of a call of `kda`."""
        cut = None if x.segments == "never" else cut_of(x)
        states = x.initial_state is not None, x.final_state, x.checkpoint_every > 0
        return cls._make((*_common(x), *states, cut, saves, saves and is_fine(x), tails, None))

    @classmethod
    def of_prefill(cls, x: PrefillInputs, rows: Rows, tails: bool) -> Signature:
        """Return the signature of a call of `kda_prefill`."""
        states = x.state is not None, x.state is not None, x.checkpoint_at is not None
        return cls._make((*_common(x), *states, None, False, False, tails, rows))

    @property
    def packed(self) -> bool:
        return self.offsets is not None

    @property
    def sequences(self) -> int:
        return self.q_shape[0] if self.offsets is None else self.offsets[0] - 1

    @property
    def g_wide(self) -> bool:
        """True if g is fp32."""
        return self.g_dtype == torch.float32

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[N, HV, V, K]."""
        return self.sequences, self.v_shape[2], self.v_shape[3], self.q_shape[3]


def _common(x: Inputs | PrefillInputs) -> tuple[Any, ...]:
    """Return the fields of a `Signature` before the states."""
    offsets = None if x.cu_seqlens is None else (x.cu_seqlens.shape[0], x.cu_seqlens.dtype)
    return (
        x.q.device, x.q.dtype, x.g.dtype, x.beta.dtype, x.q.shape, x.v.shape, offsets, x.gate_activation, x.lower_bound,
        x.beta_activation, x.qk_l2norm, x.scale,
    )  # fmt: skip


class LastTokens(NamedTuple):
    """Tensors of a call whose last tokens the decode kernel computes."""

    order: Tensor | None = None  # what order.cu writes
    before: Tensor | None = None  # fp32 [sequences in that order, HV, V, K], states before last tokens, out


ALL_IN_CHUNKS = LastTokens()


class Saved(NamedTuple):
    """The tensors that the forward saves for the backward; NC = `chunk_rows`."""

    prepared: Tensor  # [NC, HV, stage_bytes] uint8
    states: Tensor  # [NC, HV, V, K], at each chunk's start
    errors: Tensor  # [B, T, HV, V], V'
    fine: Tensor | None = None  # [NC, HV, 2 * 64 * 64] uint8, T' in fp16 for fine gradients

    @classmethod
    def like(cls, x: Inputs) -> Saved:
        """Unwritten tensors for inputs `x`."""
        (*_, K), (HV, V) = x.q.shape, x.v.shape[2:]
        rows = chunk_rows(x)
        prepared = x.q.new_empty(rows, HV, stage_bytes(K), dtype=torch.uint8)
        fine = x.q.new_empty(rows, HV, 2 * CHUNK * CHUNK, dtype=torch.uint8) if is_fine(x) else None
        return cls(prepared, x.q.new_empty(rows, HV, V, K), torch.empty_like(x.v), fine)

    @staticmethod
    def nbytes(x: Inputs) -> int:
        """Size in bytes of all of them."""
        K, (B, T, HV, V) = x.q.shape[3], x.v.shape
        fine = 2 * CHUNK * CHUNK if is_fine(x) else 0
        return chunk_rows(x) * HV * (stage_bytes(K) + V * K * 2 + fine) + B * T * HV * V * 2

    def tensors(self) -> list[Tensor]:
        """The tensors that exist, in the order of the fields."""
        return [t for t in self if t is not None]


def is_fine(x: Inputs) -> bool:
    """True if the backward of a call reads T' in fp16."""
    return x.fine_gradients and x.q.dtype in FINE


def chunk_rows(x: Inputs) -> int:
    """Number of chunks of all sequences; if packed an upper bound, as only the GPU knows their lengths."""
    B, T = x.q.shape[:2]
    return B * -(-T // CHUNK) if x.cu_seqlens is None else T // CHUNK + x.cu_seqlens.shape[0] - 1


def new_outputs(x: Inputs, state_shape: tuple[int, ...]) -> KDAOutput:
    """Return memory for the outputs; of packed sequences, checkpoints may leave rows at the end unused, which are 0."""
    final = checkpoints = None
    if x.final_state:
        final = torch.empty(state_shape, dtype=torch.float32, device=x.q.device)
    if x.checkpoint_every:
        shape = (x.q.shape[0], x.checkpoint_count, *state_shape[1:])
        checkpoints = torch.empty(shape, dtype=torch.float32, device=x.q.device)
        if x.cu_seqlens is not None:
            # Offsets end at T, so N sequences leave at most 63 N tokens after their full chunks: fewer than N rows
            checkpoints[:, max(x.checkpoint_count - (x.cu_seqlens.shape[0] - 2), 0) :].zero_()
    return KDAOutput(torch.empty_like(x.v), final, checkpoints)


@functools.cache
def loaded(machine: Machine, source: str, entry: str, variant: Any, device: torch.device) -> Launchable:
    """Return the kernel of a variant: `machine.load`, cached without writing its macros again."""
    return machine.load(source, entry, variant.defines, device)


def is_aligned(t: Tensor) -> bool:
    """True if `t` is contiguous and aligned to 16 bytes."""
    return t.data_ptr() & 15 == 0 and t.is_contiguous()


def aligned(t: Tensor) -> Tensor:
    """`t`, or a copy unless it `is_aligned`."""
    return t if is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def aligned_inputs(x: Inputs) -> Inputs:
    """`x` with every tensor `aligned`."""
    if all(t is None or is_aligned(t) for t in x[:9]):
        return x
    copies: dict[str, Any] = {n: aligned(t) for n, t in zip(x._fields, x, strict=True) if isinstance(t, Tensor)}
    return x._replace(**copies)


def row_stride(t: Tensor) -> int:
    """Elements from a token of t [B, T, ...] to the next one. A dimension of size 1 may have any stride."""
    return t.stride(1) if t.shape[1] > 1 else t.stride(0)
