"""Launcher of segments.cu: the forward over sequences that are cut into segments, in three kernels.

The first computes each segment's transition, by blocks of one role (map_segments.cuh in forward.cu) or with the same
bits in less time by specialised CTAs (map_columns.cuh in two_roles.cu); the second combines them; the last scans.
"""

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
from ....cuda.machine import Launchable, Machine, Properties
from ...activations import GATE_CODES
from ...contract import CHUNK, Inputs, KDAOutput
from .. import spec
from ..spec import ALL_IN_CHUNKS, ALWAYS, AUTO_HEADS, Cut, LastTokens, Signature, cut_of
from . import costs, one_role, two_roles
from .costs import Split
from .params import pointers_of, values_of

SOURCE = str(Path(__file__).with_suffix(".cu"))
TRANSITIONS, LAST_SCAN = 1, 2  # of stage.cuh's SEGMENTS
AUTO_PROCESSORS = 32  # from which "auto" cuts: at most 16 are a group of transitions
SCAN_STAGES = 3
JOIN_ROWS, JOIN_STAGES = 8, 3
TRANSITION_THREADS, TRANSITION_STAGES = 512, 4  # of specialised CTAs; chunks in shared memory, and their v


class Variant(NamedTuple):
    """The compile-time parameters of one of the kernels: those of `whole`, and the cut."""

    whole: one_role.Variant
    part: int  # TRANSITIONS or LAST_SCAN
    cut: Cut

    @property
    def source(self) -> str:
        return one_role.SOURCE if self.part == TRANSITIONS else SOURCE

    @property
    def defines(self) -> dict[str, str | int]:
        return self.whole.defines | self.cut.defines(self.part) | {"SHARED_BYTES": self.shared_bytes}

    @property
    def threads(self) -> int:
        return self.whole.threads if self.part == TRANSITIONS else 160

    @property
    def slices(self) -> int:
        return self.whole.slices * (2 if self.part == TRANSITIONS else 1)

    @property
    def shared_bytes(self) -> int:
        if self.part == TRANSITIONS:
            return self.whole.shared_bytes
        scan = 2 * self.whole.BV * (self.whole.K + 2 * CHUNK)
        return SCAN_STAGES * spec.stage_bytes(self.whole.K) + scan + 8 * (6 * SCAN_STAGES + 5)


class SplitVariant(NamedTuple):
    """The compile-time parameters of transitions by specialised CTAs: those of two_roles.cu, the cut, what is saved."""

    roles: two_roles.Variant
    cut: Cut
    fine: bool  # also saves T' in fp16

    @property
    def source(self) -> str:
        return two_roles.SOURCE

    @property
    def defines(self) -> dict[str, str | int]:
        own = {"BV": self.roles.K, "CLUSTER": 1, "FINE": int(self.fine), "SHARED_BYTES": self.shared_bytes}
        return self.roles.defines | self.cut.defines(TRANSITIONS) | own

    @property
    def shared_bytes(self) -> int:
        """Size in bytes of struct ScanShared in scan_columns.cuh; struct Shared in shared.cuh is smaller."""
        K = self.roles.K
        read = 2 * CHUNK * (2 * K + CHUNK) + 4 * K  # of a prepared chunk
        return TRANSITION_STAGES * (read + 2 * CHUNK * K) + 8 * 5 * TRANSITION_STAGES


