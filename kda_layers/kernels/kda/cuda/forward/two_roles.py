"""Launcher of two_roles.cu: specialised CTAs, which prepare or scan; faster with few heads and for packed sequences.

All its blocks wait for each other, so it is launched cooperatively: a GPU starts it when all of them can run.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ....cuda.arch import ARCHS
from ....cuda.machine import Launchable, Machine, Properties
from ...activations import GATE_CODES
from ...contract import CHUNK, Inputs, KDAOutput
from .. import spec
from ..spec import ALL_IN_CHUNKS, LastTokens, Signature
from . import costs
from .costs import BV, MOST_GROUPS_PACKED, WIDTH, Split
from .params import pointers_of, values_of

SOURCE, ENTRY = str(Path(__file__).with_suffix(".cu")), "kda_forward_two_roles"
THREADS = 384
SCAN_STAGES = 3
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

    @property
    def defines(self) -> dict[str, str | int]:
        return {
            "K": self.K, "V": self.K, "BV": BV, "CLUSTER": self.slices, "IO": spec.TYPES[self.dtype],
            "GATE": GATE_CODES[self.gate_activation], "G_FP32": int(self.g_wide), "HAS_WGMMA": int(self.wgmma),
            "HAS_SETMAXNREG": int(self.setmaxnreg), "SAVES": 0, "POOLED": 0, "BLOCK_ROLES": 1, "TAILS": spec.TAIL,
            "SHARED_BYTES": self.shared_bytes, "PACKED": int(self.packed),
            "CHECKPOINTS": int(self.checkpoints),
        }  # fmt: skip

    @property
    def slices(self) -> int:
        return self.K // BV

    @property
    def shared_bytes(self) -> int:
        """Size in bytes of struct ScanShared in scan_columns.cuh; struct Shared in shared.cuh is smaller."""
        return SCAN_STAGES * spec.stage_bytes(self.K) + 4 * 2 * CHUNK * BV + 8 * (4 * SCAN_STAGES + 2)


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
        for dtype, gate, g_wide, *rest in itertools.product(spec.TYPES, GATE_CODES, flags, flags, flags):
            yield variant_for(WIDTH, dtype, gate, g_wide, arch, *rest)


def serves(s: Signature, properties: Properties) -> list[str]:
    """Return the reasons against this form for a call, each 'what it is, what it needs'."""
    reasons = general_reasons(s, properties)
    if s.rows is not None:
        reasons.append("states are in slots, needs kda")
    if s.saves:
        reasons.append("is saved for the backward, needs torch.no_grad()")
    return reasons or costs.unmeasured(costs.Work.of(s), properties.processors)


def general_reasons(s: Signature, properties: Properties) -> list[str]:
    """Return the reasons against specialised CTAs in any kernel."""
    K, V, arch = s.q_shape[3], s.v_shape[3], properties.capability
    reasons = [] if declined is None else [declined]
    if (K, V) != (WIDTH, WIDTH):
        reasons.append(f"widths are K = {K} and V = {V}, needs both {WIDTH}")
    return reasons if ARCHS[arch].wgmma else [*reasons, f"arch is sm_{arch}, needs sm_90"]


def expected_us(s: Signature, properties: Properties) -> float:
    """Return the expected time of a call in microseconds."""
    return costs.two_roles_us(s, properties.processors)


class Plan(NamedTuple):
    """Everything that a launch needs except pointers."""

    kernel: Launchable
    variant: Variant
    split: Split
    state_shape: tuple[int, int, int, int]
    values: bytes


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
    assert split.ring_slots > SCAN_STAGES, "a slot is free when its chunk was read, which is told SCAN_STAGES later"
    variant = variant_for(s.q_shape[3], s.dtype, s.gate_activation, s.g_wide, arch, s.packed, s.checkpoints)
    values = values_of(s, s.sequences * s.v_shape[2], groups=split.groups, places=split.ring_slots)
    kernel = machine.load(SOURCE, ENTRY, variant.defines, s.device)
    return Plan(kernel, variant, split, s.state_shape, values)


def launch(x: Inputs, plan: Plan, last: LastTokens = ALL_IN_CHUNKS) -> tuple[KDAOutput, None]:
    """Return the outputs of aligned inputs, but for those of `last`, and None.

    Raises:
        RuntimeError: the blocks cannot run at once
    """
    device, split, variant, (_, _, V, K) = x.v.device, plan.split, plan.variant, plan.state_shape
    out = spec.new_outputs(x, plan.state_shape)
    # a ring and, unless the sequences are packed, a state that is handed over
    handed_over = 0 if x.cu_seqlens is not None else 4 * V * K
    ring_bytes = split.groups * (split.ring_slots * spec.stage_bytes(K) + handed_over)
    ring = torch.empty(ring_bytes, dtype=torch.uint8, device=device)
    progress = torch.zeros(split.counters, dtype=torch.int32, device=device)
    params = pointers_of(x, out, last, None, ring, progress) + plan.values
    blocks = split.groups * variant.slices + split.preparers
    plan.kernel.launch(blocks, THREADS, variant.slices, variant.shared_bytes, params, cooperative=True)
    return out, None
