"""Launching compiled kernels: what reaches the driver, and, on a GPU, what the kernel sees."""

from __future__ import annotations

import ctypes
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kda_layers.kernels import torch_private
from kda_layers.kernels.cuda import gpu
from kda_layers.kernels.cuda.arch import arch_for
from kda_layers.kernels.cuda.machine import Dim

driver = pytest.importorskip("cuda.bindings.driver", reason="launching needs cuda-bindings")

SOURCE = str(Path(__file__).with_name("scale.cu"))
PARAMS = struct.Struct("@PPqif")  # of scale.cu
SHARED, BLOCKS, THREADS, N = 100 * 1024, 8, 256, 200
CLUSTERS = [1, 4]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_LAYERS_CACHE", str(tmp_path))


# ---------------------------------------------------------------- without a GPU


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> tuple[gpu.Kernel, list[Any]]:
    """A kernel without a GPU, and what its launches hand to the driver, read as the driver reads it."""
    kernel, found = gpu.Kernel("scale", 7, PARAMS.size, 0), []
    monkeypatch.setattr(gpu, "_thread", SimpleNamespace(has_context=True))
    monkeypatch.setattr(torch_private, "current_device", lambda: 0)
    monkeypatch.setattr(torch_private, "current_stream", lambda device: 0x1234)

    def cuLaunchKernelEx(config: Any, function: int, pointers: int, extra: int) -> tuple[Any]:
        (address,) = struct.unpack("@P", ctypes.string_at(pointers, 8))
        numbers = struct.unpack("@7I4xPPI4x", ctypes.string_at(config.getPtr(), 56))
        attributes = ctypes.string_at(numbers[8], 72 * numbers[9]) if numbers[9] else b""  # 64 bytes each, and a name
        attributes = list(struct.iter_unpack("@I4x3I52x", attributes))
        found.append((numbers[:8], attributes, function, ctypes.string_at(address, PARAMS.size), extra))
        return (driver.CUresult.CUDA_SUCCESS if numbers[6] <= SHARED else driver.CUresult.CUDA_ERROR_INVALID_VALUE,)

    fake = SimpleNamespace(CUlaunchConfig=driver.CUlaunchConfig, cuLaunchKernelEx=cuLaunchKernelEx)
    monkeypatch.setattr(kernel, "_driver", fake)
    return kernel, found


@pytest.mark.parametrize("grid", [8, (8, 2, 3)])
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("overlap", "cooperative"), [(False, False), (True, False), (False, True)])
def test_what_the_driver_gets(
    sent: tuple[gpu.Kernel, list[Any]], overlap: bool, cooperative: bool, cluster: int, grid: int | Dim
) -> None:
    kernel, found = sent
    params, names = PARAMS.pack(1, 2, 3, 4, 5.0), driver.CUlaunchAttributeID
    kernel.launch(grid, 64, cluster, SHARED, params, overlap, cooperative)
    ((numbers, attributes, *rest),) = found
    assert numbers == (*((8, 1, 1) if grid == 8 else (8, 2, 3)), 64, 1, 1, SHARED, 0x1234)
    want = {int(names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION): (cluster, 1, 1)} if cluster > 1 else {}
    if overlap:
        want[int(names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)] = (1, 0, 0)
    if cooperative:
        want[int(names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)] = (1, 0, 0)
    assert {name: tuple(values) for name, *values in attributes} == want
    assert rest == [7, params, 0]


def test_a_wrong_struct_is_refused(sent: tuple[gpu.Kernel, list[Any]]) -> None:
    kernel, found = sent
    with pytest.raises(ValueError, match="params of scale must have 32 bytes, got 31"):
        kernel.launch(1, 32, 1, 0, bytes(31))
    assert found == []


