"""Our CUDA kernels on the CPU: the launchers that serve a GPU, with the emulator as their machine.

The emulator's memory ends where a tensor ends and holds NaN until it is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kda_layers import KDAOutput
from kda_layers.kernels.cuda.machine import Dim, Properties
from kda_layers.kernels.kda.contract import AnyInputs, DecodeInputs, Gradients, Inputs
from kda_layers.kernels.kda.cuda import forms
from kda_layers.kernels.kda.cuda.backward import gradients as gradients_launcher
from kda_layers.kernels.kda.cuda.backward import reverse_scan as reverse_launcher
from kda_layers.kernels.kda.cuda.decode import decode as decode_launcher
from kda_layers.kernels.kda.cuda.forward import one_role as forward_launcher
from kda_layers.kernels.kda.cuda.forward import two_roles as two_roles_launcher
from kda_layers.kernels.kda.cuda.forward.costs import BV, Split
from kda_layers.kernels.kda.cuda.spec import ALL_IN_CHUNKS, Saved, Signature, aligned_inputs
from tests import cuda_emulator

THREADS = 1024  # that a multiprocessor holds; the operating system limits all together
aten = torch.ops.aten
UNWRITTEN = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


class GuardedMemory(TorchDispatchMode):
    """Allocate tensors that end where memory ends, and hold NaN (integers: -1) unless zeros are asked for."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if function in UNWRITTEN:
            result.untyped_storage().fill_(0xFF)
        return end_of_memory(result) if function in UNWRITTEN + ZEROS else result


def end_of_memory(t: Any) -> Any:
    """A copy of a tensor that ends where memory ends; views of a part of another and empty tensors as they are."""
    whole = isinstance(t, Tensor) and t.is_contiguous() and t.nbytes == t.untyped_storage().nbytes() > 0
    return cuda_emulator.guarded(t) if whole else t


