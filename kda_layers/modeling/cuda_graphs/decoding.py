"""The decode steps of a `generate` with a static cache as one CUDA graph, captured in each `generate` and replayed."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from kda_layers.kernels.torch_private import current_stream, dispatch_modes
from kda_layers.modeling.cuda_graphs.capture import CONSTANTS, CudaGraphs
from kda_layers.modeling.inputs.arguments import rename_cache
from kda_layers.modeling.layer.cache import KDAStaticCache
from kda_layers.modeling.layer.fast_paths import Reason, fast_path, hooks
from kda_layers.modeling.layer.weights import capture_in_passing, is_capturing
from kda_layers.modeling.seams import Cache, StaticCache

DEVICES = ("cuda",)
# Module of the hooks that collect hidden states and attentions, which do nothing else.
RECORDING_HOOKS = "transformers.utils.output_capturing"


@fast_path("decode steps of `generate` in a CUDA graph", instead="each launch of a decode step by the host")
def CAPTURED_DECODING(call: Any, model: nn.Module, cache: str | None = "static", beams: int = 1) -> Iterator[Reason]:
    """A model whose `forward`, captured in a CUDA graph, does what a call of the model does, with a static cache.

    Excluded are models on several devices, quantised or sharded ones, hooks and replaced forwards, and caches that keep
    their lengths in Python, as the sliding windows of transformers' static cache do.
    """
    modules = dict(model.named_modules())
    tensors = [t for m in modules.values() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    devices = sorted({str(t.device) for t in tensors})
    if call.device.type not in DEVICES:
        yield Reason(f"is on {call.device.type}")
    if len(devices) > 1:
        yield Reason(f"is on several devices ({', '.join(devices)})", "keep the model on one device")
    if cache != "static":
        yield Reason("has a cache that grows", "generate(..., cache_implementation='static')")
    if beams > 1:
        yield Reason("copies its cache at every step, for its beams", "generate(..., num_beams=1)")
    kinds = sorted({type(t).__name__ for t in tensors if type(t) not in (Tensor, nn.Parameter)})
    if kinds or getattr(model, "hf_quantizer", None) is not None:
        yield Reason(f"is quantised or sharded, with parameters of {', '.join(kinds) or 'a quantizer'}")
    if "sliding_attention" in getattr(model.config, "layer_types", ()):
        yield Reason("has sliding windows, whose lengths transformers' static cache keeps in Python")
    if call.global_hooks:
        yield Reason("runs under global hooks of torch.nn", "remove them")
    for module in modules.values():
        yield from _beside_its_forward(module)


def _beside_its_forward(module: nn.Module) -> Iterator[Reason]:
    """Yield what calling a module runs beside the forward of its class and what records outputs."""
    yield from hooks(module, harmless=RECORDING_HOOKS)
    if module._compiled_call_impl is not None:
        yield Reason("is compiled (torch.compile)", "generate captures by itself: leave out model.compile()", module)


class CacheState:
    """Everything that the layers of a cache hold: tensors by identity and address, the rest by identity."""

    def __init__(self, cache: Cache) -> None:
        """Read the layers of `cache`."""
        layers = {id(layer) for layer in cache.layers}
        self._containers: list[Any] = [cache.layers, *map(vars, cache.layers)]
        self._unknown = False
        for container in self._containers:  # which grows
            for value in _values(container):
                if type(value) in (dict, list):
                    self._containers.append(value)
                elif not isinstance(value, (Tensor, torch.dtype, torch.device, *CONSTANTS)):
                    self._unknown |= id(value) not in layers
        self._copies = [container.copy() for container in self._containers]
        self._views = [_values(container) for container in self._containers]
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


def _values(container: Any) -> Any:
    """Return a live view of what a dict or a list holds."""
    return container.values() if isinstance(container, dict) else container


class CapturedDecoding:
    """A function that calls `model` with keyword arguments for one `generate`, from a CUDA graph where it can.

    A decode step is captured once the step before it had the same signature: shapes, dtypes and constants of the
    arguments, the cache and the addresses of its tensors, autocast. The first step is captured if the model has
    captured such a step before, in an earlier `generate`, as the kernels are then compiled and loaded. Steps with the
    captured signature are replayed; all others run eagerly: of other shapes, of beams, whose caches are copied at every
    step, in training mode, with gradients. Results have the bits of the eager steps.

    The graph holds the addresses of the weights: write to them in place, if at all, until `generate` returns.
    """

    def __init__(self, model: nn.Module) -> None:
        """Create a function that has captured nothing.

        Args:
            model: module that `CAPTURED_DECODING` serves while this object is in use.
        """
        self.model = model
        self._device = next(model.parameters()).device
        self._history = _histories.setdefault(model, _History())
        self._graphs: CudaGraphs | None = None
        self._captured: _Captured | None = None
        self._before: Any = None  # signature of the last call if it ran eagerly
        self._first, self._failed = True, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return `model(*args, **kwargs)`; its tensors are not written by later calls."""
        call = None if args or self._failed else self._read(kwargs)
        first, self._first = self._first, False
        if call is None:
            self._captured = self._before = None
            return self.model(*args, **kwargs)
        if self._captured is not None:
            if self._captured.serves(call):
                return self._captured.replay(call.tensors)
            self._captured = None
        state = CacheState(call.cache)
        if not state.is_readable(self._device):
            self._before = None
            return self.model(**kwargs)
        before, self._before = self._before, (call.arguments, call.context, id(call.cache), state.addresses())
        again = self._before == before
        kind = hash((call.arguments, call.context, state.kind())) if first or again else None
        early = first and kind in self._history.captured
        if not (again or early):
            return self.model(**kwargs)
        problem = self._capture(call, kwargs, state)
        if self._captured is not None:
            self._history.captured.add(kind)
            self._before = None
            return self._captured.replay(call.tensors)
        # What this kind of step needs may not be loaded any more, so that only a capture after an eager step counts.
        self._history.captured.discard(kind)
        outputs = self.model(**kwargs)
        if again:
            self._failed = True
            self._history.warn(self.model, problem)
        return outputs

    def __del__(self) -> None:
        if getattr(self, "_graphs", None) is not None:
            self._captured = None
            self._history.idle.append(self._graphs)

    def _read(self, kwargs: dict[str, Any]) -> _Call | None:
        """Return what a graph would hold of a call and what it would read; None if the call must run eagerly."""
        cache, tokens, device = rename_cache(kwargs).get("cache"), kwargs.get("input_ids"), self._device
        if type(cache) not in (StaticCache, KDAStaticCache) or cache.offloading:
            return None
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[1] != 1:
            return None
        if self.model.training or torch.is_grad_enabled() or dispatch_modes() or is_capturing(device):
            return None
        tensors: list[Tensor] = []
        try:
            arguments = _described(kwargs, cache, tensors)
        except TypeError:
            return None
        if any(t.device != device for t in tensors):
            return None
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        stream = current_stream(device.index) if device.type == "cuda" else None
        return _Call(cache, arguments, (autocast, torch.is_inference_mode_enabled(), stream), tensors)

    def _capture(self, call: _Call, kwargs: dict[str, Any], state: CacheState) -> str:
        """Capture the call, or return why it cannot be, with the cache as it was."""
        inputs, results = [t.clone() for t in call.tensors], list[Any]()
        left = iter(inputs)  # in the order of `_described`
        held = tree_map(
            lambda value: next(left) if isinstance(value, Tensor) else value,
            kwargs,
            is_leaf=lambda value: type(value) not in (dict, tuple, list),  # a cache is a tree, too, in some versions
        )
        graphs = self._graphs or self._history.take(self._device)
        self._graphs = None  # a failed capture may have spoilt it

        def compute() -> None:
            cached = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)  # the graph makes its own casts, and leaves none of them behind
            try:
                results.append(self.model(**held))
            finally:
                torch.set_autocast_cache_enabled(cached)

        try:
            with capture_in_passing():
                replay = graphs.recapture(compute)
            _copied(results[0], call.cache, lambda t: t)
        except BaseException as error:
            state.restore()
            if not isinstance(error, Exception):
                raise
            return (str(error).strip() or type(error).__name__).splitlines()[0]
        if not state.is_current():
            state.restore()
            return "a step changes more of its cache than the contents of tensors"
        self._graphs = graphs
        self._captured = _Captured(call, state, inputs, results[0], replay)
        return ""


