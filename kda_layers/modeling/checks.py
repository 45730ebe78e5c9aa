"""Checks of arguments that layers, configurations and `swap_attention` share."""

from __future__ import annotations

import math
import operator
from typing import Any


def as_int(name: str, value: Any) -> int:
    """The value as an int; raises a TypeError for all but integers of Python or NumPy."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, got {value!r}")


def check_epsilon(name: str, value: Any) -> None:
    """Raises a TypeError or ValueError unless the value is a finite number of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and 0 or more, got {value}")
