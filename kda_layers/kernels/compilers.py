"""Loading of Triton and NVRTC while a model is built, so that its first call does not wait for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from .cuda import build

_started = False


def load_early() -> None:
    """Begin to load what finds and compiles kernels, once for a process that uses a GPU.

    Before it looks into its cache of kernels Triton hashes its own library, for 0.35 s, and NVRTC loads for 0.06 s. A
    thread does both, without Python's lock for most of the time. Modules are imported here: two threads that import
    modules which need each other can get them unfinished. A process without a CUDA context may still be forked, and is
    left alone.
    """
    global _started
    if _started or not torch.cuda.is_initialized():
        return
    _started = True
    work: list[Callable[[], Any]] = []
    with contextlib.suppress(ImportError):  # which the backends explain where a kernel is needed
        from triton.runtime import cache

        work.append(cache.triton_key)
    with contextlib.suppress(ImportError):
        from cuda.bindings import driver, nvrtc  # noqa: F401

        work.append(build.problems)
    threading.Thread(target=lambda: [load() for load in work], name="kda_layers.load_early", daemon=True).start()
