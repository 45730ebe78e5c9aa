"""Launcher of segments.cu: the forward over sequences that are cut into segments, in three kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ....cuda.arch import ARCHS
from ....cuda.machine import Launchable, Machine
from ....cuda.params import addresses
from ...activations import BETA_CODES, GATE_CODES
from ...contract import CHUNK, Inputs, KDAOutput
from . import few_heads
from . import forward as whole

SOURCE = str(Path(__file__).with_suffix(".cu"))
MAPS, WALK = 1, 2  # of stage.cuh's SEGMENTS
AUTO_TOKENS, AUTO_HEADS = 2**16, 4  # what "auto" cuts: so many tokens or more of so few heads, measured
AUTO_PROCESSORS = 32  # and on so many multiprocessors or more: at most 16 are a group that maps
WALK_STAGES = 3
JOIN_ROWS, JOIN_STAGES = 8, 3
SCANS_MAP = 1.5  # microseconds of a chunk, measured on an H100; as few_heads.PREPARES


class Cut(NamedTuple):
    """Where sequences are cut: by their own length and number of value heads alone."""

    longer: int  # tokens from which a sequence is cut
    shortest: int = 1024  # tokens of a segment
    tiles: int = 64  # heads times segments of a sequence, about: with two blocks each they fill a GPU

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
        tokens = T if packed else whole.in_chunks(T, tails)
        return (T // self.longer if packed else B) * self.most_segments(tokens, HV, packed) * HV

    def defines(self, part: int) -> dict[str, str | int]:
        return {"SEGMENTS": part, "SEGMENT_TOKENS": self.shortest, "SEGMENT_TILES": self.tiles}


ALWAYS, AUTO = Cut(1024 + 1), Cut(AUTO_TOKENS)


def cut_of(x: Inputs) -> Cut:
    """The cut of a call whose sequences are cut."""
    return AUTO if x.segments == "auto" else ALWAYS


def cuts(x: Inputs, machine: Machine) -> bool:
    """Whether a call has sequences that may be cut, by its options and shapes."""
    (T, HV), cut = x.v.shape[1:3], cut_of(x)
    if x.segments == "never" or cut.tiles < 2 * HV:
        return False
    if x.segments == "always":
        return cut.longer <= T
    hands_on = x.initial_state is not None or x.final_state or x.checkpoint_every  # equal bits in parts
    if HV > AUTO_HEADS or hands_on or cut.longer > T:  # in this order: no guard on T while compiling most models
        return False
    processors, arch, _ = machine.properties(x.q.device)
    return ARCHS[arch].bulk_copies and processors >= AUTO_PROCESSORS


class Variant(NamedTuple):
    """The compile-time parameters of one of the kernels: those of `whole`, and the cut."""

    whole: whole.Variant
    part: int  # MAPS or WALK
    cut: Cut

    @property
    def source(self) -> str:
        return whole.SOURCE if self.part == MAPS else SOURCE

    @property
    def defines(self) -> dict[str, str | int]:
        return self.whole.defines | self.cut.defines(self.part) | {"SHARED_BYTES": self.shared_bytes}

    @property
    def threads(self) -> int:
        return self.whole.threads if self.part == MAPS else 160

    @property
    def slices(self) -> int:
        return self.whole.slices * (2 if self.part == MAPS else 1)

    @property
    def cluster(self) -> int:
        return self.whole.cluster

    @property
    def shared_bytes(self) -> int:
        if self.part == MAPS:
            return self.whole.shared_bytes
        scan = 2 * self.whole.BV * (self.whole.K + 2 * CHUNK)
        return WALK_STAGES * whole.stage_bytes(self.whole.K) + scan + 8 * (6 * WALK_STAGES + 5)


class MapsByRoles(NamedTuple):
    """The compile-time parameters of the kernel that maps by blocks of two roles (few_heads.cu)."""

    whole: few_heads.Variant
    cut: Cut
    fine: bool  # also saves T' in fp16

    @property
    def source(self) -> str:
        return few_heads.SOURCE

    @property
    def threads(self) -> int:
        return 512

    @property
    def cluster(self) -> int:
        return 1

    @property
    def slices(self) -> int:
        return 2  # a block scans v, another rows of I

    @property
    def defines(self) -> dict[str, str | int]:
        own = {"BV": self.whole.K, "CLUSTER": self.cluster, "FINE": int(self.fine), "SHARED_BYTES": self.shared_bytes}
        return self.whole.defines | self.cut.defines(MAPS) | own

    @property
    def shared_bytes(self) -> int:
        """Size in bytes of struct ScanShared in scan_columns.cuh."""
        K, stages, values = self.whole.K, 4, 4
        read = 2 * CHUNK * (2 * K + CHUNK) + 4 * K  # of a prepared chunk
        return stages * read + values * 2 * CHUNK * K + 8 * (4 * stages + values)


class Roles(NamedTuple):
    """How the blocks that map are shared out."""

    groups: int  # of two blocks that scan
    preparers: int  # blocks that prepare
    places: int  # counters of a group


def roles_for(scanned: int, chunks: int, all_chunks: int, processors: int) -> Roles:
    """The fastest shares for `scanned` tiles of `chunks` chunks each, of `all_chunks` that are prepared."""

    def time(groups: int) -> float:
        prepare = all_chunks * few_heads.PREPARES / (processors - 2 * groups)
        return max(prepare, -(-scanned // groups) * chunks * SCANS_MAP)

    groups = min(range(1, min(scanned, (processors - 1) // 2) + 1), key=time)
    return Roles(groups, processors - 2 * groups, -(-(-(-scanned // groups) * chunks) // 32) * 32)


def maps_by_roles(K: int, V: int, packed: bool, segments: int, processors: int, arch: int) -> bool:
    """Return True if blocks of two roles map: the same bits as of one role, sooner."""
    known = not packed and segments > 1 and (K, V) == (few_heads.WIDTH, few_heads.WIDTH)
    return known and ARCHS[arch].wgmma and processors >= 3


def variants_for(
    K: int, dtype: torch.dtype, gate_activation: str, g_wide: bool, arch: int, saves: bool = False, cut: Cut = ALWAYS,
    fine: bool = False,
) -> tuple[Variant, Variant]:  # fmt: skip
    """The variants that map and that walk."""
    wide = ARCHS[arch].wgmma and not (dtype == torch.float16 and g_wide)
    maps = whole.variant_of(K, 32 if wide else 16, dtype, gate_activation, g_wide, arch, fine=fine)
    walk = whole.variant_of(K, K // 2, dtype, "lower_bound", False, arch, saves)  # reads no gate
    return Variant(maps, MAPS, cut), Variant(walk._replace(cluster=2), WALK, cut)


def variants(arch: int) -> Iterable[Variant | MapsByRoles]:
    """Every variant for `arch`."""
    if not ARCHS[arch].bulk_copies:
        return
    flags = (False, True)
    problems = itertools.product(whole.WIDTHS, whole.TYPES, GATE_CODES, flags)
    found = (
        variants_for(*problem, arch, saves, fine=fine)
        for problem in problems
        for saves in flags
        for fine in flags
        if saves >= fine <= (problem[1] in whole.FINE)
    )
    yield from dict.fromkeys(itertools.chain.from_iterable(found))
    for variant, fine in itertools.product(few_heads.variants(arch), flags):
        if not fine or variant.dtype in whole.FINE:
            yield MapsByRoles(variant, ALWAYS, fine)


class SavedInSegments(NamedTuple):
    """The tensors that the forward saves for the backward."""

    whole: whole.Saved
    maps: Tensor  # [rows, V + K, K] fp32, B and F of segments

    @classmethod
    def like(cls, x: Inputs, cut: Cut | None = None) -> SavedInSegments:
        """Unwritten tensors for inputs `x`."""
        cut, K, V = cut_of(x) if cut is None else cut, x.q.shape[3], x.v.shape[3]
        return cls(whole.Saved.like(x), x.q.new_empty(cut.rows(x), V + K, K, dtype=torch.float32))

    @classmethod
    def of(cls, tensors: list[Tensor]) -> SavedInSegments:
        """Undo `tensors`."""
        maps, *kept = tensors
        return cls(whole.Saved(*kept), maps)

    def tensors(self) -> list[Tensor]:
        """The tensors that exist."""
        return [self.maps, *self.whole.tensors()]


class Plan(NamedTuple):
    """Everything that the launches need except pointers."""

    maps: Launchable
    join: Launchable
    walk: Launchable
    grids: list[tuple[int, int, int, int]]  # blocks, threads, cluster and shared bytes of those that map, and that walk
    by_roles: bool  # the blocks that map
    counters: int  # elements of ForwardParams.progress
    sequences: int
    rest: bytes  # of the parameters, after the pointers


@functools.lru_cache(whole.PLANS)
def plan_of(
    machine: Machine, device: torch.device, dtype: torch.dtype, g_dtype: torch.dtype, beta_dtype: torch.dtype,
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], offsets: tuple[int, torch.dtype] | None,
    gate_activation: str, lower_bound: float, beta_activation: str, qk_l2norm: bool, scale: float,
    saves: bool, cut: Cut, tails: bool, fine: bool, roles: bool,
) -> Plan:  # fmt: skip
    """The plan for tensors of these shapes and dtypes; `offsets` are the length and dtype of cu_seqlens.

    Args:
        roles: by blocks of two roles, if they can map
    """
    B, T, H, K = q_shape
    HV = v_shape[2]
    if B * T > whole.MOST_TOKENS:
        raise ValueError(f"B * T must be at most {whole.MOST_TOKENS}, got {B * T}: split the batch")
    N = B if offsets is None else offsets[0] - 1
    tokens = T if offsets is not None else whole.in_chunks(T, tails)
    segments = cut.most_segments(tokens, HV, offsets is not None)
    processors, arch, _ = machine.properties(device)
    mapping, walking = variants_for(K, dtype, gate_activation, g_dtype == torch.float32, arch, saves, cut, fine)
    if processors < mapping.slices:
        raise ValueError(f"x must be on a GPU with at least {mapping.slices} multiprocessors, got {processors}")
    groups = [min(N * segments * HV, processors // v.slices) for v in (mapping, walking)]
    both = zip(groups, (mapping, walking), strict=True)
    launches = [(n * v.slices, v.threads, v.cluster, v.shared_bytes) for n, v in both]
    counters, shares = groups[0] * 64, Roles(0, 0, 0)
    kernel: Variant | MapsByRoles = mapping
    if roles and maps_by_roles(K, v_shape[3], offsets is not None, segments, processors, arch):
        few = few_heads.variant_for(K, dtype, gate_activation, g_dtype == torch.float32, arch)
        kernel = MapsByRoles(few, cut, fine)
        chunks = cut.segment_tokens(tokens, HV) // CHUNK
        shares = roles_for(N * (segments - 1) * HV, chunks, N * HV * -(-tokens // CHUNK), processors)
        blocks = kernel.slices * shares.groups + shares.preparers
        launches[0] = blocks, kernel.threads, kernel.cluster, kernel.shared_bytes
        counters = shares.groups * shares.places + 32  # a warp reads 32 at once
    rest = whole.PARAMS.pack_values(
        T, H, HV, HV // H, N * segments * HV, offsets is not None and offsets[1] == torch.int64,
        BETA_CODES[beta_activation], beta_dtype == torch.float32, qk_l2norm, lower_bound, scale,
        *(0,) * 7, segments, cut.longer, tails, shares.groups, shares.places,
    )  # fmt: skip
    entry = "kda_forward_few_heads" if shares.groups else "kda_forward"
    maps = machine.load(kernel.source, entry, kernel.defines, device)
    join, walk = (machine.load(SOURCE, f"kda_{what}_segments", walking.defines, device) for what in ("join", "walk"))
    return Plan(maps, join, walk, launches, shares.groups > 0, counters, N, rest)


def join_launch(heads: int, K: int) -> tuple[int, int, int, int]:
    """The grid, threads, cluster and shared bytes of a kernel that joins segments of `heads` (join.cuh)."""
    return heads * K // JOIN_ROWS, K, 1, 4 * K * (JOIN_STAGES * K + 2 * JOIN_ROWS) + 8 * JOIN_STAGES


def forward_in_segments(
    x: Inputs, machine: Machine, save: bool = False, cut: Cut | None = None, tails: whole.Tails | None = None
) -> tuple[KDAOutput, SavedInSegments | None]:
    """Return the outputs and, with `save`, the tensors for the backward; with `tails`, last tokens stay unwritten.

    Raises:
        ValueError: as `forward.forward`
    """
    cut = cut_of(x) if cut is None else cut
    x = whole.aligned_inputs(x)
    q, v, offsets = x.q, x.v, x.cu_seqlens
    device, K, (HV, V) = q.device, q.shape[3], v.shape[2:]
    plan = plan_of(
        machine, device, q.dtype, x.g.dtype, x.beta.dtype, q.shape, v.shape,
        None if offsets is None else (offsets.shape[0], offsets.dtype),
        x.gate_activation, x.lower_bound, x.beta_activation, x.qk_l2norm, x.scale, save, cut, tails is not None,
        save and whole.is_fine(x), few_heads.is_enabled(),
    )  # fmt: skip
    fp32, N = partial(torch.empty, dtype=torch.float32, device=device), plan.sequences
    rows = cut.rows(x, tails is not None)
    o = torch.empty_like(v)
    final = fp32(N, HV, V, K) if x.final_state else None
    checkpoints = whole.new_checkpoints(x) if x.checkpoint_every else None
    saved = SavedInSegments.like(x, cut) if save else None
    if saved is not None:
        (prepared, states, errors, fine), maps = saved
    else:
        prepared = torch.empty(whole.chunk_rows(x), HV, whole.stage_bytes(K), dtype=torch.uint8, device=device)
        states, errors, fine, maps = None, None, None, fp32(rows, V + K, K)
    progress = torch.zeros(plan.counters, dtype=torch.int32, device=device)
    starts = fp32(rows, V, K)
    tensors = (
        q, x.k, v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state, offsets, o, final, checkpoints, None, progress,
        prepared, states, errors, fine, None, None, maps, starts, *(tails or whole.Tails()),
    )  # fmt: skip
    params = whole.PARAMS.pack_pointers(*addresses(tensors)) + plan.rest
    mapping, walking = plan.grids
    plan.maps.launch(*mapping, params, cooperative=plan.by_roles)
    plan.join.launch(*join_launch(N * HV, K), params)
    plan.walk.launch(*walking, params)
    return KDAOutput(o, final, checkpoints), saved


def recompute(x: Inputs, machine: Machine) -> SavedInSegments:
    """Run the forward again for the tensors that it saves."""
    _, saved = forward_in_segments(x._replace(final_state=False, checkpoint_every=0), machine, save=True)
    assert saved
    return saved
