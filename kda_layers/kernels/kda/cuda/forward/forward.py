"""Launcher of forward.cu: the forward over whole sequences, in one kernel."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....cuda.arch import ARCHS
from ....cuda.machine import Launchable, Machine
from ....cuda.params import Params
from ...activations import BETA_CODES, GATE_CODES
from ...contract import CHUNK, Inputs, KDAOutput

PARAMS = Params("ForwardParams", """
    const u16 *q, *k;              // [B, T, H, K]
    const u16* v;                  // [B, T, HV, V]
    const void* g;                 // [B, T, HV, K]
    const void* beta;              // [B, T, HV]
    const float *A_log, *dt_bias;  // [HV], [HV, K], or null
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
    u16* states;                 // [NC, HV, V, K], at each chunk's start
    u16* errors;                 // [B, T, HV, V], V'
    unsigned char* fine;         // [NC, HV, SQUARE] if FINE: T' in fp16, see stage.cuh
    const void *slots, *stops;   // read if POOLED: [N], or null: sequence n has slot n; no checkpoint
    // Of segments.cu, of the tiles of sequences that are cut: [rows, V + K, K], B and F; [rows, V, K], their S0
    float *maps, *starts;
    // Read if TAILS, of calls whose last tokens the decode kernel computes (tails.py)
    const int* order;  // what order.cu writes, or null: all sequences as they come
    float* handover;   // [sequences in that order, HV, V, K], states before last tokens, or null
    int T, H, HV, group, tiles;  // group = HV / H, tiles = N * HV; B * T < 2^31
    int int64_offsets;           // cu_seqlens is int64
    int beta_activation, beta_fp32, qk_l2norm;
    float lower_bound, scale;
    // Read if POOLED
    int key_row, value_row, beta_row;  // strides of tokens: of q and k, v, beta
    int int64_slots, int64_stops, slot_count;
    u64 slot_stride;
    // Read by segments.cu
    int segments, cut_from;  // of a sequence at most, tiles = N * segments * HV; tokens from which a sequence is cut
    int tails;  // the decode kernel computes last tokens
    // Read by two_roles.cu
    int groups, places;  // CTA groups that scan, and places in the ring of each
""")  # fmt: skip
TYPES = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
FINE = (torch.bfloat16,)  # where fine gradients differ: in fp16 T' has 11 bits anyway
SOURCE = str(Path(__file__).with_suffix(".cu"))
WIDTHS = (128, 64)
STAGES = 2
MOST_TOKENS = 2**31 - 1
PLANS = 4096  # cached
TAIL = 4  # tokens after the whole chunks of a sequence that the decode kernel computes, at most (tails.py)


def stage_bytes(K: int) -> int:
    """Size in bytes of one prepared chunk, struct Stage of stage.cuh."""
    return 3 * CHUNK * K * 2 + 2 * CHUNK * CHUNK * 2 + 4 * (K + CHUNK)


class Variant(NamedTuple):
    """The compile-time parameters of the kernel."""

    K: int
    BV: int  # columns of V per block
    cluster: int  # blocks that share the copy of a chunk; 0: each prepares its own
    dtype: torch.dtype
    gate_activation: str
    g_wide: bool  # g is fp32
    wgmma: bool
    setmaxnreg: bool
    saves: bool  # what the backward reads
    pooled: bool  # for engines: states in slots of a pool, rows of tokens with strides
    fine: bool = False  # also saves T' in fp16

    @property
    def defines(self) -> dict[str, str | int]:
        return {
            "K": self.K, "V": self.K, "BV": self.BV, "CLUSTER": self.cluster, "IO": TYPES[self.dtype],
            "GATE": GATE_CODES[self.gate_activation], "G_FP32": int(self.g_wide), "HAS_WGMMA": int(self.wgmma),
            "HAS_SETMAXNREG": int(self.setmaxnreg), "SAVES": int(self.saves), "POOLED": int(self.pooled),
            "FINE": int(self.fine), "TAILS": 0 if self.saves else TAIL, "SHARED_BYTES": self.shared_bytes,
        }  # fmt: skip

    @property
    def threads(self) -> int:
        return 32 * (self.K // 16 + 8)

    @property
    def slices(self) -> int:
        return self.K // self.BV

    @property
    def ring_bytes(self) -> int:
        """Size in bytes of a CTA group's prepared chunks in global memory."""
        return 3 * self.slices * stage_bytes(self.K)

    @property
    def shared_bytes(self) -> int:
        """Size in bytes of struct Shared in shared.cuh."""
        scan = self.BV * 2 * (self.K + 2 * CHUNK)
        exchanged = 2 * (CHUNK * self.K * 2 + 16 * self.K) + 20 * CHUNK
        sums = self.K // 64 * 10240 + 6 * 512 + self.K * 16
        gates = self.K * 16 + (0 if self.g_wide else CHUNK * self.K * 2)
        return STAGES * stage_bytes(self.K) + scan + exchanged + sums + gates + 8 * (6 * STAGES + 5)


