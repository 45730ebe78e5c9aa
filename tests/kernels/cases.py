"""Helpers of the kernel tests beside `kda_layers.testing`: the backends and devices of this machine, and skips."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from kda_layers.kernels.kda.backends.cuda import CudaBackend
from kda_layers.kernels.kda.contract import KDA, Backend, Inputs, Problem, problem_of
from kda_layers.kernels.registry import Registry
from kda_layers.testing.budgets import (
    BF16,
    FP16,
    FP32,
    FP64,
    FP64_LIMIT,
    ROUNDOFF,
    budget,
    check,
    error,
    limits_of,
)
from kda_layers.testing.cases import (
    Case,
    make_inputs,
    map_tensors,
    sequences,
    step_inputs,
    to_device,
    to_fp64,
)
from kda_layers.testing.oracle import (
    call,
    check_near,
    options,
    oracle,
    output_gradients,
    outputs,
    run,
    run_draws,
    run_oracle,
)
from kda_layers.testing.poison import poisoned_memory
from tests.kernels.emulated_backends import EMULATED

__all__ = [
    "BEST_DEVICE", "BF16", "DEVICES", "FP16", "FP32", "FP64", "FP64_LIMIT", "ROUNDOFF", "Case", "any_length", "budget",
    "call", "check", "check_near", "draws", "emulated", "error", "for_device", "for_training", "ids", "limits_of",
    "make_inputs", "map_tensors", "on_every_backend", "on_every_device", "on_installed_backends", "on_typical_shapes",
    "options", "oracle", "output_gradients", "outputs",
    "poisoned_memory", "run", "run_draws", "run_oracle", "sequences", "serve", "step_inputs", "to_device", "to_fp64",
    "trains_only_without_checkpoints",
]  # fmt: skip

BEST_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEVICES = [BEST_DEVICE]  # the results of a CPU do not depend on whether the machine has a GPU: tests there take the GPU


@contextmanager
def any_length(*registries: Registry) -> Iterator[None]:
    """The Triton backends of operators around the core serve a few tokens as well, so that cases can be small."""
    with ExitStack() as stack:
        for registry in registries:
            triton = registry.backends()["triton"]
            stack.enter_context(mock.patch.object(triton, "features", triton.features | {"few_tokens"}))
            registry.clear_caches()
            stack.callback(registry.clear_caches)
        yield


def installed_backends() -> list[str]:
    """Every backend, but of those over our CUDA kernels only the one for this machine's GPU, sm90 where there is none:
    the others would refuse every case for the same reason."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    arch = 10 * major + minor
    capabilities = {n: {a.capability for a in b.archs} for n, b in KDA.backends().items() if isinstance(b, CudaBackend)}
    return [n for n in KDA.backends() if n not in capabilities or arch in capabilities[n]]


def emulated(*values: Any) -> Any:
    """Parameters of a case that runs a kernel in the emulator."""
    return pytest.param(*values, marks=pytest.mark.emulated)


def of_this_device() -> list[Any]:
    """The installed backends that serve anything on the best device; Triton takes 20 s to compile fla's kernels."""
    devices = {n: KDA.backends()[n].serves.get("device") for n in installed_backends()}
    names = [n for n, allowed in devices.items() if allowed is None or not allowed.refuses(BEST_DEVICE)]
    marks = {"eager": pytest.mark.fallback, "fla": pytest.mark.compiles}
    return [pytest.param(n, marks=marks[n]) if n in marks else n for n in names]


on_installed_backends = pytest.mark.parametrize("backend", of_this_device())
on_every_backend = pytest.mark.parametrize("backend", [*of_this_device(), *map(emulated, EMULATED)])
on_every_device = pytest.mark.parametrize("device", DEVICES)
# for tests of one feature: what shows the smallest mistake, and what every fast backend serves
on_typical_shapes = pytest.mark.parametrize(
    "shape", [{"K": 16, "V": 32, "dtype": FP64}, {"K": 128, "V": 128, "dtype": BF16}], ids=["fp64", "bf16"]
)


def ids(cases: list[Case]) -> dict:
    """Keyword arguments of `parametrize` that name the cases by what they are."""
    return {"argvalues": cases, "ids": str}


def trains_only_without_checkpoints(x: Inputs, backend: str) -> bool:
    """Return True if the backend has gradients for `x` without boundary states, but not with them."""
    problems = [problem_of(y, needs_grad=True) for y in (x, x._replace(checkpoint_every=0))]
    with_reasons, reasons = (KDA.backends()[backend].unsupported(p) for p in problems)
    return bool(with_reasons) and not reasons


def for_training(case: Case, backend: str, device: str) -> Case:
    """`case`, without the states at boundaries if only with them the backend has no gradients."""
    drop = case.checkpoints and trains_only_without_checkpoints(make_inputs(case, device), backend)
    return replace(case, checkpoints=False) if drop else case


def for_device(case: Case, device: str, backend: str) -> Case:
    """`case`, on a CPU with 64 channels for 128: in a third of the time, and no kernel is made for one width. Emulated
    kernels are: they keep the width, except those for A100, whose shared memory is too small for it."""
    narrower = device == "cpu" and case.K == case.V == 128 and backend not in ("sm90@emulator", "sm100@emulator")
    return replace(case, K=64, V=64) if narrower else case


def draws(case: Case, backend: str, device: str, needs_grad: bool = True) -> list[Inputs]:
    """The inputs of a case, drawn as often as it says; once for the emulator, which is slow, where no tensor of a few
    elements, as A_log's gradient is, needs more."""
    number = 1 if backend in EMULATED and not needs_grad else case.draws
    return [make_inputs(case, device, n) for n in range(number)]


def serve(backend: str, problem: Problem, required: frozenset[str]) -> Backend:
    """The backend, or a skip with its reasons for refusing; a failure instead if it is required and the problem is
    what fast backends exist for (bf16, K = V = 128, on the best device of this machine; boundary states, which serve
    prefix caches, without gradients)."""
    chosen = KDA.backends()[backend]
    reasons = chosen.unsupported(problem)
    if reasons:
        text = f"{backend} cannot serve [{problem}]: " + "; ".join(reasons)
        typical = problem.dtype == BF16 and problem.K == problem.V == 128 and problem.device == BEST_DEVICE
        typical = typical and not (problem.needs_grad and problem.checkpoints)
        if backend in required and typical:
            pytest.fail("KDA_LAYERS_REQUIRE: " + text)
        pytest.skip(text)
    return chosen
