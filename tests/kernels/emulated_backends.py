"""The CUDA kernels in the emulator as backends of the registry, so that the tests of every backend run them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor

from kda_layers.kernels.cuda.arch import ARCHS
from kda_layers.kernels.kda.backends.cuda import CudaBackend
from kda_layers.kernels.kda.contract import KDA, DecodeInputs, Gradients, Inputs, KDAOutput, PrefillInputs, Problem
from tests.kernels.emulated import Emulator, GuardedMemory, end_of_memory, guarded_inputs


class EmulatedBackend(CudaBackend):
    """`CudaBackend` of one arch on CPU tensors, in memory that ends where a tensor ends and holds NaN until written."""

    def __init__(self, arch: int):
        row = ARCHS[arch]
        super().__init__(f"{row.backend}@emulator", (row,), Emulator(arch), device="cpu")
        self.priority = -1  # below eager: never chosen automatically

    def refusals(self, problem: Problem) -> list[str]:
        """A CPU tensor has no arch: the emulator's applies."""
        return super().refusals(replace(problem, arch=self.archs[0].capability))

    def forward(self, x: Inputs, save: bool) -> tuple[KDAOutput, list[Tensor]]:
        with GuardedMemory():
            return super().forward(guarded_inputs(x), save)

    def backward(self, x: Inputs, saved: list[Tensor], *gradients: Any) -> Gradients:
        with GuardedMemory():
            return super().backward(guarded_inputs(x), saved, *map(end_of_memory, gradients))

    def affine_map(self, x: Inputs) -> tuple[Tensor, Tensor]:
        with GuardedMemory():
            return super().affine_map(guarded_inputs(x))

    def initial_gradient(self, x: Inputs, saved: list[Tensor], d_o: Tensor) -> Tensor:
        with GuardedMemory():
            return super().initial_gradient(guarded_inputs(x), saved, end_of_memory(d_o))

    def prefill(self, x: PrefillInputs) -> None:
        """Views of wider rows stay views: their strides are part of the call."""
        views = {n: getattr(x, n) for n in ("o", "state", "checkpoints")}
        given = {n: getattr(x, n) for n in ("q", "k", "v", "g", "beta")}
        views |= {n: t for n, t in given.items() if t.stride() != t.new_empty(t.shape).stride()}
        with GuardedMemory():
            super().prefill(guarded_inputs(x)._replace(**views))

    def decode(self, x: DecodeInputs) -> Tensor:
        with GuardedMemory():
            return super().decode(guarded_inputs(x)._replace(state=x.state, state_scale=x.state_scale, out=x.out))

    def verify(self, x: DecodeInputs) -> Tensor:
        written = {n: getattr(x, n) for n in ("state", "updates", "out")}
        with GuardedMemory():
            return super().verify(guarded_inputs(x)._replace(**written))

    def repeated_decode(self, x: DecodeInputs) -> Callable[[DecodeInputs], Tensor]:
        """Return `decode`, which guards the memory of each call."""
        return self.decode


# wgmma; mma.sync with bulk copies; mma.sync with cp.async
EMULATED = {backend.name: backend for backend in map(EmulatedBackend, (90, 100, 80))}


@contextlib.contextmanager
def registered(backend: EmulatedBackend) -> Iterator[None]:
    """Context in which the registry knows the backend, below all others."""
    with mock.patch.dict(KDA.backends(), {backend.name: backend}):
        yield
