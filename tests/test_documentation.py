"""What the front door says of behaviour, beside that behaviour."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kda_layers import KimiDeltaAttention, kda
from kda_layers.kernels import reference

ROOT = Path(__file__).parents[1]
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "quickstart.py"]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_no_promise_that_does_not_hold(path: Path) -> None:
    text = " ".join(path.read_text().split())
    assert "drop-in" not in text
    assert not re.search(r"exactly the greedy|give the greedy tokens(?!, up to ties)", text)
    assert not re.search(r"pip install '?kda_layers", text)


def test_the_layer_has_the_same_shapes_in_and_out_but_not_the_call_of_attention() -> None:
    """README sends models to `swap_attention`: transformers' slots pass positions and want a pair back."""
    layer, x = KimiDeltaAttention(32, 2, 16), torch.randn(1, 5, 32)
    assert layer(x).shape == x.shape
    with pytest.raises(TypeError, match="position_ids"):
        layer(x, position_ids=torch.arange(5)[None])


def test_what_a_bad_token_reaches_is_documented() -> None:
    """The behaviour: tests/kernels/test_not_finite.py."""
    text = " ".join(str(kda.__doc__).split())
    assert "NaN and inf" in text
    assert "chunk of 64 tokens" in text
    assert "recurrence" in text
    assert "first" in " ".join(str(reference.recurrence.__doc__).split())
