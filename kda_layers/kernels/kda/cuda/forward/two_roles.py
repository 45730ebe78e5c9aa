"""Launcher of two_roles.cu: the forward by blocks of two roles, faster with few heads and for packed sequences.

All its blocks wait for each other, so it is launched cooperatively: a GPU starts it when all of them can run. With
KDA_LAYERS_TWO_ROLES=0 in the environment it is not used.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ....cuda.arch import ARCHS
from ....cuda.machine import Launchable, Machine
from ....cuda.params import addresses
from ...activations import BETA_CODES, GATE_CODES
from ...contract import CHUNK, Inputs, KDAOutput
from . import forward as whole

SOURCE, ENTRY = str(Path(__file__).with_suffix(".cu")), "kda_forward_two_roles"
ENVIRONMENT_VARIABLE = "KDA_LAYERS_TWO_ROLES"
WIDTH = 128  # of heads
BV = 64  # columns of V per block that scans
THREADS = 384
SCAN_STAGES = 3

# Microseconds, within 7 % of times measured on an H100 (docs/internals/lab_notes.md). A chunk of one head takes a
# multiprocessor that prepares 5.05, and a group that scans 0.99 and some for each group; by forward.cu a chain of
# chunks takes 1.25 for each, or where blocks have 32 columns of V 1.95 on an H200 and up to 2.2 on an H100. The rest
# does not depend on the length. STORES is what a checkpoint adds to the scan of a chunk, within 3 % on an H200;
# STORES_TOGETHER and WIDE_STORES_TOGETHER are the same for forward.cu.
PREPARES, SCANS, SCANS_BESIDE, STARTS = 5.05, 0.99, 0.006, 16.0
# Blocks that prepare for several groups wait for each of them. Relative to these times, 21 groups with 90 such blocks
# took 7 % longer than 22 groups with 88 blocks, four for each group.
PREPARES_FOR_SEVERAL = 1.06
MOST_PREPARERS = 8  # for each group; more enlarge the ring, which is to stay in L2, and gained nothing
CHAIN, WIDE_CHAIN, STARTS_TOGETHER = 1.25, 2.1, 10.0
STORES, STORES_TOGETHER, WIDE_STORES_TOGETHER = 0.72, 0.16, 0.3
WORTH = 0.97  # of forward.cu's time: what is nearer is within the error of these times
MOST_TILES = 128  # of one length; with more, it was not measured
MOST_GROUPS_PACKED = 32  # one lane of a warp tracks each group
# Microseconds per packed tile on an H100, in addition to its chunks, and per state loaded or stored; _TOGETHER: by
# forward.cu. STATE was 2.0 with 27 groups of short sequences; 2.5 leaves a margin for shapes that were not measured.
TILE, TILE_TOGETHER, STATE, STATE_TOGETHER = 0.95, 1.4, 2.5, 1.3
SCAN_WAITS = 1.05  # penalty on the scan's time: if both roles take equally long, the scan stalls on preparation
LEAST_TOKENS = 2 * CHUNK  # mean length of packed sequences; below it forward.cu was faster
MANY = 48  # with so many sequences, assume that no single one holds most of the tokens


class Shares(NamedTuple):
    """How blocks are shared out."""

    groups: int  # CTA groups that scan
    preparers: int  # blocks that prepare
    places: int  # for prepared chunks of each group, used in turn: more than SCAN_STAGES

    @classmethod
    def of(cls, groups: int, preparers: int) -> Shares:
        """With as many places as preparing blocks need; more would push the ring out of L2, and gained nothing."""
        return cls(groups, preparers, 2 * -(-preparers // groups) + 8)

    @property
    def counters(self) -> int:
        """Elements of ForwardParams.progress."""
        return self.groups * (-(-self.places // 32) * 32 + 32)


class Variant(NamedTuple):
    """The compile-time parameters of the kernel."""

    K: int
    dtype: torch.dtype
    gate_activation: str
    g_wide: bool  # g is fp32
    wgmma: bool
    setmaxnreg: bool
    packed: bool  # sequences of any lengths
    checkpoints: bool

    @property
    def defines(self) -> dict[str, str | int]:
        return {
            "K": self.K, "V": self.K, "BV": BV, "CLUSTER": self.slices, "IO": whole.TYPES[self.dtype],
            "GATE": GATE_CODES[self.gate_activation], "G_FP32": int(self.g_wide), "HAS_WGMMA": int(self.wgmma),
            "HAS_SETMAXNREG": int(self.setmaxnreg), "SAVES": 0, "POOLED": 0, "BLOCK_ROLES": 1, "TAILS": whole.TAIL,
            "SHARED_BYTES": self.shared_bytes, "PACKED": int(self.packed),
            "CHECKPOINTS": int(self.checkpoints),
        }  # fmt: skip

    @property
    def slices(self) -> int:
        return self.K // BV

    @property
    def shared_bytes(self) -> int:
        """Size in bytes of struct ScanShared in scan_columns.cuh; struct Shared in shared.cuh is smaller."""
        return SCAN_STAGES * whole.stage_bytes(self.K) + 4 * 2 * CHUNK * BV + 8 * (4 * SCAN_STAGES + 2)


def variant_for(
    K: int, dtype: torch.dtype, gate_activation: str, g_wide: bool, arch: int, packed: bool = False,
    checkpoints: bool = False,
) -> Variant:  # fmt: skip
    """The variant for an arch with bulk copies."""
    has = ARCHS[arch]
    return Variant(K, dtype, gate_activation, g_wide, has.wgmma, has.setmaxnreg, packed, checkpoints)


def variants(arch: int) -> Iterable[Variant]:
    """Every variant that may be chosen for `arch`."""
    if ARCHS[arch].wgmma:
        flags = (False, True)
        for dtype, gate, g_wide, *rest in itertools.product(whole.TYPES, GATE_CODES, flags, flags, flags):
            yield variant_for(WIDTH, dtype, gate, g_wide, arch, *rest)


def is_enabled() -> bool:
    """Return False if the environment turns this kernel off.

    Raises:
        ValueError: the variable is neither 0 nor 1
    """
    value = os.environ.get(ENVIRONMENT_VARIABLE) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"


def serves(x: Inputs, machine: Machine) -> bool:
    """Return True if this kernel computes a call without gradients, is faster by its measured times, and enabled."""
    if (x.q.shape[3], x.v.shape[3]) != (WIDTH, WIDTH) or not is_enabled():
        return False
    processors, arch, _ = machine.properties(x.q.device)
    return ARCHS[arch].wgmma and shares_of(x, processors) is not None


def chunks_of(T: int) -> int:
    """Chunks of a sequence in a call without gradients; its last tokens may be none."""
    return -(-whole.in_chunks(T, tails=True) // CHUNK)


def shares_of(x: Inputs, processors: int) -> Shares | None:
    """Return the fastest shares for a call, or None where forward.cu is as fast."""
    B, T, HV, _ = x.v.shape
    stores = x.checkpoint_every > 0
    if x.cu_seqlens is not None:
        states = int(x.initial_state is not None) + int(x.final_state)
        return packed_shares_for(x.cu_seqlens.shape[0] - 1, T // CHUNK * CHUNK, HV, states, stores, processors)
    return shares_for(B * HV, chunks_of(T), stores, processors)


@functools.lru_cache(whole.PLANS)
def shares_for(tiles: int, chunks: int, stores: bool, processors: int) -> Shares | None:
    """The fastest shares for `tiles` heads of `chunks` chunks, or None where forward.cu is as fast.

    The groups scan equally many chunks, as two of them can share a head (roles.cuh). With `stores` the call has
    checkpoints.
    """
    slices = WIDTH // BV
    if not 0 < tiles <= MOST_TILES or chunks == 0 or processors < 3 * slices:
        return None

    def scan(groups: int) -> float:
        return -(-tiles * chunks // groups) * scans(groups, stores)

    fastest, shares = fastest_shares(range(1, tiles + 1), tiles * chunks, scan, processors)
    groups, chain = together(tiles, stores, processors)
    by_one_role = STARTS_TOGETHER + -(-tiles // groups) * chunks * chain
    return shares if STARTS + fastest < WORTH * by_one_role else None


@functools.lru_cache(whole.PLANS)
def packed_shares_for(
    sequences: int, tokens: int, heads: int, states: int, stores: bool, processors: int
) -> Shares | None:
    """Return the fastest shares for packed sequences, or None where forward.cu is as fast.

    The lengths are known only on the GPU; the estimate assumes equal ones. With fewer than MANY sequences a single one
    may hold most of the tokens, so the number of groups must divide the number of heads or be a multiple of it:
    otherwise some groups would scan one head of that sequence more than others.

    Args:
        tokens: of all sequences
        heads: value heads
        states: 0 to 2, how many of the initial and the final state the call has
        stores: the call has checkpoints
    """
    slices, tiles = WIDTH // BV, sequences * heads
    if not sequences or tokens < sequences * LEAST_TOKENS or processors < 3 * slices:
        return None
    chunks = tokens / CHUNK / sequences  # of a tile
    every = range(1, min(tiles, MOST_GROUPS_PACKED) + 1)
    numbers = [n for n in every if sequences >= MANY or heads % n == 0 or n % heads == 0]

    def scan(groups: int) -> float:
        return -(-tiles // groups) * (chunks * scans(groups, stores) + TILE + states * STATE)

    fastest, shares = fastest_shares(numbers, tiles * chunks, scan, processors)
    groups, chain = together(tiles, stores, processors)
    tile = chunks * chain + TILE_TOGETHER + states * STATE_TOGETHER
    by_one_role = STARTS_TOGETHER + -(-tiles // groups) * tile
    return shares if STARTS + fastest < WORTH * by_one_role else None


def scans(groups: int, stores: bool) -> float:
    """The time in which each of so many groups scans a chunk."""
    return SCANS + SCANS_BESIDE * groups + (STORES if stores else 0)


def fastest_shares(
    numbers: Iterable[int], chunks: float, scan: Callable[[int], float], processors: int
) -> tuple[float, Shares]:
    """Return the shortest time of a call, less STARTS, and its shares.

    Args:
        numbers: of groups, from which one is chosen
        chunks: that are prepared
        scan: the time in which so many groups scan them
    """
    slices, every = WIDTH // BV, []
    for groups in numbers:
        most = processors // slices * slices - groups * slices
        step = math.lcm(groups, slices)  # as many for each group, and whole clusters
        for preparers in {most, min(most, MOST_PREPARERS * groups) // step * step}:
            if preparers <= 0:
                continue
            prepare = chunks * PREPARES / preparers * (PREPARES_FOR_SEVERAL if preparers % groups else 1)
            waits = max(prepare, SCAN_WAITS * scan(groups))
            every.append((waits, preparers, max(prepare, scan(groups)), Shares.of(groups, preparers)))
    _, _, fastest, shares = min(every)
    return fastest, shares


def together(tiles: int, stores: bool, processors: int) -> tuple[int, float]:
    """Return forward.cu's number of CTA groups, and the time that each takes for a chunk."""
    if tiles * WIDTH // 16 > processors:  # its blocks have 32 columns, as forward.variant_for chooses
        return min(tiles, max(processors // 4, 1)), WIDE_CHAIN + (WIDE_STORES_TOGETHER if stores else 0)
    return min(tiles, max(processors // 8, 1)), CHAIN + (STORES_TOGETHER if stores else 0)


class Plan(NamedTuple):
    """Everything that a launch needs except pointers."""

    kernel: Launchable
    variant: Variant
    shares: Shares
    state_shape: tuple[int, int, int, int]
    rest: bytes  # of the parameters, after the pointers


@functools.lru_cache(whole.PLANS)
def plan_of(
    machine: Machine, device: torch.device, dtype: torch.dtype, g_dtype: torch.dtype, beta_dtype: torch.dtype,
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], offsets: tuple[int, torch.dtype] | None,
    gate_activation: str, lower_bound: float, beta_activation: str, qk_l2norm: bool, scale: float, tails: bool,
    shares: Shares, checkpoints: bool,
) -> Plan:  # fmt: skip
    """The plan for tensors of these shapes and dtypes; `offsets` are the length and dtype of cu_seqlens."""
    B, T, H, K = q_shape
    HV, V = v_shape[2:]
    assert shares.groups <= (B * v_shape[2] if offsets is None else MOST_GROUPS_PACKED)
    assert shares.places > SCAN_STAGES, "a place is free when its chunk has landed, which is told SCAN_STAGES later"
    if B * T > whole.MOST_TOKENS:
        raise ValueError(f"B * T must be at most {whole.MOST_TOKENS}, got {B * T}: split the batch")
    N, arch = B if offsets is None else offsets[0] - 1, machine.properties(device).capability
    wide, packed = g_dtype == torch.float32, offsets is not None
    variant = variant_for(K, dtype, gate_activation, wide, arch, packed, checkpoints)
    rest = whole.PARAMS.pack_values(
        T, H, HV, HV // H, N * HV, offsets is not None and offsets[1] == torch.int64, BETA_CODES[beta_activation],
        beta_dtype == torch.float32, qk_l2norm, lower_bound, scale, *(0,) * 9, tails, shares.groups, shares.places,
    )  # fmt: skip
    kernel = machine.load(SOURCE, ENTRY, variant.defines, device)
    return Plan(kernel, variant, shares, (N, HV, V, K), rest)


def forward(x: Inputs, machine: Machine, tails: whole.Tails | None = None) -> tuple[KDAOutput, None]:
    """Return the outputs of a call that `serves`, and None; with `tails`, last tokens stay unwritten.

    Raises:
        ValueError: there are more than `forward.MOST_TOKENS` tokens
        RuntimeError: the blocks cannot run at once
    """
    x = whole.aligned_inputs(x)
    device, offsets = x.v.device, x.cu_seqlens
    shares = shares_of(x, machine.properties(device).processors)
    assert shares is not None  # as `serves` has found
    plan = plan_of(
        machine, device, x.q.dtype, x.g.dtype, x.beta.dtype, x.q.shape, x.v.shape,
        None if offsets is None else (offsets.shape[0], offsets.dtype),
        x.gate_activation, x.lower_bound, x.beta_activation, x.qk_l2norm, x.scale, tails is not None, shares,
        x.checkpoint_every > 0,
    )  # fmt: skip
    o = torch.empty_like(x.v)
    final = torch.empty(plan.state_shape, dtype=torch.float32, device=device) if x.final_state else None
    checkpoints = whole.new_checkpoints(x) if x.checkpoint_every else None
    slices, K, V = plan.variant.slices, x.q.shape[3], x.v.shape[3]
    # a ring and, unless the sequences are packed, a state that is handed over
    ring_bytes = shares.groups * (shares.places * whole.stage_bytes(K) + (0 if offsets is not None else 4 * V * K))
    ring = torch.empty(ring_bytes, dtype=torch.uint8, device=device)
    progress = torch.zeros(shares.counters, dtype=torch.int32, device=device)
    tensors = (
        x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state, offsets, o, final, checkpoints, ring, progress,
        *(None,) * 8, *(tails or whole.Tails()),
    )  # fmt: skip
    params = whole.PARAMS.pack_pointers(*addresses(tensors)) + plan.rest
    blocks = shares.groups * slices + shares.preparers
    launch(plan.kernel, blocks, THREADS, slices, plan.variant.shared_bytes, params)
    return KDAOutput(o, final, checkpoints), None


def launch(kernel: Launchable, blocks: int, threads: int, cluster: int, shared_bytes: int, params: bytes) -> None:
    """Launch blocks of two roles, which wait for each other.

    Raises:
        RuntimeError: they cannot run at once
    """
    try:
        kernel.launch(blocks, threads, cluster, shared_bytes, params, cooperative=True)
    except RuntimeError as error:
        if "COOPERATIVE_LAUNCH_TOO_LARGE" not in str(error):
            raise
        raise RuntimeError(  # the process or the stream has a part of the GPU alone
            f"{error}; all blocks must run at once: give it {blocks} multiprocessors, or set {ENVIRONMENT_VARIABLE}=0"
        ) from error
