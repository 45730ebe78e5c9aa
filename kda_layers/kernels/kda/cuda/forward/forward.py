"""Launching forward.cu: the forward over whole sequences, in one kernel."""

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
from ...contract import CHUNK, Inputs, KDAOutput, checkpoint_count

PARAMS = Params("ForwardParams", """
    const u16 *q, *k;              // [B, T, H, K]
    const u16* v;                  // [B, T, HV, V]
    const void* g;                 // [B, T, HV, K]
    const void* beta;              // [B, T, HV]
    const float *A_log, *dt_bias;  // [HV], [HV, K], or null
    const float* initial_state;    // [N, HV, V, K], or null
    const void* cu_seqlens;        // [N + 1], or null
    u16* o;                        // [B, T, HV, V]
    float* final_state;            // [N, HV, V, K], or null
    float* checkpoints;            // [B, T / 64, HV, V, K], or null
    unsigned char* ring;           // RING * STAGE_BYTES per CTA group, or null without shared chunks
    u32* progress;                 // [CTA groups][2][32] zeros, or null likewise
    // Saved if SAVES; NC chunks of all sequences
    unsigned char* prepared;     // [NC, HV, STAGE_BYTES], replaces the ring
    u16* states;                 // [NC, HV, V, K], at each chunk's start
    u16* errors;                 // [B, T, HV, V], V'
    int T, H, HV, group, tiles;  // group = HV / H, tiles = N * HV; B * T < 2^31
    int int64_offsets;           // cu_seqlens is int64
    int beta_activation, beta_fp32, qk_l2norm;
    float lower_bound, scale;
""")  # fmt: skip
TYPES = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
SOURCE = str(Path(__file__).with_suffix(".cu"))
WIDTHS = (128, 64)
STAGES = 2
MOST_TOKENS = 2**31 - 1
PLANS = 4096  # remembered


def stage_bytes(K: int) -> int:
    """Of a prepared chunk: struct Stage in stage.cuh."""
    return 3 * CHUNK * K * 2 + 2 * CHUNK * CHUNK * 2 + 4 * (K + CHUNK)


