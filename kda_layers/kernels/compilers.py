"""Load Triton and NVRTC while a model is built, so that its first call does not wait for them."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from .cuda import build
from .registry import registries

SWITCH_INTERVAL = 1e-4  # seconds between thread switches while compilers are loaded
_thread: threading.Thread | None = None


def load_early() -> None:
    """Import what the first calls need and start loading Triton and NVRTC, once per process that sees a GPU.

    Before its first cache lookup Triton hashes its own library (0.35 s), and NVRTC takes 0.06 s to load: a thread does
    both, which release the GIL. Modules are imported in the calling thread, because two threads that import modules
    which depend on each other can see them half initialised: the operators' backends (0.1 to 0.2 s) and what Triton
    imports before its first kernel (0.1 s). No CUDA context is made, and a fork waits for the thread.
    """
    global _thread
    if _thread is not None or not torch.cuda.device_count():
        return
    for registry in registries():
        registry.backends()
    work: list[Callable[[], Any]] = []
    with contextlib.suppress(ImportError):  # which the backends explain where a kernel is needed
        from triton.runtime import cache

        work.append(cache.triton_key)
        importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    with contextlib.suppress(ImportError):
        from cuda.bindings import driver, nvrtc  # noqa: F401

        work.append(build.problems)
    _thread = threading.Thread(target=_load, args=(work,), name="kda_layers.load_early", daemon=True)
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=wait)
    _thread.start()


def _load(work: list[Callable[[], Any]]) -> None:
    # Triton's hash takes the GIL twice per MiB: beside a thread that runs Python, 15 times as long as alone with the
    # default interval of 5 ms, twice as long with this one.
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        for load in work:
            load()
    finally:
        if abs(sys.getswitchinterval() - SWITCH_INTERVAL) < 1e-6:  # nobody else has set it
            sys.setswitchinterval(before)


def wait() -> None:
    """Wait for the thread that `load_early` started; without it, Triton hashes its library a second time."""
    if _thread is not None:
        _thread.join()
