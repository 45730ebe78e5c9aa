"""Sums over chunks of the gradients of A_log and dt_bias, in the emulator and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kda_layers.kernels.cuda import build
from kda_layers.kernels.cuda.arch import TARGETS
from kda_layers.kernels.cuda.gpu import GPU
from kda_layers.kernels.kda.contract import CHUNK
from kda_layers.kernels.kda.cuda.backward.gradients import SUMS_SOURCE, chunk_sums
from tests.kernels.emulated import Emulator, GuardedMemory, end_of_memory

LENGTHS = (1, 0, 64, 65, 640, 63)  # 15 chunks


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.emulated), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def parts_of(rows: int, *shape: int, device: str) -> Tensor:
    return end_of_memory(torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows))).to(device)


def sums_of(device: str, *args: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if device == "cuda":
        return chunk_sums(GPU(), *args)
    with GuardedMemory():
        return chunk_sums(Emulator(), *args)


def assert_summed(got: Tensor | None, parts: Tensor) -> None:
    """Within the rounding of as many additions as rows in fp32."""
    assert got is not None
    exact, bound = parts.double().sum(0), parts.double().abs().sum(0) * parts.shape[0] * 2.0**-24
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(("rows", "HV", "K"), [(1, 1, 64), (15, 3, 128), (16, 33, 64), (300, 2, 128), (0, 2, 64)])
def test_sums(rows: int, HV: int, K: int, device: str) -> None:
    A_log, dt_bias = parts_of(rows, HV, device=device), parts_of(rows, HV, K, device=device)
    rates, biases = sums_of(device, A_log, dt_bias, None)
    assert_summed(rates, A_log)
    assert_summed(biases, dt_bias)
    assert torch.equal(sums_of(device, A_log, None, None)[0], rates)
    assert torch.equal(sums_of(device, None, dt_bias, None)[1], biases)
    assert sums_of(device, None, None, None) == (None, None)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_that_are_no_chunk_are_not_read(dtype: torch.dtype, device: str) -> None:
    chunks = sum(-(-n // CHUNK) for n in LENGTHS)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, dtype)
    A_log, dt_bias = parts_of(chunks + 3, 5, device=device), parts_of(chunks + 3, 5, 64, device=device)
    A_log[chunks:], dt_bias[chunks:] = torch.nan, torch.nan
    rates, biases = sums_of(device, A_log, dt_bias, offsets)
    assert_summed(rates, A_log[:chunks])
    assert_summed(biases, dt_bias[:chunks])


@pytest.mark.compiles
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")
    assert build.resources(build.compile(SUMS_SOURCE, {}, arch))["kda_chunk_sums"][2:] == (0, 0, 0)