class _Call(NamedTuple):
    """A call as a graph holds it, with the tensors that it reads."""

    cache: StaticCache
    arguments: Any
    context: tuple[Any, ...]
    tensors: list[Tensor]


class _Captured(NamedTuple):
    """A captured call: the graph's own inputs and outputs, and the state of the cache that it reads."""

    call: _Call
    state: CacheState
    inputs: list[Tensor]
    outputs: Any
    graph: Callable[[], None]

    def serves(self, call: _Call) -> bool:
        """Return True if the graph computes the call, given its tensors."""
        mine = self.call
        same = call.cache is mine.cache and (call.arguments, call.context) == (mine.arguments, mine.context)
        return same and self.state.is_current()

    def replay(self, tensors: list[Tensor]) -> Any:
        """Compute the call with these tensors and return its outputs, which later calls leave alone."""
        for held, given in zip(self.inputs, tensors, strict=True):
            held.copy_(given)
        self.graph()
        return _copied(self.outputs, self.call.cache, Tensor.clone)


class _History:
    """Facts that the objects of one model leave to later ones."""

    def __init__(self) -> None:
        self.captured: set[int] = set()  # hashes of kinds of steps: if two agree, one may be captured too early
        self.idle: list[CudaGraphs] = []  # of objects that are no longer called, with their memory
        self._warned = False

    def take(self, device: torch.device) -> CudaGraphs:
        """Return graphs that no other object uses: replays on two streams may not share memory."""
        while self.idle:
            graphs = self.idle.pop()
            if graphs.device == device:
                return graphs
        return CudaGraphs(device)

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
_histories: weakref.WeakKeyDictionary[nn.Module, _History] = weakref.WeakKeyDictionary()


