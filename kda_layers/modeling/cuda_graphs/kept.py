"""Graphs that outlive the `generate` that captured them, while all that they hold is as it was."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kda_layers.kernels.registry import registries, requested
from kda_layers.kernels.torch_private import attention_priority, function_modes
from kda_layers.modeling.checks import is_dtensor
from kda_layers.modeling.cuda_graphs.capture import CONSTANTS, CudaGraphs, Step, failed_captures

MOST_STEPS, MOST_BYTES = 8, 2**28  # that a model keeps: captured steps, and bytes of their tensors


class ModelState:
    """All that a graph holds of a model of transformers.

    Classes of the modules and their forwards; attributes of modules, of the configuration and of objects that modules
    hold; layouts of tensors. Further inside, and in objects of this package, nothing is compared. What is replaced can
    be freed.
    """

    def __init__(self, model: Any) -> None:
        self._held = list(map(_weakly, _contents(model)))

    def is_current(self, model: Any) -> bool:
        """Return True if all is as it was."""
        now = _contents(model)
        return len(now) == len(self._held) and all(map(_same, self._held, now))


class _Weak(NamedTuple):
    value: weakref.ref[Any]


def _contents(model: Any) -> list[Any]:
    """Return all that is compared: numbers, strings, keys, layouts of tensors, other objects."""
    found: list[Any] = []
    containers: list[tuple[Any, bool]] = [(vars(model.config), True)]  # and whether objects in it are looked into
    for module in model.modules():
        found += type(module), type(module).forward
        containers.append((vars(module), True))
    known = {id(container) for container, _ in containers}
    for container, looks in containers:  # which grows
        values: Any = container
        if isinstance(container, dict):
            found.append(tuple(container))
            values = container.values()
        for value in values:
            if isinstance(value, CONSTANTS):
                found.append(value)
            elif isinstance(value, Tensor):
                found.append(_layout(value))
            elif isinstance(value, (dict, list, tuple, set)):
                if value and id(value) not in known:
                    known.add(id(value))
                    containers.append((value, looks))
            else:
                found.append(value)
                if looks and _is_plain_object(value) and id(attributes := vars(value)) not in known:
                    known.add(id(attributes))
                    containers.append((attributes, False))
    return found


def _is_plain_object(value: Any) -> bool:
    if callable(value) or isinstance(value, ModuleType) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] != __name__.partition(".")[0]


def _layout(t: Any) -> tuple[Any, ...]:
    try:
        t = t.to_local() if is_dtensor(t) else t
        return t.data_ptr(), t.dtype, t.shape, t.stride()
    except RuntimeError:  # sparse, for example
        return (object(),)  # like no other


def _weakly(value: Any) -> Any:
    if isinstance(value, (tuple, *CONSTANTS)):
        return value
    try:
        return _Weak(weakref.ref(value))
    except TypeError:
        return value


def _same(held: Any, now: Any) -> bool:
    if type(held) is _Weak:
        return now is not None and held.value() is now
    return held is now or (type(held) is type(now) and isinstance(held, (tuple, *CONSTANTS)) and held == now)


def circumstances() -> tuple[Any, ...] | None:
    """Return what chooses kernels besides the model, and what a graph has of torch's; None where no graph is kept."""
    if function_modes():
        return None
    backends: Any = torch.backends
    matmul, of_cuda, cudnn = backends.cuda.matmul, backends.cuda, backends.cudnn
    return (
        requested(), [backend for registry in registries() for backend in registry.backends().values()],
        failed_captures(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
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
        tensors: inputs and outputs of the step by name.
        places: the tensors of the cache that it advances.
    """

    key: Any
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
