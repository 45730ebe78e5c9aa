"""Shares of GPU time: kernels by what launched them, from the profiler's trace.

A kernel's trace event names, by a correlation number, the launch call on the host; what was running on that thread at
that time launched it. Kernels whose launch call was not recorded are assigned by the profiler's own number for the
innermost operator. What neither finds is counted as unknown, not as part of the rest.

The operator calls its backend without torch's dispatcher where nothing looks on, so that the trace would not name it:
while profiling, the backend's methods are wrapped in a named range. torch.compile calls the same methods.
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.machine import Machine
from kda_layers.kernels.kda.contract import KDA, Backend

OPERATOR, PROJECTIONS, REST, UNKNOWN = "KDA operator", "projections", "rest", "unknown"
KINDS = (OPERATOR, PROJECTIONS, REST, UNKNOWN)
RANGE = "kda_layers backend"
MATMULS = frozenset(("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"))
ON_HOST, ON_DEVICE = frozenset(("cpu_op", "user_annotation")), frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
LAUNCHES = frozenset(("cuda_runtime", "cuda_driver"))

Event = dict[str, Any]


def profile(machine: Machine, run: Callable[[], Any], backend: str, calls: int = 3) -> dict[str, Any]:
    """Milliseconds of GPU time per call, and percent of it by kind.

    Raises:
        RuntimeError: no kernel was found below the operator, which any call launches.
    """
    with marked(KDA.backends()[backend]):
        trace(machine, run, 1)  # the profiler's own start-up loses events
        return shares(trace(machine, run, calls), calls)


def shares(events: list[Event], calls: int) -> dict[str, Any]:
    """As `profile`, from the events of a Chrome trace of `calls` calls."""
    around = _Launches(events)
    microseconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for e in events:
        if e.get("cat") in ON_DEVICE:
            microseconds[_kind(around(e))] += e["dur"]
    if not microseconds[OPERATOR]:
        raise RuntimeError(f"the profiler's trace has no kernel launched in a range {RANGE!r}")
    total = sum(microseconds.values())
    return {"GPU ms": total / calls / 1e3} | {f"{kind} %": 100 * us / total for kind, us in microseconds.items()}


@contextlib.contextmanager
def marked(backend: Backend) -> Iterator[None]:
    """Within the context every call of the backend's methods is a range in the profiler's trace."""
    names = ("forward", "backward", "decode")
    for name in names:
        setattr(backend, name, _ranged(getattr(backend, name)))  # on the instance, in front of the class's
    try:
        yield
    finally:
        for name in names:
            delattr(backend, name)


def _ranged(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(RANGE):
            return method(*args, **kwargs)

    return call


def trace(machine: Machine, run: Callable[[], Any], calls: int) -> list[Event]:
    """The events of a profiler's Chrome trace."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if machine.device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    machine.synchronize()
    with torch.profiler.profile(activities=kinds) as recorded:
        for _ in range(calls):
            run()
        machine.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def _kind(around: set[str] | None) -> str:
    if around is None:
        return UNKNOWN
    if RANGE in around:
        return OPERATOR
    return PROJECTIONS if MATMULS & around else REST


class _Launches:
    """Finds what was running on the host when a device event was launched."""

    def __init__(self, events: list[Event]):
        self.calls = {_number(e, "correlation"): e for e in events if e.get("cat") in LAUNCHES}
        host = [e for e in events if e.get("cat") in ON_HOST]
        self.by_id = {_number(e, "External id"): e for e in host if e["cat"] == "cpu_op"}
        self.by_thread: dict[Any, list[Event]] = defaultdict(list)
        for e in sorted(host, key=lambda e: e["ts"]):
            self.by_thread[e["tid"]]  # a known thread, also where nothing of interest runs in it
            if e["name"] == RANGE or e["name"] in MATMULS:
                self.by_thread[e["tid"]].append(e)

    def __call__(self, kernel: Event) -> set[str] | None:
        """Names of the ranges and products around the launch, or None if it is not to be found."""
        found = self.calls.get(_number(kernel, "correlation"))
        if found is None or found["tid"] not in self.by_thread:  # not recorded, or its thread under another number
            found = self.by_id.get(_number(kernel, "External id"))
        if found is None:
            return None
        start, end = found["ts"], found["ts"] + found.get("dur", 0)
        return {e["name"] for e in self.by_thread[found["tid"]] if e["ts"] <= start and end <= e["ts"] + e["dur"]}


def _number(e: Event, name: str) -> Any:
    """An argument of the event; for events without it, a key that no other event has."""
    return e.get("args", {}).get(name, object())
