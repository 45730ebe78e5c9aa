"""Helpers of the tests of the layer, the cache and the model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from tests.kernels.cases import FP64_LIMIT, error


def same(got: Iterable[Tensor], want: Iterable[Tensor], limit: float = FP64_LIMIT) -> None:
    """Fails unless each tensor (fp64 but for a given limit) is as close as rounding explains; NaN is never close."""
    errors = [error(g.detach(), w.detach()) for g, w in zip(got, want, strict=True)]
    assert all(e <= limit for e in errors), f"relative errors {errors}, limit {limit}"
