"""The backends over our CUDA kernels: one source, an instance for each family of GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kda_layers.kernels.contract import Backend, Gradients, Inputs, Problem, StepInputs
from kda_layers.kernels.cuda import chunk, launch, reverse, step

DTYPES = (torch.bfloat16, torch.float16)
SHARED_BYTES = {80: 163 * 1024, 87: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 120: 99 * 1024}  # of a block, at most
MOST_SHARED_BYTES = 227 * 1024  # of sm_90, sm_100 and sm_103


def _shared_bytes(K: int, arch: int) -> int:
    """What a block of chunk.cu takes at least."""
    return min(v.shared_bytes for v in chunk.variants(arch) if v.K == K)


class CudaBackend(Backend):
    """Our kernels on the GPUs of some compute capabilities, forward only."""

    fused = frozenset(("gate", "beta", "qk_l2norm"))

    def __init__(self, name: str, priority: int, archs: tuple[int, ...]) -> None:
        """`archs` are compute capabilities times ten."""
        self.name, self.priority, self.archs = name, priority, archs

    def unsupported(self, problem: Problem) -> list[str]:
        reasons = []
        if problem.device != "cuda":
            reasons.append(f"device is {problem.device}, needs cuda")
        elif problem.arch not in self.archs:
            reasons.append(f"arch is sm_{problem.arch}, needs {' or '.join(f'sm_{a}' for a in self.archs)}")
        if problem.dtype not in DTYPES:
            reasons.append(f"dtype is {str(problem.dtype).removeprefix('torch.')}, needs bfloat16 or float16")
        if problem.K != problem.V or problem.K not in chunk.WIDTHS:
            reasons.append(f"K is {problem.K} and V is {problem.V}, needs both 128 or both 64")
        elif problem.arch in self.archs and not problem.step:
            needed, there = _shared_bytes(problem.K, problem.arch), SHARED_BYTES.get(problem.arch, MOST_SHARED_BYTES)
            if needed > there:
                reasons.append(
                    f"K is {problem.K}, needs {needed} bytes of shared memory, a block of sm_{problem.arch} has {there}"
                )
        if problem.needs_grad:
            reasons.append("gradients are asked for, needs torch.no_grad()")
        return reasons or launch.problems()

    def variants(self, arch: str) -> Iterable[tuple[str, Mapping[str, str | int]]]:
        mine = [a for a in self.archs if launch.build.ARCHS[a] == arch]
        if not mine:
            return
        yield from (("step.cu", v.defines) for v in step.variants(chunk.WIDTHS, DTYPES))
        most = max(SHARED_BYTES.get(a, MOST_SHARED_BYTES) for a in mine)
        for source, launcher in (("chunk.cu", chunk), ("reverse.cu", reverse)):
            yield from ((source, v.defines) for v in launcher.variants(mine[0]) if v.shared_bytes <= most)

    def saved_like(self, x: Inputs) -> list[Tensor]:
        return []

    def chunk(self, x: Inputs, save: bool) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor]]:
        return *chunk.chunk(x)[:3], []

    def chunk_grad(
        self, x: Inputs, saved: list[Tensor], d_o: Tensor, d_final: Tensor | None, d_checkpoints: Tensor | None
    ) -> Gradients:
        raise NotImplementedError(f"backend {self.name!r} has no gradients; `unsupported` says so beforehand")

    def step(self, x: StepInputs) -> Tensor:
        return step.step(x)
