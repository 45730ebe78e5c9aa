"""Shared by the kernels over whole sequences: dtypes and widths, the signature of a call, what the forward saves, and
the parameters and launches of its forms."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...cuda.machine import Launch, Launchable, Machine
from ...cuda.params import Params
from ..activations import BETA_CODES
from ..contract import CHUNK, AnyInputs, Inputs, PrefillInputs

TYPES = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
T_FP16 = (torch.bfloat16,)  # dtypes with which T' is kept in fp16, too: in fp16 it has 11 bits anyway
WIDTHS = (128, 64)
MOST_TOKENS = 2**31 - 1
PLANS = 4096  # cached
# Width, dtype, gate and fp32 gates of the variants for gates of heads that are compiled ahead, others are when called:
# Qwen3-Next and Qwen3.5 pass bf16 logits, `chunk_gated_delta_rule` fp32 log-decays.
OF_HEADS = ((128, torch.bfloat16, "softplus", False), (128, torch.bfloat16, "log_decay", True))
LAST_TOKENS = 4  # tokens after a sequence's whole chunks that the decode kernel computes, at most (last_tokens.py)


def stage_bytes(K: int) -> int:
    """Size in bytes of one prepared chunk, struct Stage of stage.cuh."""
    return 3 * CHUNK * K * 2 + 2 * CHUNK * CHUNK * 2 + 4 * (K + CHUNK)


def in_chunks(T: int, last_tokens: bool) -> int:
    """Number of a sequence's T tokens that are in chunks: with `last_tokens`, not its last ones (last_tokens.py)."""
    return T - T % CHUNK if last_tokens and T % CHUNK <= LAST_TOKENS else T


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

    def most_cut(self, sequences: int, tokens: int, packed: bool) -> int:
        """Upper bound on the sequences that are cut; `tokens` of each or, if packed, of all together."""
        return min(sequences, tokens // self.longer) if packed else sequences

    def rows(self, x: Inputs, last_tokens: bool = False) -> int:
        """At least the segments of all sequences that are cut, times the value heads."""
        (B, T, HV), packed = x.v.shape[:3], x.cu_seqlens is not None
        tokens = T if packed else in_chunks(T, last_tokens)
        # Not `most_cut`: while compiling, its minimum would be a guard on the number of sequences
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
    gate_row: int  # of gates of heads


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
    T_fp16: bool = False  # T' in fp16, too
    last_tokens: bool = False  # the decode kernel computes last tokens
    rows: Rows | None = None  # of an engine: states in slots of a pool, rows of tokens with strides
    head_gates: bool = False  # one gate for all channels of a head
    cut_from: int = 0  # fewest tokens of a cut sequence; a packed launch in one piece exits if there is one

    @classmethod
    def of(cls, x: Inputs, saves: bool = False, last_tokens: bool = False) -> Signature:
        """Return the signature of a call of `kda`."""
        cut = None if x.segments == "never" else cut_of(x)
        states = x.initial_state is not None, x.final_state, x.checkpoint_every > 0
        return cls._make(
            (*_common(x), *states, cut, saves, saves and keeps_T_fp16(x), last_tokens, None, has_head_gates(x), 0)
        )

    @classmethod
    def of_prefill(cls, x: PrefillInputs, rows: Rows, last_tokens: bool) -> Signature:
        """Return the signature of a call of `kda_prefill`."""
        states = x.state is not None, x.state is not None, x.checkpoint_at is not None
        return cls._make((*_common(x), *states, None, False, False, last_tokens, rows, has_head_gates(x), 0))

    @property
    def packed(self) -> bool:
        return self.offsets is not None

    @property
    def sequences(self) -> int:
        return self.q_shape[0] if self.offsets is None else self.offsets[0] - 1

    @property
    def chunk_rows(self) -> int:
        """As `chunk_rows`."""
        return _chunk_rows(self.q_shape[0], self.q_shape[1], self.sequences if self.packed else None)

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
    T_fp16: Tensor | None = None  # [NC, HV, 2 * 64 * 64] uint8, T' in fp16
    transitions: Tensor | None = None  # [rows, V + K, K] fp32, B and F of the segments of sequences that are cut

    @classmethod
    def like(cls, x: Inputs, cut: Cut | None = None) -> Saved:
        """Unwritten tensors for inputs `x` and the cut of their sequences."""
        (*_, K), (HV, V) = x.q.shape, x.v.shape[2:]
        rows = chunk_rows(x)
        prepared = x.q.new_empty(rows, HV, stage_bytes(K), dtype=torch.uint8)
        T_fp16 = x.q.new_empty(rows, HV, 2 * CHUNK * CHUNK, dtype=torch.uint8) if keeps_T_fp16(x) else None
        transitions = None if cut is None else x.q.new_empty(cut.rows(x), V + K, K, dtype=torch.float32)
        return cls(prepared, x.q.new_empty(rows, HV, V, K), torch.empty_like(x.v), T_fp16, transitions)

    @staticmethod
    def nbytes(x: Inputs) -> int:
        """Size in bytes of all of them, of a call whose sequences are not cut."""
        K, (B, T, HV, V) = x.q.shape[3], x.v.shape
        T_fp16 = 2 * CHUNK * CHUNK if keeps_T_fp16(x) else 0
        return chunk_rows(x) * HV * (stage_bytes(K) + V * K * 2 + T_fp16) + B * T * HV * V * 2

    def tensors(self) -> list[Tensor]:
        """The tensors that exist, transitions first."""
        return [t for t in (self.transitions, *self[:4]) if t is not None]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Saved:
        """Undo `tensors`: transitions are fp32, prepared chunks bytes."""
        is_cut = tensors[0].dtype == torch.float32
        prepared, states, errors, *T_fp16 = tensors[is_cut:]
        return cls(prepared, states, errors, T_fp16[0] if T_fp16 else None, tensors[0] if is_cut else None)


def keeps_T_fp16(x: Inputs) -> bool:
    """True if the backward of a call reads T' in fp16."""
    return x.fine_gradients and x.q.dtype in T_FP16


def with_those_of_heads(variants: Iterable[Any]) -> Iterator[Any]:
    """Yield the variants of a kernel that reads gates, each of `OF_HEADS` for gates of heads, too."""
    for v in variants:
        yield v
        if (v.K, v.dtype, v.gate_activation, v.g_wide) in OF_HEADS:
            yield v._replace(head_gates=True)


def has_head_gates(x: AnyInputs) -> bool:
    """True if g is [B, T, HV, 1], one gate for all channels of a head (they are at least 64)."""
    return x.g.shape[3] == 1


def chunk_rows(x: Inputs) -> int:
    """Number of chunks of all sequences; if packed an upper bound, as only the GPU knows their lengths."""
    B, T = x.q.shape[:2]
    return _chunk_rows(B, T, None if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1)


def _chunk_rows(B: int, T: int, packed: int | None) -> int:
    """`chunk_rows` of B sequences of T tokens, or of `packed` sequences of T tokens in all."""
    return B * -(-T // CHUNK) if packed is None else T // CHUNK + packed


PARAMS = Params("ForwardParams", """
    const u16 *q, *k;              // [B, T, H, K]
    const u16* v;                  // [B, T, HV, V]
    const void* g;                 // [B, T, HV, K], or [B, T, HV] if HEAD_GATES
    const void* beta;              // [B, T, HV]
    const float *A_log, *dt_bias;  // [HV], [HV, K] ([HV] if HEAD_GATES), or null
    const float* initial_state;    // [N, HV, V, K], or null; not read if POOLED
    const void* cu_seqlens;        // [N + 1], or null
    u16* o;                        // [B, T, HV, V]
    float* final_state;            // [N, HV, V, K], or null; if POOLED [slots, HV, V, K] or null, read and overwritten
    float* checkpoints;            // [B, T / 64, HV, V, K], or null; if POOLED [N, HV, V, K] zeros
    // Null without shared chunks; of two_roles.cu see roles.cuh
    unsigned char* ring;           // RING * STAGE_BYTES per CTA group
    u32* progress;                 // [CTA groups][2][32] zeros
    // Saved if SAVES; NC chunks of all sequences
    unsigned char* prepared;     // [NC, HV, STAGE_BYTES], replaces the ring
    u16* states;                 // [NC, HV, V, K], at each chunk's start, see saved_at
    u16* errors;                 // [B, T, HV, V], V'
    unsigned char* T_fp16;       // [NC, HV, SQUARE] if T_FP16: T' in fp16, see stage.cuh
    const void *slots, *stops;   // read if POOLED: [N], or null: sequence n has slot n; no checkpoint
    // Of segments.cu, of the tiles of sequences that are cut: [rows, V + K, K], B and F; [rows, V, K], their S0
    float *transitions, *starts;
    // Read if LAST_TOKENS, of calls whose last tokens the decode kernel computes (last_tokens.py)
    const int* order;    // what order.cu writes, or null: all sequences as they come
    float* before_last;  // [sequences in that order, HV, V, K], states before last tokens, or null
    int T, H, HV, group, tiles;  // group = HV / H, tiles = N * HV; B * T < 2^31
    int int64_offsets;           // cu_seqlens is int64
    int beta_activation, beta_fp32, qk_l2norm;
    float lower_bound, scale;
    // Read if POOLED
    int key_row, value_row, beta_row;  // strides of tokens: of q and k, v, beta
    int int64_slots, int64_stops, slot_count;
    u64 slot_stride;
    // Of sequences that are cut: segments of each at most, tiles = N * segments * HV; their tokens at least (is_idle)
    int segments, cut_from;
    int last_tokens;  // the decode kernel computes last tokens
    // Read by two_roles.cu
    int groups, ring_slots;  // CTA groups that scan, and slots in the ring of each
    // Read if POOLED and HEAD_GATES; last, as a parameter before others would change the code of every kernel
    int gate_row;  // stride of tokens of g
    // Read by two_roles.cu with STRETCH
    int followers;  // CTA groups that scan for outputs
""")  # fmt: skip


def values_of(
    s: Signature, tiles: int, segments: int = 0, groups: int = 0, ring_slots: int = 0, followers: int = 0
) -> bytes:
    """Pack the values of a call; the last four are those of some forms.

    Raises:
        ValueError: there are more than `MOST_TOKENS` tokens
    """
    (B, T, H, _), HV = s.q_shape, s.v_shape[2]
    if B * T > MOST_TOKENS:
        raise ValueError(f"B * T must be at most {MOST_TOKENS}, got {B * T}: split the batch")
    return PARAMS.set(
        T=T, H=H, HV=HV, group=HV // H, tiles=tiles,
        int64_offsets=s.offsets is not None and s.offsets[1] == torch.int64,
        beta_activation=BETA_CODES[s.beta_activation], beta_fp32=s.beta_dtype == torch.float32,
        qk_l2norm=s.qk_l2norm, lower_bound=s.lower_bound, scale=s.scale, last_tokens=s.last_tokens,
        segments=segments, cut_from=s.cut_from, groups=groups, ring_slots=ring_slots, followers=followers,
        **({} if s.rows is None else s.rows._asdict()),
    )  # fmt: skip


class Plan(NamedTuple):
    """Everything of a call except pointers."""

    launches: tuple[Launch, ...]  # one after the other, with the same parameters
    values: bytes  # of the parameters
    counters: int  # elements of ForwardParams.progress
    ring_bytes: int = 0  # size of ForwardParams.ring
    saves: bool = False  # what the backward reads
    cut: Cut | None = None  # of sequences that are cut
    last_tokens: bool = False  # as in `Signature`
    whole: Plan | None = None  # with `cut`, of packed sequences: to be run as well, for calls in which none is cut

    def run(self, pointers: bytes) -> None:
        """Launch with the pointers of the parameters."""
        params = pointers + self.values
        for launch in self.launches:
            launch.run(params)

    def scratch(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Return memory for ForwardParams.ring and .progress."""
        ring = torch.empty(self.ring_bytes, dtype=torch.uint8, device=device) if self.ring_bytes else None
        return ring, torch.zeros(self.counters, dtype=torch.int32, device=device) if self.counters else None


@functools.cache
def loaded(machine: Machine, source: str, entry: str, variant: Any, device: torch.device) -> Launchable:
    """Return the kernel of a variant: `machine.load`, cached without writing its macros again."""
    return machine.load(source, entry, variant.defines, device)


def launch_of(
    machine: Machine, device: torch.device, variant: Any, entry: str, blocks: int, cluster: int = 1,
    overlap: bool = False, cooperative: bool = False,
) -> Launch:  # fmt: skip
    """Return the launch of a variant's kernel."""
    kernel = machine.load(variant.source, entry, variant.defines, device)
    return Launch(kernel, blocks, variant.threads, cluster, variant.shared_bytes, overlap, cooperative)


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


def unpacked_if_one(x: AnyInputs) -> AnyInputs:
    """Return `x` without offsets if it is one packed sequence: the forms for one length are faster."""
    one = x.cu_seqlens is not None and x.cu_seqlens.shape[0] == 2
    return x._replace(cu_seqlens=None) if one else x


def row_stride(t: Tensor) -> int:
    """Elements from a token of t [B, T, ...] to the next one. A dimension of size 1 may have any stride."""
    return t.stride(1) if t.shape[1] > 1 else t.stride(0)