class Variant(NamedTuple):
    """What is compiled apart: width, columns of V a block, blocks that a chunk is copied to at once (0: each prepares
    for itself), types, gate; what the arch has: products of a warpgroup, registers that move between warpgroups; and
    whether it keeps what the backward reads."""

    K: int
    BV: int
    cluster: int
    dtype: torch.dtype
    gate_activation: str
    g_wide: bool
    warpgroups: bool
    movable_registers: bool
    saves: bool

    @property
    def defines(self) -> dict[str, str | int]:
        return {
            "K": self.K, "V": self.K, "BV": self.BV, "CLUSTER": self.cluster, "IO": TYPES[self.dtype],
            "GATE": GATE_CODES[self.gate_activation], "G_FP32": int(self.g_wide), "HAS_WGMMA": int(self.warpgroups),
            "HAS_SETMAXNREG": int(self.movable_registers), "SAVES": int(self.saves), "SHARED_BYTES": self.shared_bytes,
        }  # fmt: skip

    @property
    def threads(self) -> int:
        return 32 * (self.K // 16 + 8)

    @property
    def slices(self) -> int:
        return self.K // self.BV

    @property
    def stage_bytes(self) -> int:
        return stage_bytes(self.K)

    @property
    def ring_bytes(self) -> int:
        """Of a unit's prepared chunks in global memory."""
        return 3 * self.slices * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """As struct Shared in chunk.cuh adds it up."""
        scan = self.BV * 2 * (self.K + 2 * CHUNK)
        exchanged = 2 * (CHUNK * self.K * 2 + 16 * self.K) + 20 * CHUNK
        sums = self.K // 64 * 10240 + 6 * 512 + self.K * 16
        gates = self.K * 16 + (0 if self.g_wide else CHUNK * self.K * 2)
        return STAGES * self.stage_bytes + scan + exchanged + sums + gates + 8 * (6 * STAGES + 4)


def variant_for(
    K: int, dtype: torch.dtype, gate_activation: str, g_wide: bool, items: int, processors: int, arch: int, saves: bool
) -> Variant:
    """The variant for `items` pairs of a sequence and a value head, on `processors` multiprocessors of `arch`."""
    wide = ARCHS[arch].wgmma and items * (K // 16) > processors and not (dtype == torch.float16 and g_wide)
    return _variant(K, 32 if wide else 16, dtype, gate_activation, g_wide, arch, saves)


def _variant(
    K: int, BV: int, dtype: torch.dtype, gate_activation: str, g_wide: bool, arch: int, saves: bool
) -> Variant:
    has = ARCHS[arch]
    cluster = 0 if not has.bulk_copies else 2 if BV == 32 else 1  # two blocks share a copy where memory is busiest
    return Variant(K, BV, cluster, dtype, gate_activation, g_wide, has.wgmma, has.setmaxnreg, saves)


def variants(arch: int) -> Iterable[Variant]:
    """Everything that `variant_for` may choose on an arch whose blocks have the shared memory."""
    flags = (False, True)
    for K, BV, dtype, gate, g_wide, saves in itertools.product(WIDTHS, (16, 32), TYPES, GATE_CODES, flags, flags):
        if BV == 16 or (ARCHS[arch].wgmma and not (dtype == torch.float16 and g_wide)):
            yield _variant(K, BV, dtype, gate, g_wide, arch, saves)


class Saved(NamedTuple):
    """What the backward reads of the forward, of NC chunks of all sequences; packed ones may leave rows over."""

    prepared: Tensor  # [NC, HV, stage_bytes] uint8
    states: Tensor  # [NC, HV, V, K], at each chunk's start
    errors: Tensor  # [B, T, HV, V], V'

    @classmethod
    def like(cls, x: Inputs) -> Saved:
        """Unwritten."""
        (*_, K), (HV, V) = x.q.shape, x.v.shape[2:]
        rows = chunk_rows(x)
        prepared = x.q.new_empty(rows, HV, stage_bytes(K), dtype=torch.uint8)
        return cls(prepared, x.q.new_empty(rows, HV, V, K), torch.empty_like(x.v))

    @staticmethod
    def nbytes(x: Inputs) -> int:
        """Of all together."""
        K, (B, T, HV, V) = x.q.shape[3], x.v.shape
        return chunk_rows(x) * HV * (stage_bytes(K) + V * K * 2) + B * T * HV * V * 2


def chunk_rows(x: Inputs) -> int:
    """Rows of what is kept of each chunk, sequence after sequence: at least as many as there are chunks, whose number
    only the GPU knows if they are packed."""
    B, T = x.q.shape[:2]
    return B * -(-T // CHUNK) if x.cu_seqlens is None else T // CHUNK + x.cu_seqlens.shape[0] - 1


class Ring(NamedTuple):
    """Where the blocks of a unit exchange prepared chunks."""

    chunks: Tensor | None
    progress: Tensor | None

    @classmethod
    def of(cls, variant: Variant, units: int, device: torch.device) -> Ring:
        if not variant.cluster:
            return cls(None, None)
        progress = torch.zeros(units * 64, dtype=torch.int32, device=device)
        if variant.saves:  # every chunk has a place of its own
            return cls(None, progress)
        return cls(torch.empty(units * variant.ring_bytes, dtype=torch.uint8, device=device), progress)


class Plan(NamedTuple):
    """All that a launch needs beside pointers."""

    kernel: Launchable
    variant: Variant
    units: int
    blocks: int
    cluster: int
    shared_bytes: int
    state_shape: tuple[int, int, int, int]
    rest: bytes  # of the parameters, behind the pointers


@functools.lru_cache(PLANS)
def _plan(
    machine: Machine, device: torch.device, dtype: torch.dtype, g_dtype: torch.dtype, beta_dtype: torch.dtype,
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], offsets: tuple[int, torch.dtype] | None,
    gate_activation: str, lower_bound: float, beta_activation: str, qk_l2norm: bool, scale: float, saves: bool,
) -> Plan:  # fmt: skip
    """The plan for tensors of these shapes and types; `offsets` are how many, and their type."""
    B, T, H, K = q_shape
    HV, V = v_shape[2:]
    if B * T > MOST_TOKENS:
        raise ValueError(f"B * T must be at most {MOST_TOKENS}, got {B * T}: split the batch")
    N = B if offsets is None else offsets[0] - 1
    items, (processors, arch, _) = N * HV, machine.properties(device)
    variant = variant_for(K, dtype, gate_activation, g_dtype == torch.float32, items, processors, arch, saves)
    units = min(items, processors // variant.slices)  # blocks of a unit wait for each other: all must run at once
    if not units:
        raise ValueError(f"x must be on a GPU with at least {variant.slices} multiprocessors, got {processors}")
    rest = PARAMS.pack_values(
        T, H, HV, HV // H, items, offsets is not None and offsets[1] == torch.int64, BETA_CODES[beta_activation],
        beta_dtype == torch.float32, qk_l2norm, lower_bound, scale,
    )  # fmt: skip
    return Plan(
        _kernel(machine, variant, device), variant, units, units * variant.slices, max(variant.cluster, 1),
        variant.shared_bytes, (N, HV, V, K), rest,
    )  # fmt: skip


@functools.cache
def _kernel(machine: Machine, variant: Variant, device: torch.device) -> Launchable:
    return machine.load(SOURCE, "kda_forward", variant.defines, device)


def aligned(t: Tensor) -> Tensor:
    """`t`, or a copy, in one piece from a multiple of 16 bytes on, as the kernels read."""
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def aligned_inputs(x: Inputs) -> Inputs:
    copies: dict[str, Any] = {n: aligned(t) for n, t in zip(x._fields, x, strict=True) if isinstance(t, Tensor)}
    return x._replace(**copies)


def _addresses(x: Inputs) -> list[int] | None:
    """Of the tensors, 0 for those that are not there; None if one is not as the kernel reads."""
    addresses = []
    for t in (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state, x.cu_seqlens):
        address = 0 if t is None else t.data_ptr()
        if t is not None and (address & 15 or not t.is_contiguous()):
            return None
        addresses.append(address)
    return addresses


def forward(x: Inputs, machine: Machine, save: bool = False) -> tuple[KDAOutput, Saved | None]:
    """(outputs, if asked for what the backward reads); see `Backend.forward`.

    Raises:
        ValueError: more tokens than 32 bits count, or a GPU (or a part of one) too small for one unit of blocks
    """
    addresses = _addresses(x)
    if addresses is None:
        return forward(aligned_inputs(x), machine, save)
    q, v, offsets = x.q, x.v, x.cu_seqlens
    device = q.device
    plan = _plan(
        machine, device, q.dtype, x.g.dtype, x.beta.dtype, q.shape, v.shape,
        None if offsets is None else (offsets.shape[0], offsets.dtype),
        x.gate_activation, x.lower_bound, x.beta_activation, x.qk_l2norm, x.scale, save,
    )  # fmt: skip
    o = torch.empty_like(v)
    final = torch.empty(plan.state_shape, dtype=torch.float32, device=device) if x.final_state else None
    checkpoints = None
    if x.checkpoint_every:
        new = torch.empty if offsets is None else torch.zeros  # packed: rows may be left over
        shape = (q.shape[0], checkpoint_count(x), *plan.state_shape[1:])
        checkpoints = new(shape, dtype=torch.float32, device=device)
    ring, saved = Ring.of(plan.variant, plan.units, device), Saved.like(x) if save else None
    outputs = (o, final, checkpoints, *ring, *(saved or (None, None, None)))
    params = PARAMS.pack_pointers(*addresses, *(0 if t is None else t.data_ptr() for t in outputs)) + plan.rest
    plan.kernel.launch(plan.blocks, plan.variant.threads, plan.cluster, plan.shared_bytes, params)
    return KDAOutput(o, final, checkpoints), saved


def recompute(x: Inputs, machine: Machine) -> Saved:
    """What the forward would have kept, from its inputs."""
    _, saved = forward(x._replace(final_state=False, checkpoint_every=0), machine, save=True)
    assert saved
    return saved