def test_what_the_driver_refuses_is_named(sent: tuple[gpu.Kernel, list[Any]]) -> None:
    kernel, _ = sent
    message = (
        r"launching scale failed: CUDA_ERROR_INVALID_VALUE with grid 8, 64 threads, cluster 4, "
        r"102401 bytes of dynamic shared memory"
    )
    with pytest.raises(RuntimeError, match=message):
        kernel.launch(8, 64, 4, SHARED + 1, bytes(32))


def test_an_unknown_gpu_is_named() -> None:
    known = "8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 12.0"
    with pytest.raises(ValueError, match=f"compute capability must be one of {known}, got 7.5"):
        arch_for(75)


# ---------------------------------------------------------------- on a GPU


def clusters() -> list[int]:
    return CLUSTERS if torch.cuda.get_device_capability()[0] >= 9 else CLUSTERS[:1]


def load(device: torch.device, **defines: int) -> gpu.Kernel:
    return gpu.GPU().load(SOURCE, "scale", {"SHARED": SHARED, **defines}, device)


class Run:
    """One launch of scale.cu on a device, its result and what that should be."""

    def __init__(self, device: torch.device, cluster: int, factor: float = 2.5) -> None:
        self.cluster, self.x = cluster, torch.randn(THREADS, device=device)
        self.y = torch.full((BLOCKS, N), float("nan"), device=device)
        self.params = PARAMS.pack(self.x.data_ptr(), self.y.data_ptr(), N, N, factor)
        self.factor = factor

    def __call__(self, kernel: gpu.Kernel) -> None:
        kernel.launch(BLOCKS, THREADS, self.cluster, SHARED, self.params)

    def check(self) -> None:
        rank = torch.arange(BLOCKS, device=self.x.device) % self.cluster
        torch.testing.assert_close(self.y, self.factor * self.x[:N] + rank[:, None], rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_launch() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = load(device)
    assert load(device) is kernel
    for cluster in clusters():
        run = Run(device, cluster)
        run(kernel)
        run.check()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run = Run(device, cluster)
            run(kernel)
            run.check()


@pytest.mark.gpu
@pytest.mark.parametrize("loaded_before", [True, False])
def test_capture(loaded_before: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    variant = {"VARIANT": int(loaded_before)}  # its own module, which the test loads first
    if loaded_before:
        load(device, **variant)
    run, graph = Run(device, clusters()[-1]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(load(device, **variant))
    assert run.y.isnan().all(), "capturing does not run"
    for _ in range(3):
        run.x.normal_()
        graph.replay()
        run.check()


@pytest.mark.gpu
def test_threads() -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def work(index: int) -> gpu.Kernel:
        with torch.cuda.stream(torch.cuda.Stream()):
            kernel = load(device, VARIANT=2)
            runs = [Run(device, cluster, float(index)) for cluster in clusters() * 20]
            for run in runs:
                run(kernel)
            for run in runs:
                run.check()
        return kernel

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(work, range(8)))) == 1


@pytest.mark.gpu
def test_a_thread_that_has_never_called_cuda() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kernel, run = load(device), Run(device, clusters()[-1])
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run, kernel).result()
    run.check()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices() -> None:
    for index in (1, 0, 1):
        device = torch.device("cuda", index)
        with torch.cuda.device(device):
            run = Run(device, clusters()[-1])
            run(load(device))
            run.check()


@pytest.mark.gpu
def test_refusals_leave_the_gpu_usable(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kernel, run = load(device), Run(device, 1)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE with grid"):
        kernel.launch(1, 32, 1, 1 << 20, run.params)
    with pytest.raises(RuntimeError, match=r"cuModuleGetFunction\(nothing\) failed: CUDA_ERROR_NOT_FOUND"):
        gpu.GPU().load(SOURCE, "nothing", {"SHARED": SHARED}, device)
    (tmp_path / "two.cu").write_text('extern "C" __global__ void two(float* x, float* y) { *x = *y; }')
    with pytest.raises(ValueError, match=r"kernel two of .* must take exactly one parameter, a struct"):
        gpu.GPU().load(str(tmp_path / "two.cu"), "two", {}, device)
    run(kernel)
    run.check()
