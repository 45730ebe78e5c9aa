"""Compilers are loaded while a model is built, and launches that repeat do not ask Triton again."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch
from torch import Tensor

from kda_layers.kernels import compilers
from kda_layers.kernels.cuda import build
from kda_layers.kernels.registry import registries
from kda_layers.kernels.triton_package import RepeatedLaunch

GLUON = "triton.experimental.gluon.nvidia.hopper"  # imported by the first kernel that is specialised


def loaded() -> None:
    compilers.load_early()
    compilers.wait()


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
def test_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import cache

    cache.triton_key.cache_clear()
    build.problems.cache_clear()
    monkeypatch.setattr(compilers, "_thread", None)
    for registry in registries():
        monkeypatch.setattr(registry, "_found", None)
    imported: list[str] = []
    load = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda *name: (imported.append(name[0]), load(*name))[1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    loaded()
    assert not any(registry._found for registry in registries())
    assert not cache.triton_key.cache_info().currsize
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    loaded()
    assert all(registry._found for registry in registries())
    assert GLUON in imported
    assert cache.triton_key.cache_info().currsize == 1
    assert build.problems.cache_info().currsize == (importlib.util.find_spec("cuda") is not None)
    cache.triton_key.cache_clear()
    loaded()
    assert not cache.triton_key.cache_info().currsize


def test_the_thread_is_not_starved() -> None:
    """It gets the GIL often while it runs, and the interval is as before afterwards, unless somebody has set it."""
    seen: list[float] = []
    before = sys.getswitchinterval()
    compilers._load([lambda: seen.append(sys.getswitchinterval())])
    assert seen == [pytest.approx(compilers.SWITCH_INTERVAL)]
    assert sys.getswitchinterval() == pytest.approx(before)
    try:
        compilers._load([lambda: sys.setswitchinterval(0.02)])
        assert sys.getswitchinterval() == pytest.approx(0.02)
    finally:
        sys.setswitchinterval(before)


def test_the_first_kernel_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or Triton would hash its library beside the thread that does."""
    waited: list[bool] = []
    monkeypatch.setattr(compilers, "wait", lambda: waited.append(True))
    importlib.reload(importlib.import_module("kda_layers.kernels.fused.triton"))
    assert waited


class Kernel:
    """A kernel of Triton, which notes how it is launched."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        assert grid == (3, 1, 1)

        def launch(*args: object, num_warps: int) -> Kernel:
            self.log.append(f"asks, {len(args)}, {num_warps}")
            return Compiled(self.log)

        return launch


class Compiled(Kernel):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        assert grid == (3, 1, 1)
        return lambda *args: self.log.append(f"repeats, {len(args)}")


def test_repeated_launches() -> None:
    """Only addresses that are multiples of 16 are launched without asking, as those were that the kernel is for."""
    kernel, t = Kernel(), torch.zeros(64)
    launch = RepeatedLaunch(kernel, 3, (5, True), {"num_warps": 4})

    def log_of(*tensors: Tensor | None) -> list[str]:
        kernel.log.clear()
        launch(*tensors)
        return kernel.log.copy()

    asks, repeats = ["asks, 4, 4"], ["repeats, 4"]
    assert t.data_ptr() % 16 == 0
    assert log_of(t[1:], None) == log_of(t[1:], None) == asks
    assert log_of(t, None) == asks
    assert log_of(t, None) == log_of(t[4:], t) == repeats
    assert log_of(t, t[1:]) == asks
    assert log_of(t, t) == repeats
