"""Maps of segments by blocks of two roles (map_columns.cuh in two_roles.cu): the bits of forward.cu's, in less time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ....cuda.arch import ARCHS
from ....cuda.machine import Machine
from ...contract import CHUNK, Inputs
from . import forward as whole
from . import two_roles
from .cut import ALWAYS, MAPS, Cut
from .shares import PREPARES, WIDTH, Shares

THREADS = 512
SLICES = 2  # a block scans v, another rows of I
STAGES = 4  # chunks in shared memory, and their v
SCANS = 1.2  # microseconds of a chunk, on an H100 (docs/internals/studies); as shares.PREPARES


class Variant(NamedTuple):
    """The compile-time parameters of the kernel: those of two_roles.cu, the cut, and what is saved."""

    roles: two_roles.Variant
    cut: Cut
    fine: bool  # also saves T' in fp16

    @property
    def source(self) -> str:
        return two_roles.SOURCE

    @property
    def defines(self) -> dict[str, str | int]:
        own = {"BV": self.roles.K, "CLUSTER": 1, "FINE": int(self.fine), "SHARED_BYTES": self.shared_bytes}
        return self.roles.defines | self.cut.defines(MAPS) | own

    @property
    def shared_bytes(self) -> int:
        """Size in bytes of struct ScanShared in scan_columns.cuh; struct Shared in shared.cuh is smaller."""
        K = self.roles.K
        read = 2 * CHUNK * (2 * K + CHUNK) + 4 * K  # of a prepared chunk
        return STAGES * (read + 2 * CHUNK * K) + 8 * 5 * STAGES


def variant_for(
    K: int, dtype: torch.dtype, gate_activation: str, g_wide: bool, arch: int, cut: Cut = ALWAYS, fine: bool = False
) -> Variant:
    """The variant for an arch with bulk copies."""
    return Variant(two_roles.variant_for(K, dtype, gate_activation, g_wide, arch), cut, fine)


def variants(arch: int) -> Iterable[Variant]:
    """Every variant that may be chosen for `arch`."""
    for roles, fine in itertools.product(two_roles.variants(arch), (False, True)):
        if not (roles.packed or roles.checkpoints) and (not fine or roles.dtype in whole.FINE):
            yield Variant(roles, ALWAYS, fine)


def serves(x: Inputs, machine: Machine) -> bool:
    """Return True if this kernel maps the segments of a call, and is enabled."""
    if x.cu_seqlens is not None or (x.q.shape[3], x.v.shape[3]) != (WIDTH, WIDTH):
        return False
    return ARCHS[machine.properties(x.q.device).capability].wgmma and two_roles.is_enabled()


def shares_for(scanned: int, chunks: int, all_chunks: int, processors: int) -> Shares:
    """The fastest shares for `scanned` segments of `chunks` chunks each; `all_chunks` are prepared.

    Every chunk has a place of its own, as it is kept.
    """

    def time(groups: int) -> float:
        prepare = all_chunks * PREPARES / (processors - SLICES * groups)
        return max(prepare, -(-scanned // groups) * chunks * SCANS)

    groups = min(range(1, min(scanned, (processors - 1) // SLICES) + 1), key=time)
    return Shares(groups, processors - SLICES * groups, -(-scanned // groups) * chunks)
