"""Report what the CUDA toolchain can do on this machine, and compile every kernel before its first use."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from ..registry import registries
from . import build, cache, gpu
from .arch import ARCHS, TARGETS
from .cache import folder as cache_folder
from .machine import Variant

__all__ = ["TARGETS", "archs_here", "cache_folder", "explain", "precompile", "resources", "variants_for"]

PER_PROCESS = 8  # variants at least: with fewer, a process takes longer to start than it saves
Job = tuple[str, str, Mapping[str, str | int]]  # arch, source, macros


def explain() -> str:
    """Return one line: the compiler, the number of cubins and their folder; or why nothing can be compiled."""
    if build.problems():
        return f"cannot: {'; '.join(build.problems())}"
    line = f"NVRTC {build.dotted(build.nvrtc_version())}, {len(cache.entries())} cubins in {cache_folder()}"
    return "; ".join([line, *(f"cannot launch: {reason}" for reason in gpu.problems())])


def archs_here() -> list[str]:
    """Return the compilation targets of this machine's GPUs."""
    capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    found = (ARCHS.get(10 * major + minor) for major, minor in capabilities)
    return list(dict.fromkeys(arch.target for arch in found if arch))


def variants_for(arch: str) -> list[Variant]:
    """Return (source, macros) of every kernel that a backend of any operator may launch on `arch` ("sm_90a")."""
    return [variant for r in registries() for b in r.backends().values() for variant in b.variants(arch)]


def resources(archs: Sequence[str]) -> str:
    """Return a table of what every variant for `archs` takes; compile those that are not in the cache.

    The columns are registers per thread, bytes of static shared memory per block, bytes of stack and of spills per
    thread. Dynamic shared memory is the macro SHARED_BYTES of the variants that have it.

    Raises:
        RuntimeError: the toolchain is missing, or a kernel does not compile
    """
    lines = [f"{'arch':8} {'kernel':18} registers shared stack spilled  macros"]
    for arch, defines, cubin in _compiled(archs):
        macros = " ".join(f"{n}={v}" for n, v in defines.items())
        for kernel, r in build.resources(cubin).items():
            numbers = f"{r.registers:9} {r.shared_bytes:6} {r.stack_bytes:5} {r.spill_stores + r.spill_loads:7}"
            lines.append(f"{arch:8} {kernel:18} {numbers}  {macros}")
    return "\n".join(lines)


def precompile(archs: Sequence[str]) -> str:
    """Compile what the backends may launch on `archs`, so that their first calls do not wait.

    Many variants are compiled in as many processes as this one may use CPUs.

    Args:
        archs: some of `TARGETS`; compiling needs neither a GPU nor a driver

    Returns:
        one line: the number of variants, how many of them had to be compiled, the seconds and the folder

    Raises:
        RuntimeError: the toolchain is missing, a kernel does not compile, or its cubin cannot be cached
    """
    start, before, jobs = time.perf_counter(), len(cache.entries()), _jobs(archs)
    processes = min(len(os.sched_getaffinity(0)), len(jobs) // PER_PROCESS)
    pool = None
    if processes > 1:
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _load_launchers)
    try:
        for problems in _progress((pool.map if pool else map)(_kept, jobs), len(jobs)):
            if problems:
                raise RuntimeError(f"kernels cannot be kept for other processes: {'; '.join(problems)}")
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
    seconds, new = time.perf_counter() - start, len(cache.entries()) - before
    return f"{len(jobs)} variants for {', '.join(archs)}, {new} of them new, {seconds:.1f} s, in {cache_folder()}"


def _compiled(archs: Sequence[str]) -> Iterator[tuple[str, Mapping[str, str | int], build.Cubin]]:
    """Yield (arch, macros, cubin) of every variant for `archs`."""
    jobs = _jobs(archs)
    for arch, source, defines in _progress(jobs, len(jobs)):
        yield arch, defines, build.compile(source, defines, arch)


def _jobs(archs: Sequence[str]) -> list[Job]:
    """Return every variant for `archs`; raise a RuntimeError if nothing can be compiled."""
    if build.problems():
        raise RuntimeError(f"kernels cannot be compiled: {'; '.join(build.problems())}")
    return [(arch, *variant) for arch in archs for variant in variants_for(arch)]


def _load_launchers() -> None:
    """Import the launchers, which define the structs that sources include as headers."""
    variants_for(TARGETS[0])


def _kept(job: Job) -> list[str]:
    """Compile a variant; return why it cannot be kept for other processes."""
    arch, source, defines = job
    build.compile(source, defines, arch)
    return cache.problems()


def _progress(jobs: Iterable[Any], count: int) -> Iterable[Any]:
    """Show on stderr how many of `count` jobs are done."""
    from tqdm import tqdm  # here: a Hub kernel, which never calls this, cannot declare it

    return tqdm(jobs, total=count, desc="compiling", unit="variant", disable=not count)
