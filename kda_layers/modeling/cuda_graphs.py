"""Capture and replay of work on one GPU: all that `CapturedStep` asks of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


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
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            random_state = generator.clone_state()
            graph = torch.cuda.CUDAGraph()
            failed: BaseException | None = None
            try:
                # thread_local: a data loader's thread may pin memory during the capture.
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                    try:
                        work()
                    except BaseException as error:
                        failed = error
                        raise
            except BaseException as error:
                # A capture that cannot be ended raises another error and leaves its stream current and the generator
                # in the graph's hands.
                torch.cuda.set_stream(current)
                generator.graphsafe_set_state(random_state)
                raise (failed or error) from None
        return graph.replay
