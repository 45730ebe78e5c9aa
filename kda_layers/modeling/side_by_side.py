"""Weights of linear layers with the same input, side by side in memory: for inference one product instead of several.

The parameters stay the layers' own: each becomes a view of its rows of one buffer, as in torch's RNNs
(`flatten_parameters`), so that an optimizer step or `load_state_dict` writes to both. Once a parameter is replaced, the
buffer is no longer used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class SideBySide:
    """The buffer of some linear layers, held by the module that owns them."""

    def __init__(self) -> None:
        self.whole: Tensor | None = None
        self.parts: tuple[nn.Parameter, ...] = ()
        self.fixed = False  # a CUDA graph or compiled code may hold the addresses of the parameters

    def weight(self, layers: Sequence[nn.Module]) -> Tensor | None:
        """The weights of `layers` one above the other, [sum of their outputs, D]; None where each must be asked itself.

        The first uncompiled inference on a GPU lays them so, unless a layer is more than a plain `nn.Linear` with a
        parameter of its own (adapters, quantised weights, hooks of offloading, shards).
        """
        if torch.compiler.is_compiling():
            return self.whole if self._is_current(layers) else None
        if self.whole is not None and self._is_current(layers) and self._is_in_place():
            return self.whole
        self.forget()
        device = layers[0].weight.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.fixed = True
        if not self.fixed and device.type == "cuda" and all(is_plain(layer) and layer.bias is None for layer in layers):
            self._lay([layer.weight for layer in layers])  # type: ignore[misc]
        return self.whole

    def forget(self) -> None:
        """Use the layers' own weights, which have been replaced or moved."""
        self.whole, self.parts = None, ()

    def _is_current(self, layers: Sequence[nn.Module]) -> bool:
        parts = self.parts
        return len(parts) == len(layers) and all(
            type(layer) is nn.Linear and layer.weight is part for layer, part in zip(layers, parts, strict=True)
        )

    def _is_in_place(self) -> bool:
        assert self.whole is not None
        at = self.whole.data_ptr()
        for part in self.parts:
            if part.data_ptr() != at:
                return False
            at += part.nbytes
        return True

    def _lay(self, parts: list[nn.Parameter]) -> None:
        first = parts[0]
        if any((p.dtype, p.device, p.shape[1]) != (first.dtype, first.device, first.shape[1]) for p in parts):
            return
        if any(p.is_inference() or p.untyped_storage().nbytes() != p.nbytes for p in parts):  # a part of other buffers
            return
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.cat([p.detach() for p in parts])
            for part, rows in zip(parts, whole.split([p.shape[0] for p in parts]), strict=True):
                part.data = rows
        self.whole, self.parts = whole, tuple(parts)

    def __deepcopy__(self, memo: Any) -> SideBySide:
        return SideBySide()  # a copied parameter is its own tensor

    def __reduce__(self) -> Any:
        return SideBySide, ()


def is_plain(layer: nn.Module) -> bool:
    """Return True if the layer does no more than multiply with a weight of its own: no adapter, hook or shard."""
    weight = layer._parameters.get("weight")
    return (
        type(layer) is nn.Linear
        and not (layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "_hf_hook"))
        and type(weight) is nn.Parameter
        and weight.is_contiguous()
    )
