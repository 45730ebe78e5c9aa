"""The package's kernels in the emulator, against the recurrence in fp64.

The one module of this folder that knows the kernels and the tests' cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kda_layers.kernels.kda.activations import BETA_ACTIVATIONS, GATE_ACTIVATIONS
from kda_layers.kernels.kda.contract import Inputs
from kda_layers.testing.budgets import BF16, FP16, error, limits_of
from kda_layers.testing.cases import Case, make_inputs, step_inputs, to_fp64
from kda_layers.testing.oracle import oracle, output_gradients, outputs, run
from tests.kernels import emulated

__all__ = ["ARCHS", "BETAS", "DTYPES", "GATES", "Case", "Judged", "Trial"]

GATES, BETAS = GATE_ACTIVATIONS, BETA_ACTIVATIONS
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
    """One case of forward, backward or decode, to be run with several seeds; `kda_layers.testing.budgets` judges it."""

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
        got = _stack(self.compute(x, seed=seed, arch=arch, processors=processors) for x in self.draws)
        return {n: Judged(error(got[n], t), self.budgets[n]) for n, t in self.truth.items()}


def _stack(results: Iterable[Results]) -> Results:
    every = list(results)
    return {n: torch.stack([r[n] for r in every]) for n in every[0]}


Cast = Callable[[Inputs], Inputs]


def _forward(x: Inputs, **machine: int) -> Results:
    return outputs(emulated.forward(x, **machine))


def _forward_truth(x: Inputs, cast: Cast) -> Results:
    with torch.no_grad():
        return outputs(oracle(cast(x)))


def _backward(x: Inputs, **machine: int) -> Results:
    d = output_gradients(x)
    d_final = d["final_state"] if x.final_state else None
    d_checkpoints = d["checkpoints"] if x.checkpoint_every else None
    out, saved = emulated.forward_saving(x, **machine)
    scanned = emulated.reverse_scan(x, saved, (d["o"], d_final, d_checkpoints), **machine)
    back = emulated.gradients(x, saved, scanned, d["o"], **machine)._asdict()
    return outputs(out) | {f"d_{n}": t for n, t in back.items() if t is not None}


def _backward_truth(x: Inputs, cast: Cast) -> Results:
    return run(oracle, cast(x), output_gradients(x))


def _decode(x: Inputs, seed: int, **_: int) -> Results:
    state = emulated.end_of_memory(x.initial_state.clone())
    o = emulated.decode(step_inputs(x, state=state), seed=seed)
    return {"o": o, "state": state}


def _decode_truth(x: Inputs, cast: Cast) -> Results:
    with torch.no_grad():
        out = oracle(cast(x._replace(final_state=True, checkpoint_every=0)))
    return {"o": out.o, "state": out.final_state}
