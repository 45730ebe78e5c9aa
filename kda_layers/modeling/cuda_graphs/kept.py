"""Graphs that outlive the `generate` that captured them, while the model is as it was, and their memory."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kda_layers.modeling.checks import is_dtensor
from kda_layers.modeling.cuda_graphs.capture import CacheState, CudaGraphs, Step, values_of

MOST_STEPS, MOST_BYTES = 8, 2**28  # that a model keeps: captured steps, and bytes of their caches


class ModelState:
    """All attributes of the modules and the configuration of a model of transformers, and addresses of its tensors.

    It keeps nothing large alive: what is replaced can be freed.
    """

    def __init__(self, model: Any) -> None:
        self._modules = list(map(weakref.ref, model.modules()))
        held = self._contents(model)
        assert held is not None
        self._held, self._addresses = list(map(_weakly, held)), _addresses(held)

    def is_current(self, model: Any) -> bool:
        """Return True if the same objects are held, and tensors lie where they were."""
        held = self._contents(model)
        if held is None or len(held) != len(self._held):
            return False
        then = [value() if type(value) is weakref.ref else value for value in self._held]
        return all(map(is_, held, then)) and _addresses(held) == self._addresses

    def _contents(self, model: Any) -> list[Any] | None:
        """Return all that is held, in dicts and lists too, but not these themselves; None if a module is gone."""
        modules = [module() for module in self._modules]
        if None in modules:
            return None
        found: list[Any] = []
        inside: list[Any] = []
        for attributes in (*map(vars, modules), vars(model.config)):
            for value in attributes.values():
                if isinstance(value, (dict, list)):
                    if value:
                        inside.append(value)
                else:
                    found.append(value)
        known = set(map(id, inside))
        for container in inside:  # which grows
            for value in values_of(container):
                if not isinstance(value, (dict, list)):
                    found.append(value)
                elif id(value) not in known:
                    known.add(id(value))
                    inside.append(value)
        return found


def _addresses(held: list[Any]) -> list[int]:
    tensors: Iterator[Any] = (value for value in held if isinstance(value, Tensor))
    return [(t.to_local() if is_dtensor(t) else t).data_ptr() for t in tensors]


def _weakly(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:  # numbers, strings, tuples
        return value


def switches() -> tuple[Any, ...]:
    """Return torch's settings that choose kernels, which a graph holds."""
    backends: Any = torch.backends
    of_cuda = backends.cuda
    return (
        torch.are_deterministic_algorithms_enabled(), backends.fp32_precision, of_cuda.matmul.fp32_precision,
        of_cuda.matmul.allow_bf16_reduced_precision_reduction, of_cuda.matmul.allow_fp16_reduced_precision_reduction,
        of_cuda.flash_sdp_enabled(), of_cuda.mem_efficient_sdp_enabled(), of_cuda.math_sdp_enabled(),
        of_cuda.cudnn_sdp_enabled(),
    )  # fmt: skip


class Kept(NamedTuple):
    """A captured step after the `generate` that captured it.

    Attributes:
        key: requests with an equal one are served.
        model: what the graph holds of the model.
        tensors: inputs and outputs of the step by name.
        state: of the cache that it advances.
    """

    key: Any
    model: ModelState
    step: Step
    graphs: CudaGraphs
    tensors: dict[str, Tensor]
    state: CacheState


class History:
    """Facts, graphs and memory that the captures of one model leave to later ones."""

    def __init__(self) -> None:
        self.captured: set[int] = set()  # hashes of kinds of steps: if two agree, one may be captured too early
        self.idle: list[CudaGraphs] = []  # of objects that are no longer called, with their memory
        self._kept: list[Kept] = []  # the last one used is the last; all of `_model`
        self._model: ModelState | None = None
        self._warned = False

    def take(self, device: torch.device) -> CudaGraphs:
        """Return graphs that no other object uses: replays on two streams may not share memory."""
        while self.idle:
            graphs = self.idle.pop()
            if graphs.device == device:
                return graphs
        return CudaGraphs(device)

    def state_of(self, model: nn.Module) -> ModelState:
        """Return the state of the model whose history this is."""
        if self._model is None or not self._model.is_current(model):
            self.forget()
            self._model = ModelState(model)
        return self._model

    @staticmethod
    def has_room_for(state: CacheState) -> bool:
        """Return True if a step that advances this state can be kept."""
        return MOST_STEPS > 0 and state.nbytes() <= MOST_BYTES

    def keep(self, kept: Kept) -> None:
        """Keep a step until a request takes it back, the model changes, or newer steps need its place."""
        if kept.model is not self._model:
            self.idle.append(kept.graphs)
            return
        self._kept.append(kept)
        while len(self._kept) > MOST_STEPS or sum(k.state.nbytes() for k in self._kept) > MOST_BYTES:
            self.idle.append(self._kept.pop(0).graphs)

    def take_kept(self, key: Any, model: nn.Module) -> Kept | None:
        """Take back the step of requests with this key; None if there is none, or the model has changed since."""
        if self._kept and not (self._model and self._model.is_current(model)):
            self.forget()
        for i, kept in enumerate(self._kept):
            if kept.key == key:
                return self._kept.pop(i)
        return None

    def forget(self) -> None:
        """Release kept steps, with all memory of graphs that are not in use."""
        self._kept, self.idle, self._model = [], [], None

    def warn(self, model: nn.Module, problem: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(model).__name__} decodes without a CUDA graph, and slower, as capturing one failed: {problem}. "
                "Pass disable_compile=True to generate to decode so without this warning, or "
                "compile_config=CompileConfig() for torch.compile",
                stacklevel=3,
            )


# Beside the models, so that neither their copies nor their files know of it.
_histories: weakref.WeakKeyDictionary[nn.Module, History] = weakref.WeakKeyDictionary()


def history_of(model: nn.Module) -> History:
    """Return the history of a model."""
    return _histories.setdefault(model, History())
