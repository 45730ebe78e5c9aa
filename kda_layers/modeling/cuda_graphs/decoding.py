"""The decode steps of a `generate` as one CUDA graph, captured in each `generate` and replayed.

The graph holds the addresses of a cache whose tensors do not move: a static one, the default one of a model of KDA
layers alone, or a default one with `Buffers`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from kda_layers.kernels.torch_private import current_stream, dispatch_modes
from kda_layers.modeling.checks import is_dtensor, is_stock
from kda_layers.modeling.cuda_graphs.capture import CONSTANTS, CacheState, CudaGraphs, Step, capture_step
from kda_layers.modeling.cuda_graphs.kept import history_of
from kda_layers.modeling.inputs.arguments import rename_cache
from kda_layers.modeling.layer.cache import KDACacheLayer, KDADynamicCache, KDAOnlyCacheLayer, KDAStaticCache
from kda_layers.modeling.layer.fast_paths import TENSOR_PARALLEL, Reason, fast_path, hooks
from kda_layers.modeling.layer.weights import is_capturing
from kda_layers.modeling.seams import Cache, DynamicLayer, StaticCache, StaticLayer

DEVICES = ("cuda",)
SLOTS = 512  # of keys and values, by which the buffers of softmax layers grow
DEFAULT_CACHES = (None, "dynamic")  # values of `cache_implementation`
# Python modules of what a graph may hold: hooks that only collect hidden states and attentions, the forwards of tensor
# parallelism, whose exchanges are NCCL's kernels, and the hook of swapped models, which reads no mask of a step.
HARMLESS = "transformers.utils.output_capturing", TENSOR_PARALLEL, "kda_layers.modeling.swap.in_place"


@fast_path("decode steps of `generate` in a CUDA graph", instead="each launch of a decode step by the host")
def CAPTURED_DECODING(call: Any, model: nn.Module, cache: str | None = "static", beams: int = 1) -> Iterator[Reason]:
    """A model whose `forward`, captured in a CUDA graph, does what a call of the model does, with a cache that stays.

    Excluded are models on several devices, quantised ones, ones sharded other than by transformers' tensor parallelism,
    hooks and replaced forwards, and caches that grow or keep their lengths in Python, as the sliding windows of
    transformers' static cache do.
    """
    if call.device.type not in DEVICES:
        yield Reason(f"is on {call.device.type}")
    modules = dict(model.named_modules())
    tensors = [t for m in modules.values() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1:
        yield Reason(f"is on several devices ({', '.join(devices)})", "keep the model on one device")
    if cache != "static" and not (cache in DEFAULT_CACHES and has_only_kda_layers(model.config)):
        yield Reason("has a cache that grows", "generate(..., cache_implementation='static')")
    if beams > 1:
        yield Reason("copies its cache at every step, for its beams", "generate(..., num_beams=1)")
    parallel = (getattr(model, "_tp_size", None) or 1) > 1  # each rank holds its heads, and all take the same steps
    others = {type(t) for t in tensors if not (parallel and is_dtensor(t))} - {Tensor, nn.Parameter}
    kinds = sorted(kind.__name__ for kind in others)
    if kinds or getattr(model, "hf_quantizer", None) is not None:
        yield Reason(f"is quantised or sharded, with parameters of {', '.join(kinds) or 'a quantizer'}")
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        yield Reason("has sliding windows, whose lengths transformers' static cache keeps in Python")
    if call.global_hooks:
        yield Reason("runs under global hooks of torch.nn", "remove them")
    for module in modules.values():
        yield from _beside_its_forward(module)


def has_only_kda_layers(config: Any) -> bool:
    """Return True if every layer has a state of constant size, which no decode step moves."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return False
    return set(kinds[: config.num_hidden_layers]) == {"linear_attention"}  # fewer where the decoder was cut


def is_of_constant_size(cache: Any) -> bool:
    """Return True if decode steps update a cache in place, without a record of past tokens."""
    if type(cache) not in (StaticCache, KDAStaticCache, KDADynamicCache) or cache.offloading:
        return False
    constant = type(cache) is not KDADynamicCache or all(type(layer) is KDAOnlyCacheLayer for layer in cache.layers)
    return constant and not any(getattr(layer, "record_past", False) for layer in cache.layers)


