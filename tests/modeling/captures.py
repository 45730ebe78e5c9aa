"""Shared by the tests of captured decoding: CUDA graphs or their stand-in on a CPU, and a count of captures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from kda_layers.modeling.cuda_graphs import decoding, kept
from tests.kernels.cases import BF16
from tests.modeling import models
from tests.modeling.taped_graphs import TapedGraphs

# On a GPU as its kernels want it.
ON_CUDA: dict[str, Any] = dict(hidden_size=256, intermediate_size=512, head_dim=128, num_attention_heads=2)


class Captures:
    """The captures of the graphs that stand here: how many succeeded since the last look, and all attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        graphs: Any = kept.CudaGraphs
        self.made, self.tried, recapture = 0, 0, graphs.recapture

        def counted(this: Any, work: Callable[[], None]) -> Any:
            self.tried += 1
            replay = recapture(this, work)
            self.made += 1
            return replay

        monkeypatch.setattr(graphs, "recapture", counted)

    def since(self) -> int:
        made, self.made = self.made, 0
        return made


def use_graphs(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a device where `generate` captures: on a CPU, on tapes."""
    if device == "cpu":
        monkeypatch.setattr(kept, "CudaGraphs", TapedGraphs)
        monkeypatch.setattr(decoding, "DEVICES", ("cpu",))
        monkeypatch.setattr(
            GenerationMixin, "_valid_auto_compile_criteria", lambda model, kwargs, config: not config.disable_compile
        )
    yield device
    gc.collect()


def build(name: str, device: str, **fields: Any) -> PreTrainedModel:
    if device == "cpu":
        return models.build(name, **fields)
    kda = dict(linear_num_heads=2, linear_head_dim=128) if name in models.KDA_LM else {}
    return models.build(name, BF16, **ON_CUDA | kda | fields).to(device)


class Reads(nn.Module):
    """A module that reads a tensor on the host, which no graph can hold."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (2 if float(x.sum()) == torch.inf else 1)
