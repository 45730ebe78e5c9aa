"""Sizes of tiles. The eager backend's are small, so that there are several; Triton's interpreter takes a time for each
operation of a tile, whatever its size, so that there they are large."""

from __future__ import annotations

import pytest
import torch

from kda_layers.kernels.attention_bias.backends import eager, triton
from kda_layers.kernels.attention_bias.backends.triton import Launch, launches


@pytest.fixture(autouse=True)
def _tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "SCORES", 2**10)
    if not torch.cuda.is_available():
        names = launches(0, torch.float32, 16, False)
        monkeypatch.setattr(triton.BACKEND, "table", lambda *_: dict.fromkeys(names, Launch(64, 64, 4, 1)))