def rounded(tokens: int) -> int:
    """Round up to a multiple of SLOTS, so that requests of similar lengths have buffers of one size."""
    return -(-tokens // SLOTS) * SLOTS


class Buffers:
    """Static layers in the place of a dynamic cache's softmax layers while steps run, which grow between steps.

    Attributes:
        tokens: those in the cache before the steps.
        free: steps that can run until the buffers must grow.
    """

    def __init__(self, cache: Any) -> None:
        """Look at a cache that holds the prompt."""
        self._cache = cache
        self._dynamic = {i: layer for i, layer in enumerate(cache.layers) if type(layer) is DynamicLayer}
        self.tokens = max((layer.get_seq_length() for layer in self._dynamic.values()), default=0)
        self.free = 0 if self._dynamic else sys.maxsize

    def grow(self, steps: int, most: int) -> None:
        """Allocate buffers up to the next multiple of SLOTS, at most for `most` steps; `steps` steps have run."""
        filled = self.tokens + steps
        slots = min(rounded(filled + 1), self.tokens + most)
        self.free = slots - filled
        for i in self._dynamic:
            old, new = self._cache.layers[i], StaticLayer(slots)
            if old.is_initialized:  # not where the decoder was cut to its first layers
                new.update(old.keys[:, :, :filled], old.values[:, :, :filled])
                old.keys = old.values = None
            self._cache.layers[i] = new

    def give_back(self) -> None:
        """Restore the dynamic layers, with the keys and values of all steps."""
        for i, layer in self._dynamic.items():
            buffer = self._cache.layers[i]
            self._cache.layers[i] = layer
            if buffer is not layer and buffer.is_initialized:
                filled = int(buffer.cumulative_length)
                layer.keys, layer.values = buffer.keys[:, :, :filled], buffer.values[:, :, :filled]


def what_moves(cache: Any) -> str:
    """Return the part of a cache that moves and that `Buffers` cannot replace; empty if there is none.

    Args:
        cache: a cache, the name of an implementation (as `explain` has it), or None.
    """
    if cache is None or is_of_constant_size(cache):
        return ""
    if type(cache) is not KDADynamicCache or cache.offloading:
        return f"cache_implementation={cache!r}" if isinstance(cache, str) else f"a {type(cache).__name__}"
    if any(getattr(layer, "record_past", False) for layer in cache.layers):
        return "a cache that records its past"
    kinds = {type(layer) for layer in cache.layers} - {KDACacheLayer, DynamicLayer}
    return f"a cache of {', '.join(sorted(kind.__name__ for kind in kinds))}" if kinds else ""


def _beside_its_forward(module: nn.Module) -> Iterator[Reason]:
    """Yield what calling a module runs beside the forward of its class and what records outputs."""
    yield from hooks(module, *HARMLESS)
    if is_stock(module):
        yield Reason("is a KDA layer of transformers", "kda_layers.swap_attention(model)", module)
    if module._compiled_call_impl is not None:
        yield Reason("is compiled (torch.compile)", "generate captures by itself: leave out model.compile()", module)


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
        self._history = history_of(model)
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
        if not is_of_constant_size(cache):
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
            results.append(self.model(**held))
            _copied(results[0], call.cache, lambda t: t)

        step = capture_step(graphs, state, compute)
        if isinstance(step, str):
            return step
        self._graphs = graphs
        self._captured = _Captured(call, state, inputs, results[0], step)
        return ""


class _Call(NamedTuple):
    """A call as a graph holds it, with the tensors that it reads."""

    cache: Cache
    arguments: Any
    context: tuple[Any, ...]
    tensors: list[Tensor]


class _Captured(NamedTuple):
    """A captured call: the graph's own inputs and outputs, and the state of the cache that it reads."""

    call: _Call
    state: CacheState
    inputs: list[Tensor]
    outputs: Any
    step: Step

    def serves(self, call: _Call) -> bool:
        """Return True if the graph computes the call, given its tensors."""
        mine = self.call
        same = call.cache is mine.cache and (call.arguments, call.context) == (mine.arguments, mine.context)
        return same and self.state.is_current()

    def replay(self, tensors: list[Tensor]) -> Any:
        """Compute the call with these tensors and return its outputs, which later calls leave alone."""
        for held, given in zip(self.inputs, tensors, strict=True):
            held.copy_(given)
        self.step.run(self.state)
        return _copied(self.outputs, self.call.cache, Tensor.clone)


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
