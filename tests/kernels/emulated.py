"""Our CUDA kernels on the CPU, launched by the code that launches them on a GPU.

In the GPU's place stand a number of multiprocessors, a kernel that the emulator runs, and memory in which a tensor
ends where memory ends and holds NaN until it is written.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kda_layers import KDAOutput
from kda_layers.kernels.cuda.launch import Dim
from kda_layers.kernels.kda.contract import AnyInputs, Inputs, StepInputs
from kda_layers.kernels.kda.cuda.backward import reverse_scan as reverse_launcher
from kda_layers.kernels.kda.cuda.decode import decode as step_launcher
from kda_layers.kernels.kda.cuda.forward import forward as chunk_launcher
from tests import cuda_emulator

aten = torch.ops.aten
UNWRITTEN = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


class GuardedMemory(TorchDispatchMode):
    """New tensors end where memory ends, and hold NaN (integers: -1) where nothing else was asked for."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if function in UNWRITTEN:
            result.untyped_storage().fill_(0xFF)
        return end_of_memory(result) if function in UNWRITTEN + ZEROS else result


def end_of_memory(t: Any) -> Any:
    """A copy of a tensor that ends where memory ends; a view of a part of another, or what has no element, as it is."""
    whole = isinstance(t, Tensor) and t.is_contiguous() and t.nbytes == t.untyped_storage().nbytes() > 0
    return cuda_emulator.guarded(t) if whole else t


@dataclass(frozen=True)
class Kernel:
    """Has `launch.Kernel`'s method. All blocks are there at once, as they are on a GPU."""

    emulated: cuda_emulator.Kernel
    seed: int

    @classmethod
    def of(cls, source: str, entry: str, defines: Mapping[str, object], seed: int) -> Kernel:
        return cls(cuda_emulator.compile_kernel(source, entry, defines), seed)

    def launch(self, grid: Dim, block: Dim, cluster: Dim, shared_bytes: int, stream: int, params: bytes) -> None:
        assert block[1:] == cluster[1:] == (1, 1)
        assert math.prod(grid) % cluster[0] == 0
        self.emulated(
            grid=grid, block=block[0], cluster=cluster[0], resident=math.prod(grid) // cluster[0],
            shared_bytes=shared_bytes, params=params, seed=self.seed,
        )  # fmt: skip


def run_emulated(
    kernel: Kernel, device: int, grid: int, threads: int, cluster: int, shared_bytes: int, params: bytes
) -> None:
    """In the place of `launch.run`."""
    kernel.launch((grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), shared_bytes, 0, params)


@contextlib.contextmanager
def _gpu(
    launcher: Any, entry: str, *, arch: int = 90, processors: int = 16, seed: int = 0, **plan: Any
) -> Iterator[None]:
    choose = launcher.variant_for
    stand_ins: dict[str, Any] = {
        "variant_for": lambda *args: choose(*args)._replace(**plan),
        "processors_and_arch": lambda index: (processors, arch),
        "_kernel": lambda variant, device: Kernel.of(launcher.SOURCE, entry, variant.defines, seed),
        "run": run_emulated,
    }
    if launcher is chunk_launcher:
        stand_ins["_plan"] = launcher._plan.__wrapped__  # nothing is remembered
    with mock.patch.multiple(launcher, **stand_ins), GuardedMemory():
        yield


def chunk(x: Inputs, **launch: Any) -> KDAOutput:
    """What chunk.cu makes of the inputs.

    Args:
        x: the inputs.
        launch: arch, compute capability times ten, which decides between the forms of the kernel; processors of the
            GPU, which decide how many blocks there are; seed, which chooses the order in which what is concurrent
            happens; and fields of `chunk.Variant` that replace those of the variant that the launcher chooses.
    """
    with _gpu(chunk_launcher, "kda_forward", **launch):
        return KDAOutput(*chunk_launcher.chunk(_guarded(x))[:3])


def chunk_saving(x: Inputs, **launch: Any) -> tuple[KDAOutput, chunk_launcher.Saved]:
    """The same, and what it keeps for the backward."""
    with _gpu(chunk_launcher, "kda_forward", **launch):
        *out, saved = chunk_launcher.chunk(_guarded(x), save=True)
    assert saved
    return KDAOutput(*out), saved


def reverse(
    x: Inputs, saved: chunk_launcher.Saved, gradients: tuple[Tensor, Tensor | None, Tensor | None], **launch: Any
) -> reverse_launcher.Reversed:
    """What reverse.cu makes of the gradients of o, final state and checkpoints; `launch` is as in `chunk`."""
    d_o, d_final, d_checkpoints = map(end_of_memory, gradients)
    with _gpu(reverse_launcher, "kda_reverse_scan", **launch):
        return reverse_launcher.reverse(_guarded(x), saved, d_o, d_final, d_checkpoints)


def step(x: StepInputs, *, seed: int = 0, busy: bool = False, **shape: int) -> Tensor:
    """What step.cu makes of the inputs; `x.state` is updated in place.

    Args:
        x: the inputs.
        seed: chooses the order in which what is concurrent happens.
        busy: see `step.variant_for`.
        shape: fields of `step.Shape` that replace those of that variant.
    """
    chosen = step_launcher.variant_for(x.q.shape[3], x.v.shape[3], x.q.dtype, x.state.dtype, busy)
    variant = replace(chosen, shape=chosen.shape._replace(**shape))

    def run(plan: step_launcher.Plan, params: bytes) -> None:
        kernel = Kernel.of(step_launcher.SOURCE, "kda_decode", plan.variant.defines, seed)
        kernel.launch(plan.grid, (plan.variant.threads, 1, 1), (1, 1, 1), plan.shared_bytes, 0, params)

    with mock.patch.object(step_launcher, "run", run), GuardedMemory():
        o = torch.empty_like(x.v, memory_format=torch.contiguous_format)
        step_launcher.launch(_guarded(x)._replace(state=x.state), o, variant)
        return o


def _guarded(x: AnyInputs) -> AnyInputs:
    return type(x)(*(end_of_memory(t) for t in x))
