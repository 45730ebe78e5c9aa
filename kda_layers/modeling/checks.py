"""Checks of arguments that layers, configurations and `swap_attention` share."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any


def as_int(name: str, value: Any) -> int:
    """The value as an int; raises a TypeError for all but integers of Python or NumPy."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, got {value!r}")


def layer_indices(layers: Any, total: int, forms: str) -> list[int]:
    """Indices of layers, in [0, total) and in the given order.

    Args:
        layers: integers in [-total, total), the negative ones from the end.
        forms: what `layers` may be, as the error says it.

    Raises:
        TypeError: no iterable; what is no integer.
        ValueError: no index, one out of range, or two of the same layer.
    """
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise (ValueError if isinstance(layers, str) else TypeError)(f"layers must be {forms}, got {layers!r}")
    given = [as_int("every index in layers", i) for i in layers]
    if not given:
        raise ValueError("layers must hold at least one index, got none")
    if missing := [i for i in given if not -total <= i < total]:
        raise ValueError(f"layers must be in [{-total}, {total}) for a model of {total} layers, got {missing}")
    if len({i % total for i in given}) < len(given):
        raise ValueError(f"layers must name each layer once, got {given} for a model of {total} layers")
    return [i % total for i in given]


def check_epsilon(name: str, value: Any) -> None:
    """Raises a TypeError or ValueError unless the value is a finite number of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be finite and 0 or more, got {value}")


def unwrapped_hint(module: Any) -> str:
    """The end of an error: the way to the module inside a wrapper of torch.compile, PEFT or data parallelism."""
    for attribute, way in (("_orig_mod", "._orig_mod"), ("get_base_model", ".get_base_model()"), ("module", ".module")):
        if hasattr(module, attribute):
            return f": pass the module that it wraps, {way}"
    return ""