def variants_for(
    K: int, dtype: torch.dtype, gate_activation: str, g_wide: bool, arch: int, saves: bool = False, cut: Cut = ALWAYS,
    fine: bool = False,
) -> tuple[Variant, Variant]:  # fmt: skip
    """Return the variants of transitions by blocks of one role, and of the last scan."""
    wide = ARCHS[arch].wgmma and not (dtype == torch.float16 and g_wide)
    first = one_role.variant_of(K, 32 if wide else 16, dtype, gate_activation, g_wide, arch, fine=fine)
    last = one_role.variant_of(K, K // 2, dtype, "lower_bound", False, arch, saves)  # reads no gate
    return Variant(first, TRANSITIONS, cut), Variant(last._replace(cluster=2), LAST_SCAN, cut)


def split_variant_for(s: Signature, arch: int) -> SplitVariant:
    """Return the variant of transitions by specialised CTAs."""
    assert s.cut is not None
    roles = two_roles.variant_for(s.q_shape[3], s.dtype, s.gate_activation, s.g_wide, arch)
    return SplitVariant(roles, s.cut, s.fine)


def variants(arch: int) -> Iterable[Variant | SplitVariant]:
    """Every variant for `arch`."""
    if not ARCHS[arch].bulk_copies:
        return
    flags = (False, True)
    problems = itertools.product(spec.WIDTHS, spec.TYPES, GATE_CODES, flags)
    found = (
        variants_for(*problem, arch, saves, fine=fine)
        for problem in problems
        for saves in flags
        for fine in flags
        if saves >= fine <= (problem[1] in spec.FINE)
    )
    yield from dict.fromkeys(itertools.chain.from_iterable(found))
    for roles, fine in itertools.product(two_roles.variants(arch), flags):
        if not (roles.packed or roles.checkpoints) and (not fine or roles.dtype in spec.FINE):
            yield SplitVariant(roles, ALWAYS, fine)


class SavedInSegments(NamedTuple):
    """The tensors that the forward saves for the backward."""

    whole: spec.Saved
    maps: Tensor  # [rows, V + K, K] fp32, B and F of segments

    @classmethod
    def like(cls, x: Inputs, cut: Cut | None = None) -> SavedInSegments:
        """Unwritten tensors for inputs `x`."""
        cut, K, V = cut_of(x) if cut is None else cut, x.q.shape[3], x.v.shape[3]
        return cls(spec.Saved.like(x), x.q.new_empty(cut.rows(x), V + K, K, dtype=torch.float32))

    @classmethod
    def of(cls, tensors: list[Tensor]) -> SavedInSegments:
        """Undo `tensors`."""
        maps, *kept = tensors
        return cls(spec.Saved(*kept), maps)

    @staticmethod
    def are(tensors: list[Tensor]) -> bool:
        """Return True for `tensors` of this class, False for those of `spec.Saved`, whose first one holds bytes."""
        return tensors[0].dtype == torch.float32

    def tensors(self) -> list[Tensor]:
        """The tensors that exist."""
        return [self.maps, *self.whole.tensors()]


def serves(s: Signature, properties: Properties) -> list[str]:
    """Return the reasons against cutting the sequences of a call, each 'what it is, what it needs'.

    They depend on a sequence's own length and heads, whatever the batch, so that it has one result. The length is read
    last: while compiling, most models get no guard on T.
    """
    if s.rows is not None:
        return ["states are in slots, needs kda"]
    if s.cut is None:
        return ["segments is 'never', needs 'auto' or 'always'"]
    (_, T, HV, _), cut, reasons = s.v_shape, s.cut, []
    if not ARCHS[properties.capability].bulk_copies:
        reasons.append(f"arch is sm_{properties.capability}, needs bulk copies (sm_90 and newer)")
    if cut.tiles // 2 < HV:
        reasons.append(f"HV is {HV}, needs at most {cut.tiles // 2}")
    if cut.auto and HV > AUTO_HEADS:
        reasons.append(f"HV is {HV}, needs at most {AUTO_HEADS} with segments='auto'")
    if cut.auto and (s.initial_state or s.final_state or s.checkpoints):  # equal bits in parts
        reasons.append("takes or returns states, needs segments='always'")
    if cut.auto and properties.processors < AUTO_PROCESSORS:
        reasons.append(f"the GPU has {properties.processors} multiprocessors, needs {AUTO_PROCESSORS}")
    if not reasons and cut.longer > T:
        reasons.append(f"T is {T}, needs {cut.longer}")
    return reasons


def splits(s: Signature, properties: Properties) -> bool:
    """Return True if transitions are computed by specialised CTAs."""
    return not s.packed and not two_roles.general_reasons(s, properties)


def expected_us(s: Signature, properties: Properties) -> float:
    """Return the expected time of a call in microseconds."""
    return costs.segments_us(s, properties.processors, splits(s, properties))


class Plan(NamedTuple):
    """Everything that the launches need except pointers."""

    transitions: Launchable
    join: Launchable
    last_scan: Launchable
    launches: list[tuple[int, int, int, int]]  # blocks, threads, cluster and shared bytes of transitions and last scan
    counters: int  # elements of ForwardParams.progress
    split: bool  # transitions by specialised CTAs
    cut: Cut
    saves: bool
    tails: bool
    state_shape: tuple[int, int, int, int]
    values: bytes


def plan_of(machine: Machine, s: Signature) -> Plan:
    """Return the plan of a call.

    Raises:
        ValueError: there are too many tokens, or the GPU (or its partition) is too small for a CTA group
    """
    return _plan_of(machine, s, splits(s, machine.properties(s.device)))


@functools.lru_cache(spec.PLANS)
def _plan_of(machine: Machine, s: Signature, by_roles: bool) -> Plan:
    cut, N, (_, T, HV, _), (processors, arch, _) = s.cut, s.sequences, s.v_shape, machine.properties(s.device)
    assert cut is not None  # as `serves` has found
    tokens = T if s.packed else spec.in_chunks(T, s.tails)
    segments = cut.most_segments(tokens, HV, s.packed)
    first, last = variants_for(s.q_shape[3], s.dtype, s.gate_activation, s.g_wide, arch, s.saves, cut, s.fine)
    if processors < first.slices:
        raise ValueError(f"x must be on a GPU with at least {first.slices} multiprocessors, got {processors}")
    groups = [min(N * segments * HV, processors // v.slices) for v in (first, last)]
    launches = [
        (n * v.slices, v.threads, v.whole.cluster, v.shared_bytes) for n, v in zip(groups, (first, last), strict=True)
    ]
    source, entry, defines, counters = first.source, "kda_forward", first.defines, groups[0] * 64
    split, by_roles = Split(0, 0, 0), by_roles and segments > 1
    if by_roles:
        chunks, scanned = cut.segment_tokens(tokens, HV) // CHUNK, N * (segments - 1) * HV
        _, split = costs.transitions_split(scanned, chunks, N * HV * -(-tokens // CHUNK), processors)
        roles = split_variant_for(s, arch)
        source, entry, defines, counters = roles.source, two_roles.ENTRY, roles.defines, split.counters
        launches[0] = costs.SLICES * split.groups + split.preparers, TRANSITION_THREADS, 1, roles.shared_bytes
    values = values_of(
        s, N * segments * HV, segments=segments, cut_from=cut.longer, groups=split.groups, places=split.ring_slots
    )
    kernel = machine.load(source, entry, defines, s.device)
    join, walk = (machine.load(SOURCE, f"kda_{what}_segments", last.defines, s.device) for what in ("join", "walk"))
    return Plan(kernel, join, walk, launches, counters, by_roles, cut, s.saves, s.tails, s.state_shape, values)


def join_launch(heads: int, K: int) -> tuple[int, int, int, int]:
    """Return the grid, threads, cluster and shared bytes of a kernel that joins segments of `heads` (join.cuh)."""
    return heads * K // JOIN_ROWS, K, 1, 4 * K * (JOIN_STAGES * K + 2 * JOIN_ROWS) + 8 * JOIN_STAGES


def launch(x: Inputs, plan: Plan, last: LastTokens = ALL_IN_CHUNKS) -> tuple[KDAOutput, SavedInSegments | None]:
    """Return the outputs of aligned inputs, but for those of `last`, and what the call saves.

    Raises:
        RuntimeError: specialised CTAs cannot run at once
    """
    device, (N, HV, V, K), prepared = x.q.device, plan.state_shape, None
    fp32, rows = partial(torch.empty, dtype=torch.float32, device=device), plan.cut.rows(x, plan.tails)
    out = spec.new_outputs(x, plan.state_shape)
    saved = SavedInSegments.like(x, plan.cut) if plan.saves else None
    if saved is None:
        prepared = torch.empty(spec.chunk_rows(x), HV, spec.stage_bytes(K), dtype=torch.uint8, device=device)
    progress = torch.zeros(plan.counters, dtype=torch.int32, device=device)
    kept, maps = (saved.whole, saved.maps) if saved is not None else (None, fp32(rows, V + K, K))
    starts = fp32(rows, V, K)
    params = pointers_of(x, out, last, kept, None, progress, prepared, maps, starts) + plan.values
    plan.transitions.launch(*plan.launches[0], params, cooperative=plan.split)
    plan.join.launch(*join_launch(N * HV, K), params)
    plan.last_scan.launch(*plan.launches[1], params)
    return out, saved
