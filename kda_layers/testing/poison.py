"""Fresh memory that holds NaN: what is read before it is written shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils import deterministic


@contextlib.contextmanager
def poisoned_memory(active: bool = True) -> Iterator[None]:
    """torch.empty and its kin return NaN (integers: the largest), so that reading what nobody wrote shows."""
    if not active:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
