"""Launcher of forward.cu: blocks that prepare and scan chunks, in one kernel. It serves every call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ....cuda.arch import ARCHS
from ....cuda.machine import Launchable, Machine, Properties
from ...activations import GATE_CODES
from ...contract import CHUNK, Inputs, KDAOutput
from .. import spec
from ..spec import ALL_IN_CHUNKS, LastTokens, Saved, Signature, stage_bytes
from . import costs
from .params import pointers_of, values_of

SOURCE = str(Path(__file__).with_name("forward.cu"))
STAGES = 2


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
            "K": self.K, "V": self.K, "BV": self.BV, "CLUSTER": self.cluster, "IO": spec.TYPES[self.dtype],
            "GATE": GATE_CODES[self.gate_activation], "G_FP32": int(self.g_wide), "HAS_WGMMA": int(self.wgmma),
            "HAS_SETMAXNREG": int(self.setmaxnreg), "SAVES": int(self.saves), "POOLED": int(self.pooled),
            "FINE": int(self.fine), "TAILS": 0 if self.saves else spec.TAIL, "SHARED_BYTES": self.shared_bytes,
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


def variant_for(s: Signature, processors: int, arch: int) -> Variant:
    """Return the variant for a call on `processors` multiprocessors of `arch`."""
    K, tiles = s.q_shape[3], s.sequences * s.v_shape[2]
    narrow = s.dtype == torch.float16 and s.g_wide
    wide = ARCHS[arch].wgmma and tiles * (K // 16) > processors and not narrow
    BV = 32 if wide else 16
    return variant_of(K, BV, s.dtype, s.gate_activation, s.g_wide, arch, s.saves, s.rows is not None, s.fine)


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
    for K, BV, dtype, gate, g_wide in itertools.product(spec.WIDTHS, (16, 32), spec.TYPES, GATE_CODES, (False, True)):
        if BV == 16 or (ARCHS[arch].wgmma and not (dtype == torch.float16 and g_wide)):
            for saves, pooled in ((False, False), (True, False), (False, True)):
                yield variant_of(K, BV, dtype, gate, g_wide, arch, saves, pooled)
            if dtype in spec.FINE:
                yield variant_of(K, BV, dtype, gate, g_wide, arch, saves=True, fine=True)


class Plan(NamedTuple):
    """Everything that a launch needs except pointers."""

    kernel: Launchable
    variant: Variant
    groups: int  # of CTAs; a group works on one tile at a time
    state_shape: tuple[int, int, int, int]
    values: bytes

    def launch(self, params: bytes) -> None:
        """Launch with the struct's bytes."""
        v = self.variant
        self.kernel.launch(self.groups * v.slices, v.threads, max(v.cluster, 1), v.shared_bytes, params)


def serves(s: Signature, properties: Properties) -> list[str]:
    """Return no reason: other forms are measured against this one."""
    return []


def expected_us(s: Signature, properties: Properties) -> float:
    """Return the expected time of a call in microseconds."""
    return costs.one_role_us(s, properties.processors)


@functools.lru_cache(spec.PLANS)
def plan_of(machine: Machine, s: Signature) -> Plan:
    """Return the plan of a call.

    Raises:
        ValueError: there are too many tokens, or the GPU (or its partition) is too small for a CTA group
    """
    tiles, (processors, arch, _) = s.sequences * s.v_shape[2], machine.properties(s.device)
    variant = variant_for(s, processors, arch)
    groups = min(tiles, processors // variant.slices)  # CTAs of a group wait for each other: all must be resident
    if not groups:
        raise ValueError(f"x must be on a GPU with at least {variant.slices} multiprocessors, got {processors}")
    kernel = machine.load(SOURCE, "kda_forward", variant.defines, s.device)
    return Plan(kernel, variant, groups, s.state_shape, values_of(s, tiles))


def launch(x: Inputs, plan: Plan, last: LastTokens = ALL_IN_CHUNKS) -> tuple[KDAOutput, Saved | None]:
    """Return the outputs of aligned inputs, but for those of `last`, and what the call saves."""
    out, (ring, progress) = spec.new_outputs(x, plan.state_shape), scratch(plan, x.q.device)
    saved = Saved.like(x) if plan.variant.saves else None
    plan.launch(pointers_of(x, out, last, saved, ring, progress) + plan.values)
    return out, saved


def forward(x: Inputs, machine: Machine, save: bool = False) -> tuple[KDAOutput, Saved | None]:
    """Return the outputs, and with `save` the tensors for the backward; last tokens are in chunks.

    Raises:
        ValueError: as `plan_of`
    """
    x = spec.aligned_inputs(x)
    return launch(x, plan_of(machine, Signature.of(x, save)))


def scratch(plan: Plan, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return memory for ForwardParams.ring and .progress."""
    ring, variant = None, plan.variant
    if not variant.cluster:
        return None, None
    progress = torch.zeros(plan.groups * 64, dtype=torch.int32, device=device)
    if not variant.saves:  # otherwise `Saved.prepared` replaces the ring
        ring = torch.empty(plan.groups * variant.ring_bytes, dtype=torch.uint8, device=device)
    return ring, progress
