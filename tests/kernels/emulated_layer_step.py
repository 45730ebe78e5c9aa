"""The kernel of a layer's decode step in the emulator: a function, and a backend of the registry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

from torch import Tensor

from kda_layers.kernels.cuda.arch import ARCHS
from kda_layers.kernels.kda.cuda.layer_step import layer_step as launcher
from kda_layers.kernels.kda.cuda.layer_step.backends import CudaBackend
from kda_layers.kernels.kda.cuda.layer_step.contract import LAYER_STEP, Inputs, Problem
from kda_layers.modeling.layer import weights
from tests.kernels.emulated import Emulator, GuardedMemory, end_of_memory

__all__ = ["EmulatedLayerStep", "end_of_memory", "first_choice", "registered", "step"]


def step(x: Inputs, *, seed: int = 0, arch: int = 90) -> Tensor:
    """Outputs of the kernel; `x.conv_state` and `x.state` are updated in place. `seed` chooses the order."""
    guarded = Inputs(*(end_of_memory(t) for t in x))._replace(conv_state=x.conv_state, state=x.state, out=x.out)
    with GuardedMemory():
        return launcher.layer_step(guarded, Emulator(arch, seed=seed))


class EmulatedLayerStep(CudaBackend):
    """`CudaBackend` of one arch on CPU tensors."""

    def __init__(self, arch: int, priority: int = -1):
        row = ARCHS[arch]
        super().__init__(f"{row.backend}@emulator", (row,), Emulator(arch), device="cpu")
        self.priority = priority
        self.calls: list[Inputs] = []

    def refusals(self, problem: Problem) -> list[str]:
        """A CPU tensor has no arch: the emulator's applies."""
        return super().refusals(replace(problem, arch=self.archs[0].capability))

    def step(self, x: Inputs) -> Tensor:
        self.calls.append(x)
        return step(x, arch=self.archs[0].capability)

    def repeated(self, x: Inputs) -> Callable[[Inputs], Tensor]:
        """Return `step`, which guards the memory of each call."""
        return self.step


@contextlib.contextmanager
def registered(backend: EmulatedLayerStep) -> Iterator[None]:
    """Context in which the registry knows the backend, first of all if its priority is above that of eager."""
    known = LAYER_STEP.backends()
    ordered = sorted((*known.values(), backend), key=lambda b: -b.priority)
    with mock.patch.object(LAYER_STEP, "_found", {b.name: b for b in ordered}):
        LAYER_STEP.clear_caches()
        yield
    LAYER_STEP.clear_caches()


@contextlib.contextmanager
def first_choice() -> Iterator[EmulatedLayerStep]:
    """Context in which layers on a CPU decode by the emulated kernel, and their weights are laid side by side."""
    backend = EmulatedLayerStep(90, priority=99)
    with mock.patch.object(weights, "DEVICES", ("cpu",)), registered(backend):
        yield backend
