"""The CUDA toolchain as a whole: what it can do on this machine, and compiling every kernel before its first use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from ..registry import registries
from . import build, cache, gpu
from .arch import ARCHS, TARGETS
from .machine import Variant

__all__ = ["TARGETS", "archs_here", "cache_folder", "explain", "precompile", "resources", "variants_for"]


def explain() -> str:
    """One line: the compiler, how many cubins are in which folder; or why nothing can be compiled."""
    if build.problems():
        return f"cannot: {'; '.join(build.problems())}"
    line = f"NVRTC {build.dotted(build.nvrtc_version())}, {len(cache.entries())} cubins in {cache.folder()}"
    return "; ".join([line, *(f"cannot launch: {reason}" for reason in gpu.problems())])


def archs_here() -> list[str]:
    """What is compiled for the GPUs of this machine."""
    capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    found = (ARCHS.get(10 * major + minor) for major, minor in capabilities)
    return list(dict.fromkeys(arch.target for arch in found if arch))


def cache_folder() -> Path:
    """Folder of compiled kernels.

    Raises:
        ValueError: $KDA_LAYERS_CACHE is a relative path
        RuntimeError: the home directory is needed and unknown
    """
    return cache.folder()


def variants_for(arch: str) -> list[Variant]:
    """(source, macros) of every kernel that a backend of any operator may launch on `arch` ("sm_90a")."""
    return [variant for r in registries() for b in r.backends().values() for variant in b.variants(arch)]


def resources(archs: Sequence[str]) -> str:
    """A table of what every variant for `archs` takes, as the compiler reports it; compiles what is not in the cache.

    Registers a thread, bytes of static shared memory a block, of stack and of spills a thread. Dynamic shared memory
    is the macro SHARED_BYTES of the variants that have it.

    Raises: as `precompile`.
    """
    if build.problems():
        raise RuntimeError(f"kernels cannot be compiled: {'; '.join(build.problems())}")
    variants = [(arch, *variant) for arch in archs for variant in variants_for(arch)]
    lines = [f"{'arch':8} {'kernel':18} registers shared stack spilled  macros"]
    for arch, source, defines in tqdm(variants, desc="compiling", unit="variant", disable=not variants):
        for kernel, r in build.resources(build.compile(source, defines, arch)).items():
            spilled, macros = r.spill_stores + r.spill_loads, " ".join(f"{n}={v}" for n, v in defines.items())
            lines.append(
                f"{arch:8} {kernel:18} {r.registers:9} {r.shared_bytes:6} {r.stack_bytes:5} {spilled:7}  {macros}"
            )
    return "\n".join(lines)


def precompile(archs: Sequence[str]) -> str:
    """Compile what the backends may launch on `archs`, so that no first use waits; progress goes to stderr.

    Args:
        archs: of `TARGETS`; neither a GPU nor a driver is needed

    Returns:
        one line: how many variants of kernels there are, how many had to be compiled, the seconds and the folder

    Raises:
        RuntimeError: the toolchain is not there, a kernel does not compile, or its cubin cannot be kept
    """
    if build.problems():
        raise RuntimeError(f"kernels cannot be compiled: {'; '.join(build.problems())}")
    start, before = time.perf_counter(), len(cache.entries())
    variants = [(arch, *variant) for arch in archs for variant in variants_for(arch)]
    for arch, source, defines in tqdm(variants, desc="compiling", unit="variant", disable=not variants):
        build.compile(source, defines, arch)
        if cache.problems():
            raise RuntimeError(f"kernels cannot be kept for other processes: {'; '.join(cache.problems())}")
    seconds, new = time.perf_counter() - start, len(cache.entries()) - before
    return f"{len(variants)} variants for {', '.join(archs)}, {new} of them new, {seconds:.1f} s, in {cache.folder()}"
