"""Capture and replay of work on one GPU, and of steps that advance a cache: all that is asked of CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import add, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_layers.modeling.layer.cache import TokenCount
from kda_layers.modeling.layer.weights import capture_in_passing
from kda_layers.modeling.seams import Cache

CONSTANTS = (bool, int, float, str, type(None))  # arguments that a graph holds by value


_failed, _counting = [0], threading.Lock()


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
        with _counting:
            _failed[0] += 1
        raise (failed or error) from None


def failed_captures() -> int:
    """Return the number of failed captures.

    A failure replaces the state of torch's generator; earlier graphs keep drawing from the old one.
    """
    return _failed[0]


# ---------------------------------------------------------------- steps that advance a cache


class CacheState:
    """Everything that the layers of a cache hold: tensors by identity and address, the rest by identity.

    A `TokenCount` may have any number: a captured step counts again at every replay.
    """

    def __init__(self, cache: Cache) -> None:
        """Read the layers of `cache`."""
        layers = {id(layer) for layer in cache.layers}
        self._containers: list[Any] = [cache.layers, *map(vars, cache.layers)]
        self._counters: list[TokenCount] = []
        self._unknown = False
        for container in self._containers:  # which grows
            for value in values_of(container):
                if type(value) in (dict, list):
                    self._containers.append(value)
                elif type(value) is TokenCount:
                    self._counters.append(value)
                elif not isinstance(value, (Tensor, torch.dtype, torch.device, *CONSTANTS)):
                    self._unknown |= id(value) not in layers
        self._copies = [container.copy() for container in self._containers]
        self._views = [values_of(container) for container in self._containers]
        self._lengths = [len(view) for view in self._views]
        self._held = list(chain.from_iterable(self._views))
        self._tensors = [value for value in self._held if isinstance(value, Tensor)]
        self._addresses = [t.data_ptr() for t in self._tensors]

    def is_readable(self, device: torch.device) -> bool:
        """Return True if all that the layers hold is compared and restored, and all tensors are on `device`."""
        return not self._unknown and all(type(t) is Tensor and t.device == device for t in self._tensors)

    def is_current(self) -> bool:
        """Return True if the layers hold the same objects, and tensors where they were."""
        return (
            [*map(len, self._views)] == self._lengths
            and all(map(is_, chain.from_iterable(self._views), self._held))
            and [t.data_ptr() for t in self._tensors] == self._addresses
        )

    def addresses(self) -> tuple[Any, ...]:
        """Return what is held without holding it: equal for equal states, though not only for these."""
        return *map(id, self._held), *self._addresses

    def kind(self) -> tuple[Any, ...]:
        """Return what caches of the same layers and shapes have in common."""
        return tuple(
            (v.shape, v.dtype) if isinstance(v, Tensor) else (type(v), v if isinstance(v, CONSTANTS) else None)
            for v in self._held
        )

    def restore(self) -> None:
        """Put all objects back; the contents of tensors are not restored."""
        for container, copy in zip(self._containers, self._copies, strict=True):
            if isinstance(container, list):
                container[:] = copy
            else:
                container.clear()
                container.update(copy)

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in an order that states of the same kind share."""
        return self._tensors

    def move_to(self, places: Sequence[Tensor]) -> None:
        """Copy the tensors into `places`, those of a state of the same kind, and put these in the cache.

        Create another CacheState afterwards.
        """
        left = iter(places)
        self._replace(lambda t: next(left).copy_(t))

    def part_from(self, places: Sequence[Tensor]) -> None:
        """Put copies in the place of tensors that share memory with `places`."""
        shared = {t.untyped_storage().data_ptr() for t in places}
        self._replace(lambda t: t.clone() if t.untyped_storage().data_ptr() in shared else t)

    def _replace(self, new: Callable[[Tensor], Tensor]) -> None:
        for container in self._containers:
            for name in container if isinstance(container, dict) else range(len(container)):
                if isinstance(container[name], Tensor):
                    container[name] = new(container[name])

    def counts(self) -> list[int]:
        """Return the numbers that are counted in Python."""
        return [counter.tokens for counter in self._counters]

    def set_counts(self, numbers: Iterable[int]) -> None:
        """Set what `counts` returns."""
        for counter, n in zip(self._counters, numbers, strict=True):
            counter.tokens = n


def values_of(container: Any) -> Any:
    """Return a live view of what a dict or a list holds."""
    return container.values() if isinstance(container, dict) else container


class Step(NamedTuple):
    """A captured step that advances a cache."""

    replay: Callable[[], None]
    tokens: list[int]  # by which it advances each count of the cache

    def run(self, state: CacheState) -> None:
        """Replay the step on the cache of `state`, whose tensors are those that it was captured with."""
        self.replay()
        state.set_counts(map(add, state.counts(), self.tokens))


def capture_step(graphs: CudaGraphs, state: CacheState, compute: Callable[[], None]) -> Step | str:
    """Capture `compute`, which advances a cache by tensors' contents and counts alone.

    Args:
        graphs: not to be used again after a failure, which may have spoilt it.
        state: of the cache. After a failure, the cache is as it was.

    Returns:
        The step; or why it cannot be captured.
    """

    def work() -> None:
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # the graph makes its own casts, and leaves none of them behind
        try:
            compute()
        finally:
            torch.set_autocast_cache_enabled(cached)

    before = state.counts()
    try:
        with capture_in_passing():
            replay = graphs.recapture(work)
    except BaseException as error:
        state.restore()
        state.set_counts(before)
        if not isinstance(error, Exception):
            raise
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    after = state.counts()
    state.set_counts(before)
    if not state.is_current():
        state.restore()
        return "a step changes more of its cache than the contents of tensors"
    return Step(replay, [b - a for a, b in zip(before, after, strict=True)])
