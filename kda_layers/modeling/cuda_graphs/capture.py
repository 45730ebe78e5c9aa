"""Capture and replay of work on one GPU: all that `CapturedStep` and `CapturedDecoding` ask of CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch

CONSTANTS = (bool, int, float, str, type(None))  # arguments that a graph holds by value


class CudaGraphs:
    """Captures work on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"model must be on a CUDA device, got {device}: move it there before the optimizer is built, or take "
                "the step without CapturedStep"
            )
        self.device = device
        self._aside = torch.cuda.Stream(device)
        self._last: torch.cuda.CUDAGraph | None = None  # of `recapture`

    def run_aside(self, work: Callable[[], None]) -> None:
        """Run `work` on another stream, after what the current stream holds and before what it is given later.

        Autograd's nodes for parameters remember the stream they were made on, which must not be the default stream.
        """
        current = torch.cuda.current_stream(self.device)
        self._aside.wait_stream(current)
        try:
            with torch.cuda.stream(self._aside):
                work()
        finally:
            current.wait_stream(self._aside)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work` without executing it; return the function that replays it on the current stream."""
        gc.collect()  # torch does not; a graph that the collector frees during a capture invalidates it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            # thread_local: a data loader's thread may pin memory during the capture.
            stream = torch.cuda.Stream()
            _record(torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"), work)
            # torch resets the random numbers' offset there and leaves it to luck that it does so before the first
            # replay sets it: on a GPU that other processes keep busy, the replay was sometimes first.
            torch.cuda.current_stream().wait_stream(stream)
        return graph.replay

    def recapture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do what `capture` does in the memory of the last `recapture`, which must not be replayed again.

        The host does not wait for the GPU and nothing is collected, so that this costs little more than `work` does. If
        `work` raises, this object must not capture again: its memory pool may be lost to the failed capture.
        """
        graph, last = torch.cuda.CUDAGraph(), self._last
        with torch.cuda.device(self.device):
            self.run_aside(lambda: _record(_lean(graph, last), work))
        # Not before: a pool is released with the last of its graphs, and a graph that is freed during a capture
        # invalidates it.
        self._last = graph
        return graph.replay


@contextlib.contextmanager
def _lean(graph: torch.cuda.CUDAGraph, last: torch.cuda.CUDAGraph | None) -> Iterator[None]:
    """Capture as `torch.cuda.graph` does on the current stream, but without its synchronisation and freeing."""
    collecting = gc.isenabled()
    gc.disable()  # instead of a collection, which takes milliseconds
    try:
        graph.capture_begin(None if last is None else last.pool(), capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
    finally:
        if collecting:
            gc.enable()


def _record(capturing: contextlib.AbstractContextManager[None], work: Callable[[], None]) -> None:
    """Call `work` in the context `capturing`; raise its own error if it fails."""
    current = torch.cuda.current_stream()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    random_state = generator.clone_state()
    failed: BaseException | None = None
    try:
        with capturing:
            try:
                work()
            except BaseException as error:
                failed = error
                raise
    except BaseException as error:
        # A capture that cannot be ended raises another error and leaves its stream current and the generator in the
        # graph's hands.
        torch.cuda.set_stream(current)
        generator.graphsafe_set_state(random_state)
        raise (failed or error) from None
