"""What launchers need of whatever runs kernels: a port. Behind it are the GPU (`gpu.GPU`) and the tests' emulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

Dim = tuple[int, int, int]
Variant = tuple[str, Mapping[str, str | int]]  # source, macros


class Properties(NamedTuple):
    """What decides between variants of a kernel and how many blocks it has."""

    processors: int  # multiprocessors
    capability: int  # compute capability times ten
    memory_bytes: int  # of the device, free or not


class Launchable(Protocol):
    """A kernel that takes one struct by value."""

    def launch(self, grid: int | Dim, threads: int, cluster: int, shared_bytes: int, params: bytes) -> None:
        """Launch on the current stream of the kernel's device; a CUDA graph may capture it.

        Args:
            grid: number of blocks, in x alone or in x, y and z; a multiple of cluster
            threads: of a block
            cluster: number of blocks in x that share their memory; 1 for none
            shared_bytes: dynamic shared memory of a block
            params: the struct, as `params.Params` packs it
        """


class Machine(Protocol):
    """Loads kernels and knows its properties."""

    def __hash__(self) -> int: ...  # plans are remembered by machine

    def problems(self) -> list[str]:
        """Why no kernel can be compiled, loaded or launched here, each 'what it is, what it needs'."""

    def properties(self, device: torch.device) -> Properties:
        """Of one device."""

    def load(self, source: str, entry: str, defines: Mapping[str, str | int], device: torch.device) -> Launchable:
        """A kernel on a device, compiled if need be; the same one for the same arguments."""
