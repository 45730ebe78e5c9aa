"""Weights of linear layers with the same input, side by side in memory: for inference one product instead of several.

The parameters stay the layers' own: the memory of each becomes its rows of one buffer, as in torch's RNNs
(`flatten_parameters`), so that an optimizer step or `load_state_dict` writes to both. Once a parameter is replaced, the
buffer is no longer used. Compiled code does not see that the `.data` of a parameter is replaced after compiling.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.torch_private import constant_to_compile, is_storage_shared

DEVICES = ("cuda",)  # where one product is faster than several
_thread = threading.local()  # .in_passing: True inside `capture_in_passing`


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
        """The weights of `layers` one above the other, [sum of outputs, D]; None where each must be called itself.

        The sum is rounded up to `multiple`.

        The first uncompiled inference on a GPU lays them so, unless a layer is more than a plain `nn.Linear` with a
        parameter of its own (adapters, quantised weights, hooks of offloading, shards).
        """
        if self._is_current(layers) and self._is_in_place():
            return self.whole
        if torch.compiler.is_compiling() or not all(only_multiplies(layer) for layer in layers):
            return None
        return self._lay([layer.weight for layer in layers])  # type: ignore[misc]

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
            if type(layer) is not nn.Linear or not is_unhooked(layer):
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

    def _lay(self, parts: list[nn.Parameter]) -> Tensor | None:
        first = parts[0]
        if self.fixed or first.device.type not in DEVICES or is_capturing(first.device):
            return None
        like = first.dtype, first.device, first.shape[1]
        if any((p.dtype, p.device, p.shape[1]) != like or p.is_inference() for p in parts):
            return None
        if len({id(p) for p in parts}) < len(parts):  # tied: one parameter cannot lie in two places
            return None
        if any(p.untyped_storage().nbytes() != p.nbytes for p in parts):  # part of another buffer
            return None
        if any(is_storage_shared(p) for p in parts):  # FSDP2 gathers a parameter into memory of its own
            return None
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
    """Capture a graph that is dropped before weights are laid side by side again: parameters may move after it."""
    _thread.in_passing = True
    try:
        yield
    finally:
        _thread.in_passing = False


def is_capturing(device: torch.device) -> bool:
    """True if a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_plain(layer: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Return True if the layer does no more than its class with a weight of its own: no adapter, hook or shard."""
    weight = layer._parameters.get("weight")
    return type(layer) is kind and is_unhooked(layer) and type(weight) is nn.Parameter and weight.is_contiguous()


def is_unhooked(module: nn.Module) -> bool:
    """Return True if calling the module runs its forward and nothing else."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))  # vars: accelerate's


def only_multiplies(layer: nn.Module) -> bool:
    """Return True if the layer is plain and has no bias."""
    return is_plain(layer) and layer.bias is None


def trains_plainly(layer: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Return True if the layer is plain, without bias and without hooks of the backward."""
    hooks = layer._backward_hooks or layer._backward_pre_hooks
    return is_plain(layer, kind) and layer._parameters.get("bias") is None and not hooks


def _alone(t: Tensor) -> Tensor:
    """The same memory as a storage of its own.

    Of tensors that share a storage, accelerate saves the first one only, and safetensors' `save_model` none.
    """
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(t))