def _described(value: Any, cache: Cache, tensors: list[Tensor]) -> Any:
    """Return what a graph holds of an argument, to be compared and hashed; add the tensors that it reads to `tensors`.

    Raises:
        TypeError: an argument that is neither a tensor, a constant nor the cache, nor made of these.
    """
    kind = type(value)
    if kind is Tensor:
        if value.layout != torch.strided:
            raise TypeError
        tensors.append(value)
        return value.shape, value.stride(), value.dtype
    if kind in CONSTANTS:
        return kind, value
    if value is cache:
        return Cache
    if kind is dict:
        return dict, tuple([(name, _described(item, cache, tensors)) for name, item in value.items()])
    if kind in (tuple, list):
        return kind, tuple([_described(item, cache, tensors) for item in value])
    raise TypeError


def _copied(value: Any, cache: Cache, copy: Callable[[Tensor], Tensor]) -> Any:
    """Return an output with copies of its tensors.

    Raises:
        TypeError: an output of another type.
    """
    if isinstance(value, Tensor):
        return copy(value)
    if value is cache or isinstance(value, CONSTANTS):
        return value
    if isinstance(value, dict):  # a ModelOutput too
        return type(value)(**{name: _copied(item, cache, copy) for name, item in value.items()})
    if type(value) in (tuple, list):
        return type(value)(_copied(item, cache, copy) for item in value)
    raise TypeError(f"an output is a {type(value).__name__}")
