"""Families of transformers models whose layers `swap_attention` changes in place: one file each, found by listing.

A file is named after the model_type of its models. It gives their layers our forward in place of the stock one, defines
`FAMILY`, and sets `__getattr__`, by which pickle finds the class of these layers. To add a family, add a file.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

IN_PLACE = sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Any:
    """Return the `FAMILY` of a file, an `in_place.StockFamily`."""
    return importlib.import_module(f"{__name__}.{name}").FAMILY
