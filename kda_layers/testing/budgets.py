"""Error budgets: the allowed distance of a result from the truth."""

from __future__ import annotations

import torch
from torch import Tensor

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROUNDOFF = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}
FP64_LIMIT = 1e-12  # no wider dtype is at hand to measure the fp64 oracle itself


def error(got: Tensor, truth: Tensor) -> float:
    """Relative L2 error; absolute where the truth is zero; NaN anywhere gives NaN, which no limit admits."""
    assert got.shape == truth.shape, f"shape {list(got.shape)}, expected {list(truth.shape)}"
    truth = truth.cpu().double()
    return float((got.cpu().double() - truth).norm() / (truth.norm() or 1.0))


def budget(yardstick_error: float, dtype: torch.dtype) -> float:
    """The error that a backend may have: twice what the recurrence in the working dtype has plus one rounding."""
    return FP64_LIMIT if dtype == FP64 else 2 * (yardstick_error + ROUNDOFF[dtype])


def check(got: dict[str, Tensor], truth: dict[str, Tensor], limits: dict[str, float]) -> None:
    """Fails with every tensor that is further from the truth than its limit."""
    assert got.keys() == truth.keys()
    errors = {n: error(got[n], truth[n]) for n in got}
    wrong = [f"{n}: error {e:.3g}, limit {limits[n]:.3g}" for n, e in errors.items() if not e <= limits[n]]
    assert not wrong, "; ".join(wrong)


def limits_of(yardstick: dict[str, Tensor], truth: dict[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    return {n: budget(error(yardstick[n], t), dtype) for n, t in truth.items()}
