"""Load Triton and NVRTC while a model is built, so that its first call does not wait for them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from .cuda import build

SWITCH_INTERVAL = 1e-4  # seconds that another thread may keep the GIL, while the thread loads
_thread: threading.Thread | None = None


def load_early() -> None:
    """Start loading Triton and NVRTC in the background, once per process that sees a GPU.

    Before its first cache lookup Triton hashes its own library (0.35 s), and NVRTC takes 0.06 s to load; both release
    the GIL. Modules are imported in the calling thread: two threads that import modules which depend on each other can
    see them half initialised. No CUDA context is made, and a fork waits for the thread.
    """
    global _thread
    if _thread is not None or not torch.cuda.device_count():
        return
    work: list[Callable[[], Any]] = []
    with contextlib.suppress(ImportError):  # which the backends explain where a kernel is needed
        from triton.runtime import cache

        work.append(cache.triton_key)
    with contextlib.suppress(ImportError):
        from cuda.bindings import driver, nvrtc  # noqa: F401

        work.append(build.problems)
    _thread = threading.Thread(target=_load, args=(work,), name="kda_layers.load_early", daemon=True)
    os.register_at_fork(before=wait)
    _thread.start()


def _load(work: list[Callable[[], Any]]) -> None:
    # Triton hashes by the MiB and takes the GIL after each: beside a busy thread, at Python's 5 ms, that is 15 times as
    # long as alone.
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        for load in work:
            load()
    finally:
        if abs(sys.getswitchinterval() - SWITCH_INTERVAL) < 1e-6:  # nobody else has set it
            sys.setswitchinterval(before)


def wait() -> None:
    """Wait for what `load_early` has begun, which Triton would otherwise do a second time, beside the first."""
    if _thread is not None:
        _thread.join()
