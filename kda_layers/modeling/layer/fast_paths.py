"""Fast paths: what a call runs in place of modules that are called one by one, and every reason against it.

A path stands beside its implementation, as a generator of the reasons against it:

```python
@fast_path("fused norm", instead="an addition, then nn.RMSNorm")
def FUSED_NORM(call, norm):
    if call.autocast:
        yield Reason("autocast", "load the model in bfloat16 instead")
    yield from additions(norm, nn.RMSNorm)
```

A call takes the path if there is none (`FUSED_NORM.serves(Call(x), norm)`), and pays for the first one only; `explain`
asks for all of them, for a call that it supposes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels import torch_private, tracing

logger = logging.getLogger("kda_layers")

DEVICES = ("cuda",)  # on which a declined path is worth a line of the log
TENSOR_PARALLEL = "transformers.distributed.tensor_parallel"  # whose forwards take the place of modules' own


class Reason(NamedTuple):
    """A reason against a fast path."""

    text: str | Callable[[], str]  # called where it is printed, if it takes long
    way_out: str = ""  # what the user can change; empty for what the call is about, as training
    module: nn.Module | None = None  # whose fault it is

    def __str__(self) -> str:
        text = self.text if isinstance(self.text, str) else self.text()
        return f"{text}: {self.way_out}" if self.way_out else text


class Call:
    """Facts of a call on x [B, T, ...]; sizes and torch's state are read when a path asks for them."""

    __slots__ = ("device", "dtype", "x")

    def __init__(self, x: Tensor) -> None:
        self.x, self.device, self.dtype = x, x.device, x.dtype

    rows = property(lambda self: self.x.shape[0])
    tokens = property(lambda self: self.x.shape[1])
    compiling = property(lambda self: torch.compiler.is_compiling())
    autocast = property(lambda self: tracing.autocasts(self.x.device.type))
    grad = property(lambda self: torch.is_grad_enabled())
    records = property(lambda self: tracing.needs_gradients((self.x,)))
    global_hooks = property(lambda self: torch_private.has_global_hooks())
    is_plain = property(lambda self: tracing.is_plain((self.x,)))

    @property
    def is_transformed(self) -> bool:
        """True under a transform of torch.func or forward-mode AD."""
        return torch_private.transforms_active() or torch_private.forward_ad_active()


class SupposedCall(NamedTuple):
    """Facts of a call that is not made, with the fields of `Call`."""

    device: torch.device
    dtype: torch.dtype
    rows: int = 1
    tokens: int = 1
    compiling: bool = False
    autocast: bool = False
    grad: bool = False
    records: bool = False
    global_hooks: bool = False
    is_plain: bool = True
    is_transformed: bool = False


class FastPath:
    """A fast path; made by `fast_path`."""

    def __init__(self, name: str, instead: str, reasons: Callable[..., Iterator[Reason]]) -> None:
        self.name, self.instead, self.reasons = name, instead, reasons
        self.__doc__, self._told = reasons.__doc__, False

    def serves(self, call: Any, *facts: Any, **more: Any) -> bool:
        """Return True if nothing is against the path; log the first reason on a GPU that the user can change."""
        for reason in self.reasons(call, *facts, **more):
            if reason.way_out and not self._told and not call.compiling and call.device.type in DEVICES:
                self._told = True
                kind = "" if reason.module is None else f"{type(reason.module).__name__} "
                logger.warning(
                    "%s: %s runs instead, as %s%s. kda_layers.explain(model) says where; this is said once",
                    self.name, self.instead, kind, reason,
                )  # fmt: skip
            return False
        return True


def fast_path(name: str, instead: str) -> Callable[[Callable[..., Iterator[Reason]]], FastPath]:
    """Return a decorator that makes a generator of `Reason`s, of a call and further facts, a `FastPath`.

    Args:
        name: of the path, as `explain` and the log print it.
        instead: what runs where the path does not serve.
    """
    return lambda reasons: FastPath(name, instead, reasons)


def additions(layer: nn.Module, kind: type[nn.Module] = nn.Linear, biased: bool = True) -> Iterator[Reason]:
    """Yield what calling a layer does beyond its class with a weight of its own: an adapter, a hook, a shard.

    Args:
        layer: the module.
        kind: the class that it should have.
        biased: False if a bias is one thing too many.
    """
    if type(layer) is not kind:
        yield Reason(f"is {_article(type(layer))}, not {_article(kind)}", _way_out_of(layer), layer)
        return
    yield from hooks(layer)
    weight = layer._parameters.get("weight")
    if type(weight) is not nn.Parameter and not getattr(layer, "is_local", False):  # see weights.as_local
        yield Reason(f"has {'no weight' if weight is None else f'a weight of {type(weight).__name__}'}", "", layer)
    elif not weight.is_contiguous():
        yield Reason("has a weight that is not contiguous", "call .contiguous() on it", layer)
    if not biased and layer._parameters.get("bias") is not None:
        yield Reason("has a bias", "", layer)


def hooks(module: Any, *harmless: str) -> Iterator[Reason]:
    """Yield what calling a module runs beside its class's forward, except what Python modules `harmless` installed."""
    pre, post = module._forward_pre_hooks, module._forward_hooks
    if (pre or post) and any(getattr(h, "__module__", None) not in harmless for h in (*pre.values(), *post.values())):
        yield Reason("has forward hooks", "remove them", module)
    if "forward" in vars(module) and (owner := getattr(module.forward, "__module__", None)) not in harmless:
        if owner == TENSOR_PARALLEL:
            yield Reason("is shared by several GPUs (tensor parallelism)", "", module)
        else:
            yield Reason(
                "has a replaced forward, as of accelerate's offloading", "keep the model on one device", module
            )


def training_additions(layer: nn.Module, kind: type[nn.Module] = nn.Linear) -> Iterator[Reason]:
    """Yield `additions`, a bias among them, and hooks of the backward."""
    yield from additions(layer, kind, biased=False)
    if layer._backward_hooks or layer._backward_pre_hooks:
        yield Reason("has backward hooks", "remove them", layer)


def other_dtype(layer: nn.Module, dtype: torch.dtype) -> Iterator[Reason]:
    """Yield that a layer's weight has another dtype than its inputs."""
    got = getattr(getattr(layer, "weight", None), "dtype", dtype)  # a quantised layer may have a method `weight`
    if got != dtype:
        text = f"has a weight in {name_of(got)} for inputs in {name_of(dtype)}"
        yield Reason(text, "load the model in one dtype", layer)


def is_plain(layer: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Return True if calling the layer does what its class with a weight of its own does, and nothing else."""
    return next(additions(layer, kind), None) is None


def name_of(dtype: torch.dtype) -> str:
    """Return bfloat16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _article(kind: type) -> str:
    name = kind.__name__ if kind.__module__.startswith("torch.nn") else f"{kind.__module__}.{kind.__name__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _way_out_of(layer: nn.Module) -> str:
    """Return how to get a plain layer of one of another class; empty where nothing does."""
    return "merge the adapter (merge_and_unload)" if type(layer).__module__.startswith("peft.") else ""
