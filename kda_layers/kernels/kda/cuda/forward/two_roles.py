"""Launcher of two_roles.cu: specialised CTAs, which prepare or scan; faster with few heads and for packed sequences.

All its blocks wait for each other, so it is launched cooperatively: a GPU starts it when all of them can run. If it
saves for a backward, a block waits only for those before it, so that other kernels may run beside.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ....cuda.arch import ARCHS
from ....cuda.machine import Machine, Properties
from ...activations import GATE_CODES
from ...contract import CHUNK
from .. import spec
from ..spec import Cut, Plan, Signature
from . import costs
from .costs import BV, MOST_GROUPS_PACKED, SCAN_STAGES, STATE_STAGES, STRETCH, WIDTH, Split
from .one_role import TRANSITIONS

SOURCE, ENTRY = str(Path(__file__).with_suffix(".cu")), "kda_forward_two_roles"
THREADS, TRANSITION_THREADS = 384, 512
declined: str | None = None  # why specialised CTAs are not used in this process; set by forms.py


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
    cut: Cut | None = None  # of the transitions of sequences that are cut (segments.py)
    T_fp16: bool = False  # with `cut` or `saves`: also saves T' in fp16
    head_gates: bool = False  # one gate for all channels of a head
    saves: bool = False  # what the backward reads
    pooled: bool = False  # for engines: states in slots of a pool, rows of tokens with strides
    followed: bool = False  # some CTAs scan states alone, and others follow with the outputs

    @property
    def source(self) -> str:
        return SOURCE

    @property
    def defines(self) -> dict[str, str | int]:
        transitions: dict[str, str | int] = {}
        if self.cut is not None:
            transitions = {"BV": self.K, "CLUSTER": 1, **self.cut.defines(TRANSITIONS)}
        return {
            "K": self.K, "V": self.K, "BV": BV, "CLUSTER": self.slices, "IO": spec.TYPES[self.dtype],
            "GATE": GATE_CODES[self.gate_activation], "G_FP32": int(self.g_wide), "HAS_WGMMA": int(self.wgmma),
            "HAS_SETMAXNREG": int(self.setmaxnreg), "SAVES": int(self.saves), "POOLED": int(self.pooled),
            "BLOCK_ROLES": 1,
            "T_FP16": int(self.T_fp16), "LAST_TOKENS": 0 if self.saves else spec.LAST_TOKENS,
            "SHARED_BYTES": self.shared_bytes, "PACKED": int(self.packed), "CHECKPOINTS": int(self.checkpoints),
            "HEAD_GATES": int(self.head_gates), "STRETCH": STRETCH * self.followed,
            **transitions,
        }  # fmt: skip

    @property
    def threads(self) -> int:
        return THREADS if self.cut is None else TRANSITION_THREADS

    @property
    def slices(self) -> int:
        return self.K // BV

    @property
    def shared_bytes(self) -> int:
        """Size in bytes of struct ScanShared in scan_columns.cuh; struct Shared in shared.cuh is smaller."""
        if self.cut is not None:
            read = 2 * CHUNK * (2 * self.K + CHUNK) + 4 * self.K  # of a prepared chunk
            return STATE_STAGES * (read + 2 * CHUNK * self.K) + 8 * 5 * STATE_STAGES
        prepared, barriers = SCAN_STAGES * spec.stage_bytes(self.K), 8 * (4 * SCAN_STAGES + 2)
        if self.saves:
            return prepared + 2 * 2 * CHUNK * BV + 2 * BV * self.K + barriers + 8 * 3
        return prepared + 4 * 2 * CHUNK * BV + barriers


def variant_for(
    K: int, dtype: torch.dtype, gate_activation: str, g_wide: bool, arch: int, packed: bool = False,
    checkpoints: bool = False, saves: bool = False, T_fp16: bool = False,
) -> Variant:  # fmt: skip
    """The variant for an arch with bulk copies."""
    has = ARCHS[arch]
    v = Variant(K, dtype, gate_activation, g_wide, has.wgmma, has.setmaxnreg, packed, checkpoints)
    return v._replace(saves=saves, T_fp16=T_fp16)


def variants(arch: int) -> Iterable[Variant]:
    """Every variant that may be chosen for `arch`, of gates of heads `OF_HEADS`."""
    if not ARCHS[arch].wgmma:
        return ()
    flags = (False, True)
    choices = itertools.product(spec.TYPES, GATE_CODES, flags, flags, flags, flags, flags)
    found = (variant_for(WIDTH, *choice[:3], arch, *choice[3:]) for choice in choices)
    plain = [v for v in found if v.saves >= v.T_fp16 <= (v.dtype in spec.T_FP16)]
    pooled = [v._replace(pooled=True) for v in plain if not (v.checkpoints or v.saves)]
    followed = [v._replace(followed=True) for v in (*plain, *pooled) if not (v.packed or v.checkpoints)]
    return spec.with_those_of_heads((*plain, *pooled, *followed))


def serves(s: Signature, properties: Properties) -> list[str]:
    """Return the reasons against this form for a call, each 'what it is, what it needs'."""
    return general_reasons(s, properties) or costs.unmeasured(costs.Work.of(s), properties.processors)


def general_reasons(s: Signature, properties: Properties) -> list[str]:
    """Return the reasons against specialised CTAs in any kernel."""
    K, V, arch = s.q_shape[3], s.v_shape[3], properties.capability
    reasons = [] if declined is None else [declined]
    if (K, V) != (WIDTH, WIDTH):
        reasons.append(f"widths are K = {K} and V = {V}, needs both {WIDTH}")
    return reasons if ARCHS[arch].wgmma else [*reasons, f"arch is sm_{arch}, needs sm_90"]


def split_of(s: Signature, processors: int) -> Split:
    """Return the fastest split for a call that this form serves."""
    found = costs.fastest(costs.Work.of(s), processors)
    assert found is not None  # as `serves` has found
    return found[1]


@functools.lru_cache(spec.PLANS)
def plan_of(machine: Machine, s: Signature) -> Plan:
    """Return the plan of a call.

    Raises:
        ValueError: there are too many tokens
    """
    processors, arch, _ = machine.properties(s.device)
    split = split_of(s, processors)
    assert split.groups <= (MOST_GROUPS_PACKED if s.packed else s.sequences * s.v_shape[2])
    pooled = s.rows is not None
    checkpoints = s.checkpoints and not pooled
    v = variant_for(s.q_shape[3], s.dtype, s.gate_activation, s.g_wide, arch, s.packed, checkpoints, s.saves, s.T_fp16)
    v = v._replace(head_gates=s.head_gates, pooled=pooled, followed=split.followers > 0)
    blocks = (split.groups + split.followers) * v.slices + split.preparers
    assert not split.followers or split.groups == s.sequences * s.v_shape[2], "a group leads one tile"
    launch = spec.launch_of(machine, s.device, v, ENTRY, blocks, v.slices, cooperative=not s.saves)
    if s.saves:  # rows of saved chunks replace the ring
        split = split._replace(ring_slots=most_chunks(s, split.groups))
    else:
        assert split.ring_slots >= split.least_slots
    # a ring and, unless the sequences are packed, states that are handed over
    states = 0 if s.packed else 4 * v.K**2 * split.handed_states
    group_bytes = (0 if s.saves else split.ring_slots * spec.stage_bytes(v.K)) + states
    values = spec.values_of(
        s, s.sequences * s.v_shape[2], groups=split.groups, ring_slots=split.ring_slots, followers=split.followers
    )
    return Plan((launch,), values, split.counters, split.groups * group_bytes, saves=s.saves)


def most_chunks(s: Signature, groups: int) -> int:
    """Return the most chunks of a CTA group; of packed sequences, whose lengths only the GPU knows, an upper bound."""
    rows, HV = s.chunk_rows, s.v_shape[2]
    # a group has at most so many heads of each packed sequence
    return max(rows * -(-HV // groups), 1) if s.packed else -(-rows * HV // groups)
