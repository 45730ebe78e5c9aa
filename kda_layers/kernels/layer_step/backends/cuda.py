"""Our kernel: one launch for everything between a layer's projections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from ...cuda.arch import ARCHS, Arch, caveat_of, priority_of
from ...cuda.gpu import GPU
from ...cuda.machine import Machine
from ...declarations import OneOf
from ...kda.activations import BETA_CODES, GATE_CODES, GIVEN
from ...kda.contract import Names, Widths
from ...kda.cuda.forward.forward import WIDTHS
from ...kda.cuda.layer_step import layer_step
from ..contract import Backend, Inputs, Problem


class CudaBackend(Backend):
    """Our kernel on the GPUs of some compute capabilities."""

    def __init__(self, name: str, archs: tuple[Arch, ...], machine: Machine, device: str = "cuda") -> None:
        """Define the backend `name` of a machine whose tensors are on `device`."""
        self.name, self.archs, self.machine = name, archs, machine
        self.priority, self.caveat = priority_of(archs), caveat_of(archs)
        self.serves = {
            "device": OneOf(device),
            "arch": OneOf(*(arch.capability for arch in archs), prefix="sm_"),
            "dtype": OneOf(*layer_step.TYPES),
            "state_dtype": OneOf(*layer_step.STATES),
            "widths": Widths(*WIDTHS),
            "tokens": OneOf(*range(1, layer_step.MOST_TOKENS + 1)),
            "taps": OneOf(*layer_step.TAPS),
            "decay_rank": OneOf(0, *layer_step.RANKS),
            "gate_rank": OneOf(0, *layer_step.RANKS),
            "gate_activation": Names(*GATE_CODES),
            "beta_activation": Names(*(name for name in BETA_CODES if name != GIVEN)),
        }

    def more_reasons(self, problem: Problem) -> list[str]:
        clusters = all(arch.bulk_copies for arch in self.archs)
        most = layer_step.MOST_GROUP if clusters else 1
        return [] if problem.group <= most else [f"HV/H is {problem.group}, needs at most {most}: a cluster of CTAs"]

    def problems(self) -> list[str]:
        return self.machine.problems()

    def variants(self, arch: str) -> Iterable[tuple[str, Mapping[str, str | int]]]:
        if any(a.target == arch for a in self.archs):
            yield from ((layer_step.SOURCE, v.defines) for v in layer_step.variants(WIDTHS, layer_step.TYPES))

    def step(self, x: Inputs) -> Tensor:
        return layer_step.layer_step(x, self.machine)


BACKENDS = tuple(
    CudaBackend(name, tuple(arch for arch in ARCHS.values() if arch.backend == name), GPU())
    for name in dict.fromkeys(arch.backend for arch in ARCHS.values())
)
