"""The backends over our CUDA kernels: one source, an instance for each family of GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ...cuda import launch
from ..contract import Backend, Gradients, Inputs, Problem, StepInputs
from .backward import gradients, reverse_scan
from .decode import decode
from .forward import forward

DTYPES = (torch.bfloat16, torch.float16)
SHARED_BYTES = {80: 163 * 1024, 87: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 120: 99 * 1024}  # of a block, at most
MOST_SHARED_BYTES = 227 * 1024  # of sm_90, sm_100 and sm_103
LAUNCHERS = (forward, reverse_scan, gradients)
MOST_SAVED = 0.01  # of the device's memory, by one call, where the caller leaves it to us


def _shared_bytes(K: int, arch: int, needs_grad: bool) -> int:
    """What a block of the most demanding kernel takes at least."""
    launchers = LAUNCHERS if needs_grad else (forward,)
    return max(min(v.shared_bytes for v in launcher.variants(arch) if v.K == K) for launcher in launchers)


def _recomputes(x: Inputs) -> bool:
    """Whether the backward runs the forward again instead of reading what that kept."""
    if x.recompute != "auto":
        return x.recompute == "yes"
    return forward.Saved.nbytes(x) > MOST_SAVED * launch.memory_bytes(x.q.device.index)


class CudaBackend(Backend):
    """Our kernels on the GPUs of some compute capabilities."""

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
        if problem.K != problem.V or problem.K not in forward.WIDTHS:
            reasons.append(f"K is {problem.K} and V is {problem.V}, needs both 128 or both 64")
        elif problem.arch in self.archs and not problem.step:
            needed = _shared_bytes(problem.K, problem.arch, problem.needs_grad)
            there = SHARED_BYTES.get(problem.arch, MOST_SHARED_BYTES)
            if needed > there:
                reasons.append(
                    f"K is {problem.K}, needs {needed} bytes of shared memory, a block of sm_{problem.arch} has {there}"
                )
        return reasons or launch.problems()

    def variants(self, arch: str) -> Iterable[tuple[str, Mapping[str, str | int]]]:
        mine = [a for a in self.archs if launch.build.ARCHS[a] == arch]
        if not mine:
            return
        yield from ((decode.SOURCE, v.defines) for v in decode.variants(forward.WIDTHS, DTYPES))
        most = max(SHARED_BYTES.get(a, MOST_SHARED_BYTES) for a in mine)
        for launcher in LAUNCHERS:
            yield from ((launcher.SOURCE, v.defines) for v in launcher.variants(mine[0]) if v.shared_bytes <= most)

    def saved_like(self, x: Inputs) -> list[Tensor]:
        return [] if _recomputes(x) else list(forward.Saved.like(x))

    def chunk(self, x: Inputs, save: bool) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor]]:
        o, final, checkpoints, saved = forward.chunk(x, save and not _recomputes(x))
        return o, final, checkpoints, list(saved or ())

    def chunk_grad(
        self, x: Inputs, saved: list[Tensor], d_o: Tensor, d_final: Tensor | None, d_checkpoints: Tensor | None
    ) -> Gradients:
        x, d_o = forward.aligned_inputs(x), forward.aligned(d_o)
        kept = forward.Saved(*saved) if saved else forward.recompute(x)
        d_v, d_states, d_initial = reverse_scan.reverse(x, kept, d_o, d_final, d_checkpoints)
        tokens = gradients.gradients(x, gradients.Saved(kept.states, kept.errors, d_states, d_v, d_o))
        return Gradients(tokens.q, tokens.k, d_v, *tokens[2:], d_initial)

    def step(self, x: StepInputs) -> Tensor:
        return decode.step(x)
