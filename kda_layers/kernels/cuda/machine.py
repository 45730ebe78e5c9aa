"""The interface through which kernels are loaded and launched, on the GPU (`gpu.GPU`) or in the tests' emulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

Dim = tuple[int, int, int]
Variant = tuple[str, Mapping[str, str | int]]  # source, macros


class Properties(NamedTuple):
    """Properties of a device, which choose the variant of a kernel and its number of blocks."""

    processors: int  # multiprocessors
    capability: int  # compute capability times ten
    memory_bytes: int  # total memory


class Launchable(Protocol):
    """A kernel that takes one struct by value."""

    def launch(
        self, grid: int | Dim, threads: int, cluster: int, shared_bytes: int, params: bytes, overlap: bool = False,
        cooperative: bool = False,
    ) -> None:  # fmt: skip
        """Launch on the current stream of the kernel's device; a CUDA graph may capture it.

        Args:
            grid: number of blocks in x, or in x, y and z; a multiple of cluster
            threads: threads per block
            cluster: blocks per cluster, in x; 1 for no cluster
            shared_bytes: dynamic shared memory per block
            params: the struct, as `params.Params` packs it
            overlap: start before earlier kernels of the stream have ended (programmatic dependent launch, sm_90 and
                newer); the kernel waits for them itself
            cooperative: start all blocks at once, so that they may wait for each other

        Raises:
            ValueError: params does not have the size of the struct
            RuntimeError: the launch failed, or it is cooperative and the device cannot run all blocks at once
        """


class Machine(Protocol):
    """Loads kernels and knows its properties."""

    def __hash__(self) -> int: ...  # launch plans are cached by machine

    def problems(self) -> list[str]:
        """Reasons why no kernel can be compiled, loaded or launched here, each 'what it is, what it needs'."""

    def properties(self, device: torch.device) -> Properties:
        """Return the properties of one device."""

    def load(self, source: str, entry: str, defines: Mapping[str, str | int], device: torch.device) -> Launchable:
        """Return a kernel on a device, compiled if necessary; the same object for the same arguments."""


class Launch(NamedTuple):
    """A kernel and everything of its launch except the parameters; see `Launchable.launch`."""

    kernel: Launchable
    grid: int | Dim
    threads: int
    cluster: int
    shared_bytes: int
    overlap: bool = False
    cooperative: bool = False

    def run(self, params: bytes) -> None:
        """Launch with the bytes of the struct."""
        kernel, grid, threads, cluster, shared_bytes, overlap, cooperative = self
        kernel.launch(grid, threads, cluster, shared_bytes, params, overlap=overlap, cooperative=cooperative)