@dataclass(frozen=True)
class Kernel:
    """A `machine.Launchable`. As many blocks are resident at once as multiprocessors hold."""

    emulated: cuda_emulator.Kernel
    seed: int
    processors: int

    def launch(
        self, grid: int | Dim, threads: int, cluster: int, shared_bytes: int, params: bytes, overlap: bool = False,
        cooperative: bool = False,
    ) -> None:  # fmt: skip
        grid = (grid, 1, 1) if isinstance(grid, int) else grid
        blocks = math.prod(grid)
        assert blocks % cluster == 0
        resident = min(blocks, max(self.processors * max(THREADS // threads, 1), cluster)) // cluster
        assert not cooperative or resident * cluster == blocks, "a driver refuses what cannot run at once"
        self.emulated(
            grid=grid, block=threads, cluster=cluster, resident=resident,
            shared_bytes=shared_bytes, params=params, seed=self.seed,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)  # plans are remembered by machine: each has its own
class Emulator:
    """A `machine.Machine` of `processors` multiprocessors; `seed` chooses the order of concurrent operations."""

    arch: int = 90
    processors: int = 16
    seed: int = 0

    def problems(self) -> list[str]:
        reason = cuda_emulator.unavailable()
        return [reason] if reason else []

    def properties(self, device: torch.device) -> Properties:
        return Properties(self.processors, self.arch, 2**40)

    def load(self, source: str, entry: str, defines: Mapping[str, str | int], device: torch.device) -> Kernel:
        return Kernel(cuda_emulator.compile_kernel(source, entry, defines), self.seed, self.processors)


def machine_and_plan(launch: dict[str, Any]) -> tuple[Emulator, dict[str, Any]]:
    """Split `launch` into a machine and the fields of a variant that replace the launcher's choice."""
    names = ("arch", "processors", "seed")
    machine = Emulator(**{name: launch[name] for name in names if name in launch})
    return machine, {name: value for name, value in launch.items() if name not in names}


def replaced(launcher: Any, fields: dict[str, Any]) -> Any:
    """Context in which the variants that the launcher chooses have these fields."""
    choose = launcher.variant_for
    return mock.patch.object(launcher, "variant_for", lambda *args: choose(*args)._replace(**fields))


def forward(x: Inputs, **launch: Any) -> KDAOutput:
    """Outputs of the forward kernel.

    Args:
        x: the inputs.
        launch: fields of `Emulator`, and fields of `one_role.Variant` that replace those of the variant that the
            launcher chooses.
    """
    return forward_saving(x, save=False, **launch)[0]


def forward_saving(x: Inputs, save: bool = True, **launch: Any) -> tuple[KDAOutput, Saved]:
    """Outputs of the forward kernel, and what it saves for the backward."""
    machine, fields = machine_and_plan(launch)
    with replaced(forward_launcher, fields), GuardedMemory():
        given = aligned_inputs(guarded_inputs(x))
        out, saved = forms.launch(given, machine, Signature.of(given, save), form=forms.ONE_ROLE)
    return out, saved  # type: ignore[return-value]


def two_roles(x: Inputs, split: Split, arch: int = 90, seed: int = 0) -> KDAOutput:
    """Return the outputs of two_roles.cu, with every block resident."""
    return two_roles_saving(x, split, arch, seed, save=False)[0]


def two_roles_saving(
    x: Inputs, split: Split, arch: int = 90, seed: int = 0, save: bool = True, resident: int | None = None
) -> tuple[KDAOutput, Saved]:
    """Return the outputs of two_roles.cu, and what it saves for the backward; with so many, or all, blocks at once."""
    blocks = (split.groups + split.followers) * (x.q.shape[3] // BV) + split.preparers
    machine = Emulator(arch, resident or blocks, seed)
    with mock.patch.object(two_roles_launcher, "split_of", return_value=split), GuardedMemory():
        x = aligned_inputs(guarded_inputs(x))
        plan = two_roles_launcher.plan_of(machine, Signature.of(x, save))
        return forms.run(x, plan, ALL_IN_CHUNKS)  # type: ignore[return-value]


def swizzled(states: Tensor) -> Tensor:
    """States [rows, HV, V, K] in the order in which they are saved, `saved_at` in chunk.cuh, or back."""
    pieces = states.unflatten(-1, (-1, 8))
    column, piece = (torch.arange(n) for n in pieces.shape[-3:-1])
    return pieces[..., column[:, None], piece ^ column[:, None] % 8, :].flatten(-2)


def without_two_roles() -> Any:
    """Context, for all threads, in which no CTAs are specialised."""
    return mock.patch.object(two_roles_launcher, "declined", "is switched off")


def reverse_scan(
    x: Inputs, saved: Saved, gradients: tuple[Tensor, Tensor | None, Tensor | None], **launch: Any
) -> reverse_launcher.Scanned:
    """Outputs of the reverse scan for gradients of o, final state and checkpoints; `launch` as in `forward`."""
    machine, fields = machine_and_plan(launch)
    d_o, d_final, d_checkpoints = map(end_of_memory, gradients)
    with replaced(reverse_launcher, fields), GuardedMemory():
        return reverse_launcher.reverse_scan(guarded_inputs(x), machine, saved, d_o, d_final, d_checkpoints)


def gradients(x: Inputs, saved: Saved, scanned: reverse_launcher.Scanned, d_o: Tensor, **launch: Any) -> Gradients:
    """Outputs of the gradients kernel for what forward and reverse scan saved; `launch` as in `forward`."""
    machine, fields = machine_and_plan(launch)
    with replaced(gradients_launcher, fields), GuardedMemory():
        return gradients_launcher.gradients(guarded_inputs(x), machine, saved, scanned, d_o)


def decode(x: DecodeInputs, *, seed: int = 0, busy: bool = False, **shape: int) -> Tensor:
    """Outputs of the decode kernel; `x.state` is updated in place.

    Args:
        x: the inputs.
        seed: chooses the order of concurrent operations.
        busy: see `decode.variant_for`.
        shape: fields of `decode.Variant` that replace those of that variant.
    """
    chosen = decode_launcher.variant_for(x.q.shape[3], x.v.shape[3], x.q.dtype, x.state.dtype, busy)
    variant = chosen._replace(**shape)
    with GuardedMemory():
        inputs = guarded_inputs(x)._replace(state=x.state, state_scale=x.state_scale)
        return decode_launcher.decode(inputs, Emulator(seed=seed), variant)


def verify(x: DecodeInputs, seed: int = 0) -> Tensor:
    """Outputs of the kernel that verifies drafts; `x.state` and `x.updates` are updated in place."""
    with GuardedMemory():
        inputs = guarded_inputs(x)._replace(state=x.state, updates=x.updates)
        return decode_launcher.decode(inputs, Emulator(seed=seed))


def guarded_inputs(x: AnyInputs) -> AnyInputs:
    """Copies of the inputs in memory that ends where each tensor ends."""
    return type(x)(*(end_of_memory(t) for t in x))
