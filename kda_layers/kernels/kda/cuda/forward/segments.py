"""Launcher of segments.cu: the forward over sequences that are cut into segments, in three kernels.

The first computes each segment's transition, by blocks of one role (transitions.cuh in forward.cu) or with the same
bits in less time by specialised CTAs (state_columns.cuh in two_roles.cu); the second combines them; the last
scans.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import torch

from ....cuda.arch import ARCHS
from ....cuda.machine import Launch, Machine, Properties
from ...activations import GATE_CODES
from ...contract import CHUNK
from .. import spec
from ..spec import ALWAYS, AUTO_HEADS, Cut, Plan, Signature
from . import costs, one_role, two_roles
from .costs import Split
from .one_role import LAST_SCAN, TRANSITIONS

AUTO_PROCESSORS = 32  # from which "auto" cuts: at most 16 are a group of transitions
JOIN_ROWS, JOIN_STAGES = 8, 3


def variants_for(
    K: int, dtype: torch.dtype, gate_activation: str, g_wide: bool, arch: int, saves: bool = False, cut: Cut = ALWAYS,
    T_fp16: bool = False,
) -> tuple[one_role.Variant, one_role.Variant]:  # fmt: skip
    """Return the variants of transitions by blocks of one role, and of the last scan."""
    wide = ARCHS[arch].wgmma and not (dtype == torch.float16 and g_wide)
    first = one_role.variant_of(K, 32 if wide else 16, dtype, gate_activation, g_wide, arch, T_fp16=T_fp16)
    last = one_role.variant_of(K, K // 2, dtype, "lower_bound", False, arch, saves)  # reads no gate
    return first._replace(part=TRANSITIONS, cut=cut), last._replace(cluster=2, part=LAST_SCAN, cut=cut)


def variants(arch: int) -> Iterable[one_role.Variant | two_roles.Variant]:
    """Every variant for `arch`, of gates of heads `OF_HEADS`."""
    if not ARCHS[arch].bulk_copies:
        return
    flags = (False, True)
    problems = itertools.product(spec.WIDTHS, spec.TYPES, GATE_CODES, flags)
    found = (
        variants_for(*problem, arch, saves, T_fp16=T_fp16)
        for problem in problems
        for saves in flags
        for T_fp16 in flags
        if saves >= T_fp16 <= (problem[1] in spec.T_FP16)
    )
    yield from spec.with_those_of_heads(dict.fromkeys(itertools.chain.from_iterable(found)))
    for roles, T_fp16 in itertools.product(two_roles.variants(arch), flags):
        plain = not (roles.packed or roles.checkpoints or roles.saves or roles.pooled or roles.followed)
        if plain and (not T_fp16 or roles.dtype in spec.T_FP16):
            yield roles._replace(cut=ALWAYS, T_fp16=T_fp16)


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
    tokens = T if s.packed else spec.in_chunks(T, s.last_tokens)
    segments = cut.most_segments(tokens, HV, s.packed)
    first, last = variants_for(s.q_shape[3], s.dtype, s.gate_activation, s.g_wide, arch, s.saves, cut, s.T_fp16)
    first = first._replace(head_gates=s.head_gates)
    if processors < first.slices:
        raise ValueError(f"x must be on a GPU with at least {first.slices} multiprocessors, got {processors}")
    new = functools.partial(spec.launch_of, machine, s.device)
    groups, scanning = (min(N * segments * HV, processors // v.slices) for v in (first, last))
    if by_roles and segments > 1:
        chunks, scanned = cut.segment_tokens(tokens, HV) // CHUNK, N * (segments - 1) * HV
        every = N * HV * -(-tokens // CHUNK)
        _, split = costs.transitions_split(scanned, chunks, every, processors, costs.prepare_us(s))
        roles = two_roles.variant_for(s.q_shape[3], s.dtype, s.gate_activation, s.g_wide, arch)
        roles = roles._replace(cut=cut, T_fp16=s.T_fp16, head_gates=s.head_gates)
        blocks = costs.SLICES * split.groups + split.preparers
        transitions, counters = new(roles, two_roles.ENTRY, blocks, cooperative=True), split.counters
    else:
        split, counters = Split(0, 0, 0), groups * 64
        transitions = new(first, one_role.ENTRY, groups * first.slices, first.cluster)
    join = machine.load(last.source, "kda_join_segments", last.defines, s.device)
    last_scan = new(last, "kda_scan_segments", scanning * last.slices, last.cluster)
    s = s._replace(cut_from=cut.longer)
    values = spec.values_of(s, N * segments * HV, segments, split.groups, split.ring_slots)
    joins = join_launch(cut.most_cut(N, T, s.packed) * HV, last.K)
    launches = transitions, Launch(join, *joins), last_scan
    return Plan(launches, values, counters, saves=s.saves, cut=cut, last_tokens=s.last_tokens)


def join_launch(heads: int, K: int) -> tuple[int, int, int, int]:
    """Return the grid, threads, cluster and shared bytes of a kernel that joins segments of `heads` (join.cuh)."""
    return heads * K // JOIN_ROWS, K, 1, 4 * K * (JOIN_STAGES * K + 2 * JOIN_ROWS) + 8 * JOIN_STAGES
