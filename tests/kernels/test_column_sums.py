"""Sums of a matrix over its rows, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kda_layers.kernels.fused.rows import SUM_ROWS as ROWS
from kda_layers.kernels.fused.rows import column_sums
from tests.kernels.cases import BF16, FP32, budget, error

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [0, 1, ROWS - 1, ROWS, 2 * ROWS + 5])
@pytest.mark.parametrize("shape", [(1,), (33,), (40, 3), (64, 4), (0,)], ids=str)
def test_sums(shape: tuple[int, ...], rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(rows, *reversed(shape), generator=generator).to(DEVICE)
    weight = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    total, truth = column_sums(parts, weight), parts.double().sum(0).T
    assert total.shape == weight.shape
    assert total.dtype == dtype
    assert torch.equal(total, column_sums(parts, weight))
    assert error(total, truth) <= budget(error(parts.sum(0).T, truth), dtype)
