"""Loading of Triton and NVRTC while a model is built, so that its first call does not wait for them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import torch

from .cuda import build


@functools.cache
def load_early() -> None:
    """On a machine with a GPU, begin to load what finds and compiles kernels; once for a process.

    Before it looks into its cache of kernels Triton hashes its own library, for 0.35 s, and NVRTC loads for 0.06 s. A
    thread does both, without Python's lock for most of the time. Modules are imported here: two threads that import
    modules which need each other can get them unfinished.
    """
    if not torch.cuda.is_available():
        return
    work: list[Callable[[], Any]] = []
    if importlib.util.find_spec("triton"):
        from triton.runtime import cache

        work.append(cache.triton_key)
    with contextlib.suppress(ImportError):  # which `build.problems` explains where a kernel is needed
        from cuda.bindings import driver, nvrtc  # noqa: F401

        work.append(build.problems)
    threading.Thread(target=lambda: [load() for load in work], name="kda_layers.load_early", daemon=True).start()
