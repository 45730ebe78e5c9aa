"""Weights of a layer: merged for inference, kept in fp32 by casts, loaded when they are offloaded.

Weights of linear layers with the same input lie side by side in memory, for one product instead of several. The
parameters stay the layers' own: the memory of each becomes its rows of one buffer, as in torch's RNNs
(`flatten_parameters`), so that an optimizer step or `load_state_dict` writes to both. Once a parameter is replaced, the
buffer is no longer used. Compiled code does not see that the `.data` of a parameter is replaced after compiling.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...kernels.torch_private import constant_to_compile, is_storage_shared
from .fast_paths import TENSOR_PARALLEL, Call, Reason, additions, fast_path, hooks

DEVICES = ("cuda",)  # where one product is faster than several
# Results of `as_local`, and the forward, parameters and shards that each is of.
_locals: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()
_thread = threading.local()  # .in_passing: True inside `capture_in_passing`


@fast_path("one GEMM for projections of the same input", instead="a GEMM for each projection")
def MERGED_WEIGHTS(call: Any, layers: Sequence[nn.Module], buffer: MergedWeights) -> Iterator[Reason]:
    """Plain linear layers without bias, whose parameters may move into one buffer."""
    if call.compiling:
        yield Reason("is traced by torch.compile, to which addresses of parameters are constants")
        return
    if call.device.type not in DEVICES:
        yield Reason(f"is on {call.device.type}, where one product is no faster")
    if call.autocast:  # which keeps its casts of parameters, not of a buffer
        yield Reason("runs under autocast", "load the model in bfloat16 instead")
    plain = True
    for layer in layers:
        for reason in additions(layer, biased=False):
            plain = False
            yield reason
    if plain:
        yield from _against_moving([layer.weight for layer in layers], buffer)  # type: ignore[misc]


def _against_moving(parts: list[nn.Parameter], buffer: MergedWeights) -> Iterator[Reason]:
    first = parts[0]
    if buffer.fixed or is_capturing(first.device):
        yield Reason("is read by a CUDA graph at the addresses of its parameters", "call the model before capturing it")
    like = first.dtype, first.device, first.shape[1]
    if any((p.dtype, p.device, p.shape[1]) != like for p in parts):
        yield Reason("has parameters of several dtypes, devices or widths", "load the model in one dtype")
    if any(p.is_inference() for p in parts):
        yield Reason("has parameters made in inference mode", "load the model outside of it")
    if len({id(p) for p in parts}) < len(parts):
        yield Reason("has one parameter in two places")  # it cannot lie in two
    elif any(p.untyped_storage().nbytes() != p.nbytes for p in parts):
        yield Reason("has parameters that are parts of other buffers")
    if any(is_storage_shared(p) for p in parts):  # FSDP2 gathers a parameter into memory of its own
        yield Reason("has parameters that another tensor shares, as those that FSDP2 gathers")


def as_local(layer: nn.Module) -> nn.Module:
    """Return a plain linear layer over this rank's shard of a "colwise" layer (tensor parallelism); else `layer`.

    Without gradients, the forward of that style only calls the layer on its shard. The weight returned is the shard
    itself, so that `MergedWeights` can move it.
    """
    forward = layer.__dict__.get("forward")
    if forward is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return layer
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return layer
    parameters: dict[str, Any] = layer._parameters
    shards = [None if p is None else getattr(p, "_local_tensor", None) for p in parameters.values()]
    held = *parameters.values(), *shards
    local, of_forward, of = _locals.get(layer, (None, None, ()))
    if of_forward is not None and of_forward() is forward and len(held) == len(of) and all(map(is_, held, of)):
        return local
    if not _is_colwise(forward):
        return layer
    if any(p is not None and _cut_dimensions(getattr(p, "placements", ())) != [0] for p in parameters.values()):
        return layer
    if local is None:
        local = nn.Linear(1, 1, device="meta")
        local.is_local = True  # type: ignore[assignment]
    local._parameters.update(zip(parameters, shards, strict=True))
    local.out_features, local.in_features = local.weight.shape
    _locals[layer] = local, weakref.ref(forward), held  # a forward refers to its layer
    return local


def forget_local(owner: nn.Module) -> None:
    """Release what `as_local` holds of the shards of an owner's layers, which are about to be replaced."""
    for layer in owner.children():
        _locals.pop(layer, None)


def _is_colwise(forward: Any) -> bool:
    """Return True for the forward of transformers' tensor parallelism that leaves each rank its own outputs."""
    if getattr(forward, "__module__", None) != TENSOR_PARALLEL:
        return False
    held = [cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()]
    outputs = [style.output_layouts for style in held if getattr(style, "use_local_output", False)]
    return _cut_dimensions(outputs) == [-1]


def _cut_dimensions(placements: Sequence[Any]) -> list[int | None]:
    """Return the dimension of each `Shard`, whose module takes half a second to import; None of other placements."""
    return [p.dim if type(p).__name__ == "Shard" else None for p in placements]


