"""Graphs that outlive the `generate` that captured them, while all that they hold is as it was."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kda_layers.kernels.registry import registries, requested
from kda_layers.kernels.torch_private import attention_priority, function_modes
from kda_layers.modeling.checks import is_dtensor
from kda_layers.modeling.cuda_graphs.capture import CONSTANTS, CudaGraphs, Step, failed_captures

FIXED = (
    type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, Enum, nn.Module, torch.dtype, torch.device,
)  # fmt: skip
MOST_STEPS, MOST_BYTES = 8, 2**28  # that a model keeps: captured steps, and bytes of their tensors


class ModelState:
    """State of a model that a captured step depends on.

    It covers the classes of modules and their forwards, the attributes of modules, of the configuration and of objects
    that modules hold, and the addresses, dtypes, shapes and strides of tensors. It does not cover other attributes of
    classes, objects nested more deeply, or objects of this package. A model that holds an object without attributes,
    such as a NumPy array, is never current. `layer.remembered.Snapshot` is cheaper, for every step: of attributes it
    compares the norms' epsilons alone.

    Only weak references are held to modules and objects, and none to tensors.
    """

    def __init__(self, model: Any) -> None:
        modules = list(model.modules())
        self._kinds = [part for m in modules for part in (type(m), type(m).forward)]
        self._modules = list(map(weakref.ref, modules))
        known: set[int] = set()
        self._parts = [_Part(container, True, known) for container in (*map(vars, modules), vars(model.config))]

    def is_current(self, model: Any) -> bool:
        """Return True if all is as it was."""
        modules: list[Any] = [module() for module in self._modules]
        if None in modules or [part for m in modules for part in (type(m), type(m).forward)] != self._kinds:
            return False
        containers = (*map(vars, modules), vars(model.config))
        return all(part.is_current(container) for part, container in zip(self._parts, containers, strict=True))


class _Part:
    """Contents of a dict, list, tuple or set, compared by identity.

    Identities are not reused: constants and keys are held here, and other objects must still be alive.
    """

    def __init__(self, container: Any, looks: bool, known: set[int]) -> None:
        """Read a container.

        Args:
            container: what to compare later.
            looks: True if the attributes of objects that it holds are compared.
            known: identities of containers that are compared elsewhere.
        """
        self._ids = _ids(container)
        self._small: list[Any] = []  # keys and constants
        self._alive: list[weakref.ref[Any]] = []
        self._empty: list[Any] = []  # keys of containers that hold nothing
        self._inside: list[tuple[Any, _Part]] = []  # by key
        self._objects: list[tuple[Any, _Part]] = []
        self._layouts: list[tuple[Any, Any]] = []
        pairs = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in pairs:
            self._small.append(key)
            if isinstance(value, Tensor):
                self._layouts.append((key, _layout(value)))
            elif isinstance(value, (dict, list, tuple, set)):
                if not value:
                    self._empty.append(key)
                elif id(value) not in known:
                    known.add(id(value))
                    self._inside.append((key, _Part(value, looks, known)))
            elif isinstance(value, CONSTANTS):
                self._small.append(value)
            else:
                try:
                    self._alive.append(weakref.ref(value))
                except TypeError:
                    self._small.append(value)
                if looks and not _is_constant(value):
                    self._look_into(key, value, known)

    def _look_into(self, key: Any, value: Any, known: set[int]) -> None:
        if not hasattr(value, "__dict__"):
            self._ids.append(0)  # never equal
        elif id(attributes := vars(value)) not in known:
            known.add(id(attributes))
            self._objects.append((key, _Part(attributes, False, known)))

    def is_current(self, container: Any) -> bool:
        """Return True if a container holds what the one that was read held."""
        if _ids(container) != self._ids:
            return False
        for value in self._alive:
            if value() is None:
                return False
        if isinstance(container, set):
            container = list(container)
        if any(map(container.__getitem__, self._empty)):
            return False
        for key, layout in self._layouts:
            if _layout(container[key]) != layout:
                return False
        for key, part in self._inside:
            if not part.is_current(container[key]):
                return False
        return all(part.is_current(vars(container[key])) for key, part in self._objects)


def _ids(container: Any) -> list[int]:
    if isinstance(container, dict):
        return [*map(id, container), *map(id, container.values())]
    return list(map(id, container))


def _is_constant(value: Any) -> bool:
    """Return True if the attributes of an object need not be compared here."""
    return isinstance(value, FIXED) or type(value).__module__.partition(".")[0] == __name__.partition(".")[0]


def _layout(t: Any) -> tuple[Any, ...]:
    try:
        t = t.to_local() if is_dtensor(t) else t
        return t.data_ptr(), t.dtype, t.shape, t.stride()
    except RuntimeError:  # sparse, for example
        return (object(),)  # never equal


def circumstances() -> tuple[Any, ...] | None:
    """Return the global settings that choose kernels; None under a function mode, which a graph would bypass."""
    if function_modes():
        return None
    backends: Any = torch.backends
    matmul, of_cuda, cudnn = backends.cuda.matmul, backends.cuda, backends.cudnn
    return (
        requested(), [backend for registry in registries() for backend in registry.backends().values()],
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        backends.fp32_precision, matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_fp16_accumulation,
        of_cuda.preferred_blas_library(), cudnn.enabled, cudnn.conv.fp32_precision, attention_priority(),
        of_cuda.flash_sdp_enabled(), of_cuda.mem_efficient_sdp_enabled(), of_cuda.math_sdp_enabled(),
        of_cuda.cudnn_sdp_enabled(),
    )  # fmt: skip


class Kept(NamedTuple):
    """A captured step after the `generate` that captured it.

    Attributes:
        key: requests with an equal one are served.
        failures: captures that had failed when it was captured.
        tensors: inputs and outputs of the step by name.
        places: the tensors of the cache that it advances.
    """

    key: Any
    failures: int
    step: Step
    graphs: CudaGraphs
    tensors: dict[str, Tensor]
    places: Sequence[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.tensors.values(), *self.places))


class History:
    """Facts, graphs and memory that the captures of one model leave to later ones."""

    def __init__(self) -> None:
        self.captured: set[int] = set()  # hashes of kinds of steps: if two agree, one may be captured too early
        self.idle: list[CudaGraphs] = []  # of objects that are no longer called, with their memory
        self._kept: list[Kept] = []  # the last one used is the last; all of `_model`
        self._model: ModelState | None = None
        self._warned = False
        self._lock = threading.RLock()

    def take(self, device: torch.device) -> CudaGraphs:
        """Return graphs that no other object uses: replays on two streams may not share memory."""
        with self._lock:
            for graphs in self.idle:
                if graphs.device == device:
                    self.idle.remove(graphs)
                    return graphs
        return CudaGraphs(device)

    def state_of(self, model: nn.Module) -> ModelState:
        """Return the state of the model whose history this is."""
        with self._lock:
            if self._model is None or not self._model.is_current(model):
                self._drop()
                self._model = ModelState(model)
            return self._model

    def keep(self, kept: Kept, model: ModelState) -> None:
        """Keep a step until a request takes it back, the model changes, or newer steps need its place."""
        with self._lock:
            if model is self._model:
                self._kept.append(kept)
            else:
                self.idle.append(kept.graphs)
            while len(self._kept) > MOST_STEPS or sum(k.nbytes for k in self._kept) > MOST_BYTES:
                self.idle.append(self._kept.pop(0).graphs)

    def take_kept(self, key: Any, model: nn.Module) -> tuple[Kept, ModelState] | None:
        """Take back the step of requests with this key; None if there is none, or the model has changed since."""
        with self._lock:
            if self._model is None or not self._kept:
                return None
            if not self._model.is_current(model):
                self._drop()
            self.idle += [kept.graphs for kept in self._kept if kept.failures != failed_captures()]
            self._kept = [kept for kept in self._kept if kept.failures == failed_captures()]
            for i, kept in enumerate(self._kept):
                if kept.key == key:
                    return self._kept.pop(i), self._model
            return None

    def forget(self) -> None:
        """Release all steps and memory that are not in use."""
        with self._lock:
            self._drop()
            self.idle.clear()

    def _drop(self) -> None:
        self.idle += [kept.graphs for kept in self._kept]
        self._kept.clear()
        self._model = None

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