def variant_for(
    K: int, dtype: torch.dtype, gate_activation: str, g_wide: bool, tiles: int, processors: int, arch: int,
    saves: bool = False, pooled: bool = False, fine: bool = False,
) -> Variant:  # fmt: skip
    """The variant for `tiles` pairs of a sequence and a value head, on `processors` multiprocessors of `arch`."""
    wide = ARCHS[arch].wgmma and tiles * (K // 16) > processors and not (dtype == torch.float16 and g_wide)
    return variant_of(K, 32 if wide else 16, dtype, gate_activation, g_wide, arch, saves, pooled, fine)


def variant_of(
    K: int, BV: int, dtype: torch.dtype, gate_activation: str, g_wide: bool, arch: int,
    saves: bool = False, pooled: bool = False, fine: bool = False,
) -> Variant:  # fmt: skip
    """The variant with blocks of BV columns."""
    has = ARCHS[arch]
    cluster = 0 if not has.bulk_copies else 2 if BV == 32 else 1  # two blocks share a copy where bandwidth limits
    return Variant(K, BV, cluster, dtype, gate_activation, g_wide, has.wgmma, has.setmaxnreg, saves, pooled, fine)


def variants(arch: int) -> Iterable[Variant]:
    """Every variant that `variant_for` may return for `arch`, whatever its shared memory."""
    for K, BV, dtype, gate, g_wide in itertools.product(WIDTHS, (16, 32), TYPES, GATE_CODES, (False, True)):
        if BV == 16 or (ARCHS[arch].wgmma and not (dtype == torch.float16 and g_wide)):
            for saves, pooled in ((False, False), (True, False), (False, True)):
                yield variant_of(K, BV, dtype, gate, g_wide, arch, saves, pooled)
            if dtype in FINE:
                yield variant_of(K, BV, dtype, gate, g_wide, arch, saves=True, fine=True)


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


def in_chunks(T: int, tails: bool) -> int:
    """Return the number of a sequence's T tokens that are in chunks: with `tails`, not the last ones (tails.py)."""
    return T - T % CHUNK if tails and T % CHUNK <= TAIL else T


class Tails(NamedTuple):
    """Tensors of a call whose last tokens the decode kernel computes."""

    order: Tensor | None = None  # what order.cu writes
    handover: Tensor | None = None  # fp32 [sequences in that order, HV, V, K], states before last tokens, out


class Plan(NamedTuple):
    """Everything that a launch needs except pointers."""

    kernel: Launchable
    variant: Variant
    groups: int  # of CTAs; a group works on one tile at a time
    blocks: int
    cluster: int
    shared_bytes: int
    state_shape: tuple[int, int, int, int]
    rest: bytes  # of the parameters, after the pointers


@functools.lru_cache(PLANS)
def plan_of(
    machine: Machine, device: torch.device, dtype: torch.dtype, g_dtype: torch.dtype, beta_dtype: torch.dtype,
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], offsets: tuple[int, torch.dtype] | None,
    gate_activation: str, lower_bound: float, beta_activation: str, qk_l2norm: bool, scale: float, saves: bool,
    pool: tuple[int, ...] | None = None, tails: bool = False, fine: bool = False,
) -> Plan:  # fmt: skip
    """The plan for tensors of these shapes and dtypes.

    Args:
        offsets: the length and dtype of cu_seqlens
        pool: values of the parameters for a call of an engine
        tails: the decode kernel computes last tokens
        fine: save T' in fp16
    """
    B, T, H, K = q_shape
    HV, V = v_shape[2:]
    if B * T > MOST_TOKENS:
        raise ValueError(f"B * T must be at most {MOST_TOKENS}, got {B * T}: split the batch")
    N = B if offsets is None else offsets[0] - 1
    tiles, (processors, arch, _) = N * HV, machine.properties(device)
    variant = variant_for(
        K, dtype, gate_activation, g_dtype == torch.float32, tiles, processors, arch, saves, pool is not None, fine
    )
    groups = min(tiles, processors // variant.slices)  # CTAs of a group wait for each other: all must be resident
    if not groups:
        raise ValueError(f"x must be on a GPU with at least {variant.slices} multiprocessors, got {processors}")
    rest = PARAMS.pack_values(
        T, H, HV, HV // H, tiles, offsets is not None and offsets[1] == torch.int64, BETA_CODES[beta_activation],
        beta_dtype == torch.float32, qk_l2norm, lower_bound, scale, *(pool or (0,) * 7), 0, 0, tails, 0, 0,
    )  # fmt: skip
    kernel = machine.load(SOURCE, "kda_forward", variant.defines, device)
    blocks, cluster = groups * variant.slices, max(variant.cluster, 1)
    return Plan(kernel, variant, groups, blocks, cluster, variant.shared_bytes, (N, HV, V, K), rest)


@functools.cache
def loaded(machine: Machine, source: str, entry: str, variant: Any, device: torch.device) -> Launchable:
    """Return the kernel of a variant: `machine.load`, cached without writing its macros again."""
    return machine.load(source, entry, variant.defines, device)


def aligned(t: Tensor) -> Tensor:
    """`t`, or a copy if it is not contiguous or not aligned to 16 bytes."""
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def aligned_inputs(x: Inputs) -> Inputs:
    """`x` with every tensor `aligned`."""
    copies: dict[str, Any] = {n: aligned(t) for n, t in zip(x._fields, x, strict=True) if isinstance(t, Tensor)}
    return x._replace(**copies)


def _addresses(x: Inputs) -> list[int] | None:
    """Data pointers (0 for None), or None if a tensor is misaligned or not contiguous."""
    addresses = []
    for t in (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state, x.cu_seqlens):
        address = 0 if t is None else t.data_ptr()
        if t is not None and (address & 15 or not t.is_contiguous()):
            return None
        addresses.append(address)
    return addresses


def forward(
    x: Inputs, machine: Machine, save: bool = False, tails: Tails | None = None
) -> tuple[KDAOutput, Saved | None]:
    """Return the outputs and, with `save`, the tensors for the backward; with `tails`, last tokens stay unwritten.

    Raises:
        ValueError: there are more than `MOST_TOKENS` tokens, or the GPU (or its partition) is too small for a CTA group
    """
    addresses = _addresses(x)
    if addresses is None:
        return forward(aligned_inputs(x), machine, save, tails)
    q, v, offsets = x.q, x.v, x.cu_seqlens
    device = q.device
    plan = plan_of(
        machine, device, q.dtype, x.g.dtype, x.beta.dtype, q.shape, v.shape,
        None if offsets is None else (offsets.shape[0], offsets.dtype),
        x.gate_activation, x.lower_bound, x.beta_activation, x.qk_l2norm, x.scale, save, None, tails is not None,
        save and is_fine(x),
    )  # fmt: skip
    o = torch.empty_like(v)
    final = torch.empty(plan.state_shape, dtype=torch.float32, device=device) if x.final_state else None
    checkpoints = new_checkpoints(x) if x.checkpoint_every else None
    saved = Saved.like(x) if save else None
    outputs = (
        o, final, checkpoints, *scratch(plan, device), *(saved or (None,) * 4), *(None,) * 4,
        *(tails or Tails()),
    )  # fmt: skip
    params = PARAMS.pack_pointers(*addresses, *(0 if t is None else t.data_ptr() for t in outputs)) + plan.rest
    plan.kernel.launch(plan.blocks, plan.variant.threads, plan.cluster, plan.shared_bytes, params)
    return KDAOutput(o, final, checkpoints), saved


def new_checkpoints(x: Inputs) -> Tensor:
    """Memory for the checkpoints of a call; packed sequences may leave rows at the end unused, which are 0."""
    shape = (x.q.shape[0], x.checkpoint_count, *x.v.shape[2:], x.q.shape[3])
    checkpoints = torch.empty(shape, dtype=torch.float32, device=x.q.device)
    if x.cu_seqlens is not None:
        # Offsets end at T, so N sequences leave at most 63 N tokens after their whole chunks: fewer than N rows
        checkpoints[:, max(x.checkpoint_count - (x.cu_seqlens.shape[0] - 2), 0) :].zero_()
    return checkpoints


def scratch(plan: Plan, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Memory for ForwardParams.ring and .progress."""
    ring, variant = None, plan.variant
    if not variant.cluster:
        return None, None
    progress = torch.zeros(plan.groups * 64, dtype=torch.int32, device=device)
    if not variant.saves:  # otherwise `Saved.prepared` replaces the ring
        ring = torch.empty(plan.groups * variant.ring_bytes, dtype=torch.uint8, device=device)
    return ring, progress


def recompute(x: Inputs, machine: Machine) -> Saved:
    """Run the forward again for the tensors that it saves."""
    _, saved = forward(x._replace(final_state=False, checkpoint_every=0), machine, save=True)
    assert saved
    return saved
