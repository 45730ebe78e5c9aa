"""Methods of measuring: CUDA events after an L2 flush, host time separate from GPU time, CUDA graphs."""

from __future__ import annotations

import abc
import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import report, timing
from benchmarks.timing import Times

Run = Callable[[], Any]


class CaptureError(Exception):
    """Work that runs cannot be captured in a CUDA graph."""


class Machine(abc.ABC):
    """A device and its clock. Tests have one of their own, which runs every section on a CPU."""

    device: str

    @abc.abstractmethod
    def warm_up(self, run: Run, before: Run | None = None) -> int:
        """Call `run` until it is as fast as it gets, `before` each; the number of calls worth timing."""

    @abc.abstractmethod
    def turn(self, run: Run, before: Run | None, calls: int) -> list[float]:
        """Milliseconds of each of `calls` calls of `run` that has been warmed up; `before` each, untimed."""

    @abc.abstractmethod
    def graph(self, run: Run, before: Run | None = None) -> Run:
        """A replay of `run`, returning what it returned; `before` is called, but not captured, before each run.

        Raises:
            CaptureError: it runs, but cannot be captured.
        """

    @abc.abstractmethod
    def peak_extra_mib(self, run: Run) -> float:
        """Peak memory of one call, its results included, above what was allocated before it."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits for the device."""

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Memory that could still be allocated."""

    def alive(self) -> bool:
        """False once an error has taken the device away from this process."""
        try:
            self.synchronize()
        except RuntimeError:
            return False
        return True

    def times_ms(self, run: Run, before: Run | None = None) -> list[float]:
        """Milliseconds of each of several calls of `run`, which is compared with nothing."""
        return self.turn(run, before, self.warm_up(run, before))

    def host_us(self, runs: dict[str, Run], batches: int = 3, calls: int = 20) -> dict[str, Times | Exception]:
        """Host microseconds per call of each of `runs`, in turns of `batches` batches of calls.

        The device is waited for between batches only. Meant for calls whose work is so short that no queue fills.
        """
        for run in runs.values():
            for _ in range(3):
                run()

        def turn(run: Run) -> list[float]:
            times = []
            for _ in range(batches):
                self.synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    run()
                times.append((time.perf_counter() - start) / calls * 1e6)
            self.synchronize()
            return times

        return timing.in_turns({name: (lambda run=run: turn(run)) for name, run in runs.items()})  # type: ignore[misc]

    def collect(self) -> None:
        """Gives unused memory back."""
        gc.collect()


class CudaMachine(Machine):
    """The current CUDA device."""

    device = "cuda"

    def __init__(self, warmup_ms: float = 30, measure_ms: float = 150, calls: tuple[int, int] = (10, 300)):
        self.warmup_ms, self.measure_ms, self.calls = warmup_ms, measure_ms, calls
        self.flushed = torch.empty(2**28, dtype=torch.int8, device=self.device)  # 256 MB: more than any L2

    def warm_up(self, run: Run, before: Run | None = None) -> int:
        run_before = before or (lambda: None)
        fewest, most = self.calls
        for _ in range(2):  # compiles and tunes; then what is left of that
            run_before()
            run()
        estimate = max(report.summary(self._events(run, run_before, 3))["median"], 1e-3)
        self._events(run, run_before, max(1, min(most, int(self.warmup_ms / estimate))))
        return max(fewest, min(most, int(self.measure_ms / estimate)))

    def turn(self, run: Run, before: Run | None, calls: int) -> list[float]:
        return self._events(run, before or (lambda: None), calls)

    def _events(self, run: Run, before: Run, calls: int) -> list[float]:
        pairs = []
        for _ in range(calls):
            before()
            self.flushed.zero_()  # also keeps the device busy while the host issues what is timed
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            pair[0].record()
            run()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def graph(self, run: Run, before: Run | None = None) -> Run:
        run_before = before or (lambda: None)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compilation and tuning cannot be captured
                run_before()
                run()
        torch.cuda.current_stream().wait_stream(stream)
        run_before()
        gc.collect()  # a graph that the collector frees during the capture would invalidate it
        torch.cuda.empty_cache()  # a capture cannot free cached memory when it runs out
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                result = run()
        except Exception as problem:
            torch.cuda.synchronize()
            raise CaptureError(f"{type(problem).__name__}: {problem}") from problem

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    def peak_extra_mib(self, run: Run) -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        del result
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def collect(self) -> None:
        super().collect()
        torch.cuda.empty_cache()
