"""The GPUs that kernels are compiled for: one row each. A new one is a row here."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
OVERLAPS = 90  # compute capability times ten from which on a kernel can start before earlier ones have ended


@dataclass(frozen=True)
class Arch:
    """One compute capability."""

    capability: int  # times ten: 90 for an H200
    target: str  # compilation target; an "a" gives instructions of this arch alone, and cubins that only it runs
    backend: str  # name of the backend that serves it
    shared_bytes: int  # the most shared memory of a block
    gpus: str  # examples of GPUs
    run: bool = False  # True if kernels have run on one and are measured, not only compiled
    wgmma: bool = False  # has MMAs of a warpgroup
    bulk_copies: bool = False  # has cp.async.bulk and clusters
    setmaxnreg: bool = False  # moves registers between warpgroups


ARCHS = {
    arch.capability: arch
    for arch in (
        Arch(80, "sm_80", "sm80", 163 * KIB, "A100"),
        Arch(86, "sm_80", "sm80", 99 * KIB, "RTX 30, A10"),
        Arch(87, "sm_80", "sm80", 163 * KIB, "Orin"),
        Arch(89, "sm_80", "sm80", 99 * KIB, "RTX 40, L4, L40"),
        Arch(90, "sm_90a", "sm90", 227 * KIB, "H100, H200", run=True, wgmma=True, bulk_copies=True, setmaxnreg=True),
        Arch(100, "sm_100a", "sm100", 227 * KIB, "B200", bulk_copies=True, setmaxnreg=True),
        Arch(103, "sm_103a", "sm100", 227 * KIB, "GB300", bulk_copies=True, setmaxnreg=True),
        Arch(120, "sm_120a", "sm120", 99 * KIB, "RTX 50", bulk_copies=True, setmaxnreg=True),
    )
}
TARGETS = tuple(dict.fromkeys(arch.target for arch in ARCHS.values()))


def arch_for(capability: int) -> Arch:
    """Return the row of a compute capability times ten; raise a ValueError if there is none."""
    if capability not in ARCHS:
        known = ", ".join(f"{a / 10}" for a in ARCHS)
        raise ValueError(f"compute capability must be one of {known}, got {capability / 10}")
    return ARCHS[capability]