class MergedWeights:
    """The buffer of some linear layers, held by the module that owns them."""

    def __init__(self, multiple: int = 1) -> None:
        """Create an empty buffer.

        Args:
            multiple: the number of rows is padded with zeros to a multiple of this. With 8, 16-bit outputs of a GEMM
                have rows aligned to 16 bytes, as vector loads require.
        """
        self.multiple = multiple
        self.whole: Tensor | None = None
        self.parts: tuple[nn.Parameter, ...] = ()
        self.addresses: tuple[int, ...] = ()  # of the parts
        self.fixed = False  # a CUDA graph may hold the addresses of the parameters

    def weight(self, layers: Sequence[nn.Module]) -> Tensor | None:
        """Return the weights of `layers` one above the other, [sum of outputs, D]; None where each must be called.

        The sum is rounded up to `multiple`. The first uncompiled inference on a GPU lays them so, where nothing is
        against it (`MERGED_WEIGHTS`).
        """
        if self._is_current(layers) and self._is_in_place():
            return self.whole
        weight = layers[0]._parameters.get("weight")
        call = Call(torch.empty(0) if weight is None else weight)  # nothing of the inputs matters
        if not MERGED_WEIGHTS.serves(call, layers, self):
            return None
        return self._lay([layer.weight for layer in layers])  # type: ignore[misc]

    def products(self, x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...] | None:
        """Return layer(x) for each of `layers` by one product, or None if their weights do not lie side by side yet."""
        whole = self.whole
        if whole is None or not (self._is_current(layers) and self._is_in_place()):
            return None
        sizes = [part.shape[0] for part in self.parts]
        return nn.functional.linear(x, whole).split([*sizes, whole.shape[0] - sum(sizes)], -1)[:-1]

    def watch(self, x: Tensor) -> None:
        """Leave the parameters where they are if a CUDA graph captures this call on x, which reads them there."""
        if torch.compiler.is_compiling() or not is_capturing(x.device):
            return
        if not getattr(_thread, "in_passing", False):
            self.fixed = True

    def forget(self) -> None:
        """Use the layers' own weights."""
        self.whole, self.parts, self.addresses = None, (), ()

    def refresh(self, owner: nn.Module) -> None:
        """Release the buffer unless the parameters of `owner` still lie in it."""
        parameters = {id(p) for p in owner.parameters()}
        if not (all(id(p) in parameters for p in self.parts) and self._is_in_place()):
            self.forget()

    def _is_current(self, layers: Sequence[nn.Module]) -> bool:
        parts = self.parts
        if len(parts) != len(layers):
            return False
        for layer, part in zip(layers, parts, strict=True):
            if type(layer) is not nn.Linear or next(hooks(layer), None) is not None:
                return False
            if layer._parameters.get("weight") is not part or layer.bias is not None:
                return False
        return True

    @constant_to_compile
    def _is_in_place(self) -> bool:
        for part, address in zip(self.parts, self.addresses, strict=True):  # noqa: SIM110
            if part.data_ptr() != address:
                return False
        return True

    def _lay(self, parts: list[nn.Parameter]) -> Tensor:
        first = parts[0]
        with torch.inference_mode(False), torch.no_grad():
            sizes = [p.shape[0] for p in parts]
            sizes.append(-sum(sizes) % self.multiple)
            whole = torch.cat([p.detach() for p in parts] + [first.new_zeros(sizes[-1], first.shape[1])])
            for part, rows in zip(parts, whole.split(sizes)[:-1], strict=True):
                if part.is_cuda:  # the copy may run on another stream than the one that the part was made on
                    part.detach().record_stream(torch.cuda.current_stream(part.device))
                part.data = _alone(rows)
        self.whole, self.parts, self.addresses = whole, tuple(parts), tuple(p.data_ptr() for p in parts)
        return whole

    def __deepcopy__(self, memo: Any) -> MergedWeights:
        return MergedWeights(self.multiple)  # a copied parameter is its own tensor

    def __reduce__(self) -> Any:
        return MergedWeights, (self.multiple,)


@contextlib.contextmanager
def capture_in_passing() -> Iterator[None]:
    """Allow parameters to move after a capture: its graph is not replayed once they have."""
    _thread.in_passing = True
    try:
        yield
    finally:
        _thread.in_passing = False


def is_capturing(device: torch.device) -> bool:
    """True if a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _alone(t: Tensor) -> Tensor:
    """The same memory as a storage of its own.

    Of tensors that share a storage, accelerate saves the first one only, and safetensors' `save_model` none.
    """
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(t))


class KeepsFP32(nn.Module):
    """A module that keeps some parameters and their gradients in fp32 under `to(torch.bfloat16)`, `half()` etc.

    The counterpart of transformers' `_keep_in_fp32_modules_strict`, which only from_pretrained reads.
    """

    kept_in_fp32: ClassVar[tuple[str, ...]]  # last part of the parameters' names

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        kept = [p for name, p in self.named_parameters() if name.rpartition(".")[2] in self.kept_in_fp32]
        ids = {id(t) for p in kept for t in (p, p.grad)}

        def converted(t: Tensor) -> Tensor:
            new = fn(t)
            # A parameter that is 16-bit already, as in a checkpoint that rounded it, follows the cast.
            rounded = new.is_floating_point() and new.dtype.itemsize < 4 <= t.dtype.itemsize
            return t.to(new.device, torch.float32) if rounded and id(t) in ids else new

        return super()._apply(converted, recurse)


def loads_weights_of(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate the forward of a layer that reads weights of the submodules `names` itself.

    Accelerate loads offloaded weights in a hook of the module that owns them, `_hf_hook`, around its forward. The
    decorated forward runs these hooks around itself; without any it is called as it is. transformers has such a
    decorator, `force_accelerate_hooks`, which a Hub kernel cannot import.
    """

    def decorate(forward: Callable[..., Any]) -> Any:
        @functools.wraps(forward)
        def with_weights(layer: Any, *args: Any, **kwargs: Any) -> Any:
            hooked = [module for module in (getattr(layer, name) for name in names) if hasattr(module, "_hf_hook")]
            for module in hooked:
                module._hf_hook.pre_forward(module)
            output = forward(layer, *args, **kwargs)
            for module in reversed(hooked):
                module._hf_hook.post_forward(module, ())
            return output

        return with_weights

    return decorate
