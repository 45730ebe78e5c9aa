"""Launcher of forward.cu: blocks that prepare and scan chunks, in one kernel. It serves every call, also of engines.

Its kernel also computes the transitions of segments (segments.py), whose last scan has the same parameters.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ....cuda.arch import ARCHS
from ....cuda.machine import Machine
from ...activations import GATE_CODES
from ...contract import CHUNK
from .. import spec
from ..spec import Cut, Plan, Signature, stage_bytes

SOURCE, SEGMENTS_SOURCE = (str(Path(__file__).with_name(name)) for name in ("forward.cu", "segments.cu"))
ENTRY = "kda_forward"
STAGES = 2
TRANSITIONS, LAST_SCAN = 1, 2  # parts of a call whose sequences are cut; as in stage.cuh's SEGMENTS
SCAN_STAGES = 3  # of the last scan


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
    T_fp16: bool = False  # also saves T' in fp16
    part: int = 0  # TRANSITIONS or LAST_SCAN of sequences that are cut
    cut: Cut | None = None  # with `part`
    head_gates: bool = False  # one gate for all channels of a head

    @property
    def source(self) -> str:
        return SEGMENTS_SOURCE if self.part == LAST_SCAN else SOURCE

    @property
    def defines(self) -> dict[str, str | int]:
        return {
            "K": self.K, "V": self.K, "BV": self.BV, "CLUSTER": self.cluster, "IO": spec.TYPES[self.dtype],
            "GATE": GATE_CODES[self.gate_activation], "G_FP32": int(self.g_wide), "HAS_WGMMA": int(self.wgmma),
            "HAS_SETMAXNREG": int(self.setmaxnreg), "SAVES": int(self.saves), "POOLED": int(self.pooled),
            "T_FP16": int(self.T_fp16), "LAST_TOKENS": 0 if self.saves else spec.LAST_TOKENS,
            "SHARED_BYTES": self.shared_bytes, "HEAD_GATES": int(self.head_gates),
            **({} if self.cut is None else self.cut.defines(self.part)),
        }  # fmt: skip

    @property
    def threads(self) -> int:
        return 160 if self.part == LAST_SCAN else 32 * (self.K // 16 + 8)

    @property
    def slices(self) -> int:
        return self.K // self.BV * (2 if self.part == TRANSITIONS else 1)

    @property
    def ring_bytes(self) -> int:
        """Size in bytes of a CTA group's prepared chunks in global memory."""
        return 3 * self.slices * stage_bytes(self.K)

    @property
    def shared_bytes(self) -> int:
        """Size in bytes of struct Shared in shared.cuh, of the last scan of that in scan.cuh."""
        scan = self.BV * 2 * (self.K + 2 * CHUNK)
        if self.part == LAST_SCAN:
            return SCAN_STAGES * stage_bytes(self.K) + scan + 8 * (6 * SCAN_STAGES + 5)
        exchanged = 2 * (CHUNK * self.K * 2 + 16 * self.K) + 20 * CHUNK
        sums = self.K // 64 * 10240 + 6 * 512 + self.K * 16
        gates = self.K * 16 + (0 if self.g_wide or self.head_gates else CHUNK * self.K * 2)
        return STAGES * stage_bytes(self.K) + scan + exchanged + sums + gates + 8 * (6 * STAGES + 5)


def variant_for(s: Signature, processors: int, arch: int) -> Variant:
    """Return the variant for a call on `processors` multiprocessors of `arch`."""
    K, tiles = s.q_shape[3], s.sequences * s.v_shape[2]
    narrow = s.dtype == torch.float16 and s.g_wide
    wide = ARCHS[arch].wgmma and tiles * (K // 16) > processors and not narrow
    BV = 32 if wide else 16
    v = variant_of(K, BV, s.dtype, s.gate_activation, s.g_wide, arch, s.saves, s.rows is not None, s.T_fp16)
    return v._replace(head_gates=s.head_gates)


def variant_of(
    K: int, BV: int, dtype: torch.dtype, gate_activation: str, g_wide: bool, arch: int,
    saves: bool = False, pooled: bool = False, T_fp16: bool = False,
) -> Variant:  # fmt: skip
    """The variant with blocks of BV columns."""
    has = ARCHS[arch]
    cluster = 0 if not has.bulk_copies else 2 if BV == 32 else 1  # two blocks share a copy where bandwidth limits
    return Variant(K, BV, cluster, dtype, gate_activation, g_wide, has.wgmma, has.setmaxnreg, saves, pooled, T_fp16)


def variants(arch: int) -> Iterable[Variant]:
    """Every variant that `variant_for` may return for `arch`, whatever its shared memory; for heads `OF_HEADS`."""
    return spec.with_those_of_heads(_of_channels(arch))


def _of_channels(arch: int) -> Iterable[Variant]:
    """Every variant for gates of channels."""
    for K, BV, dtype, gate, g_wide in itertools.product(spec.WIDTHS, (16, 32), spec.TYPES, GATE_CODES, (False, True)):
        if BV == 16 or (ARCHS[arch].wgmma and not (dtype == torch.float16 and g_wide)):
            for saves, pooled in ((False, False), (True, False), (False, True)):
                yield variant_of(K, BV, dtype, gate, g_wide, arch, saves, pooled)
            if dtype in spec.T_FP16:
                yield variant_of(K, BV, dtype, gate, g_wide, arch, saves=True, T_fp16=True)


@functools.lru_cache(spec.PLANS)
def plan_of(machine: Machine, s: Signature) -> Plan:
    """Return the plan of a call.

    Raises:
        ValueError: there are too many tokens, or the GPU (or its partition) is too small for a CTA group
    """
    tiles, (processors, arch, _) = s.sequences * s.v_shape[2], machine.properties(s.device)
    v = variant_for(s, processors, arch)
    groups = min(tiles, processors // v.slices)  # CTAs of a group wait for each other: all must be resident
    if not groups:
        raise ValueError(f"x must be on a GPU with at least {v.slices} multiprocessors, got {processors}")
    launch = spec.launch_of(machine, s.device, v, ENTRY, groups * v.slices, max(v.cluster, 1))
    ring = v.cluster and not v.saves  # `Saved.prepared` replaces it
    return Plan(
        (launch,), spec.values_of(s, tiles), counters=64 * groups if v.cluster else 0,
        ring_bytes=groups * v.ring_bytes if ring else 0, saves=v.saves,
    )  # fmt: skip
