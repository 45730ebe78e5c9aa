"""Load Triton and NVRTC while a model is built, so that its first call does not wait for them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from .cuda import build

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
    _thread = threading.Thread(target=lambda: [load() for load in work], name="kda_layers.load_early", daemon=True)
    os.register_at_fork(before=wait)
    _thread.start()


def wait() -> None:
    """Wait for what `load_early` has begun, which Triton would otherwise do a second time, beside the first."""
    if _thread is not None:
        _thread.join()
