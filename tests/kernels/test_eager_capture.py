"""Plain PyTorch can be captured in a CUDA graph where no sequences are packed and no chunk is ragged.

A capture allows neither copies from the host nor reads by it. On a CPU tensors of the device "meta" show both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kda_layers.kernels.kda.contract import KDA
from tests.kernels.cases import Case, make_inputs


class Transfers(TorchDispatchMode):
    """Collects operators between a tensor of the host and one of the device, and reads of the device's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor) and t.ndim]
        reads = function is torch.ops.aten._local_scalar_dense.default and args[0].device.type != "cpu"
        if len({t.device.type for t in tensors}) > 1 or reads:
            self.found.append(str(function))
        return result


def test_nothing_passes_between_host_and_device() -> None:
    x = make_inputs(Case(B=2, T=256, H=2, K=8, V=8, dtype=torch.float32))  # with states and checkpoints
    on_device = type(x)(*(t.to("meta") if isinstance(t, Tensor) else t for t in x))
    eager = KDA.backends()["eager"]
    with Transfers() as transfers:
        out, saved = eager.forward(on_device, True)
        eager.backward(on_device, saved, torch.empty_like(out.o), None, None)
    assert transfers.found == []


def test_a_copy_from_the_host_is_noticed() -> None:
    with Transfers() as transfers:
        torch.arange(3).to("meta")
    assert transfers.found == ["aten._to_copy.default"]
