"""The package's kernels in the emulator, against the recurrence in fp64.

The one module of this folder that knows the kernels and the tests' cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from kda_layers.kernels.kda.contract import BetaActivation, GateActivation, Inputs
from kda_layers.kernels.kda.cuda.backward import gradients as gradients_launcher
from tests.kernels import emulated
from tests.kernels.cases import (
    BF16,
    FP16,
    Case,
    error,
    limits_of,
    make_inputs,
    oracle,
    output_gradients,
    outputs,
    run,
    step_inputs,
    to_fp64,
)
from tests.kernels.test_cuda_gradients import gradients

__all__ = ["Case", "Judged", "Trial"]

GATES, BETAS = get_args(GateActivation), get_args(BetaActivation)
DTYPES = {"bf16": BF16, "fp16": FP16}
ARCHS = (80, 90, 100, 120)
DRAWS = {"forward": 1, "backward": 4, "decode": 1}  # a few heads' gradient of A_log is one small sum for each

Results = dict[str, Tensor]


class Judged(NamedTuple):
    """The relative L2 error of a tensor, and the largest that passes."""

    error: float
    budget: float

    @property
    def passes(self) -> bool:
        return self.error <= self.budget


class Trial:
    """One case of forward, backward or decode, to be run with several seeds; see `tests.kernels.cases` for budgets."""

    def __init__(self, kernel: str, case: Case, draws: int | None = None) -> None:
        """
        Args:
            kernel: "forward", "backward" (the saving forward, the reverse scan and the gradients) or "decode".
            case: what to run.
            draws: how often the inputs are drawn; the errors are those over all draws. By default as often as the
                budget of the smallest tensor needs.
        """
        self.compute = {"forward": _forward, "backward": _backward, "decode": _decode}[kernel]
        self.draws = [make_inputs(case, draw=i) for i in range(draws or DRAWS[kernel])]
        define = {"forward": _forward_truth, "backward": _backward_truth, "decode": _decode_truth}[kernel]
        self.truth = _stack(define(x, to_fp64) for x in self.draws)
        yardstick = _stack(define(x, lambda x: x) for x in self.draws)
        self.budgets = limits_of(yardstick, self.truth, case.dtype)

    def run(self, seed: int, arch: int = 90, processors: int = 16) -> dict[str, Judged]:
        """The error of every result with the schedule of a seed.

        Raises:
            EmulatorError: if the emulator refuses what a kernel does.
        """
        got = _stack(self.compute(x, seed, arch, processors) for x in self.draws)
        return {n: Judged(error(got[n], t), self.budgets[n]) for n, t in self.truth.items()}


def _stack(results: object) -> Results:
    every: list[Results] = list(results)  # type: ignore[call-overload]
    return {n: torch.stack([r[n] for r in every]) for n in every[0]}


Cast = Callable[[Inputs], Inputs]


def _forward(x: Inputs, seed: int, arch: int, processors: int) -> Results:
    return outputs(emulated.chunk(x, seed=seed, arch=arch, processors=processors))


def _forward_truth(x: Inputs, cast: Cast) -> Results:
    with torch.no_grad():
        return outputs(oracle(cast(x)))


def _backward(x: Inputs, seed: int, arch: int, processors: int) -> Results:
    d = output_gradients(x)
    d_final = d["final_state"] if x.final_state else None
    d_checkpoints = d["checkpoints"] if x.checkpoint_every else None
    out, kept = emulated.chunk_saving(x, seed=seed, arch=arch, processors=processors)
    back = emulated.reverse(x, kept, (d["o"], d_final, d_checkpoints), seed=seed, arch=arch, processors=processors)
    saved = gradients_launcher.Saved(kept.states, kept.errors, back.d_states, back.d_v, d["o"])
    results = outputs(out) | gradients(x, saved, seed=seed, arch=arch, processors=processors) | {"d_v": back.d_v}
    return results if back.d_initial is None else results | {"d_initial_state": back.d_initial}


def _backward_truth(x: Inputs, cast: Cast) -> Results:
    return run(oracle, cast(x), output_gradients(x))


def _decode(x: Inputs, seed: int, arch: int, processors: int) -> Results:
    state = emulated.end_of_memory(x.initial_state.clone())
    o = emulated.step(step_inputs(x, state=state), seed=seed)
    return {"o": o, "state": state}


def _decode_truth(x: Inputs, cast: Cast) -> Results:
    with torch.no_grad():
        out = oracle(cast(x._replace(final_state=True, checkpoint_every=0)))
    return {"o": out.o, "state": out.final_state}
