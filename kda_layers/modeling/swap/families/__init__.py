"""One file per family of transformers models, named after the model_type of its models; found by listing this folder.

A file named kda_<model_type> defines the KDA models that softmax decoders of a model_type are converted to. Any other
file gives the layers of its model_type our forward in place of the stock one, and sets `__getattr__`, by which pickle
finds the class of these layers. Each file defines `FAMILY`; to add a family, add a file.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from transformers import AutoConfig

NAMES = sorted(module.name for module in pkgutil.iter_modules(__path__))
CONVERTED = [name.removeprefix("kda_") for name in NAMES if name.startswith("kda_")]
IN_PLACE = [name for name in NAMES if not name.startswith("kda_")]


def load(name: str) -> Any:
    """Return the `FAMILY` of a file: a `models.variant.VariantFamily` or an `in_place.StockFamily`."""
    return importlib.import_module(f"{__name__}.{name}").FAMILY


def register_configs() -> None:
    """Register the kda_... configurations with AutoConfig, without importing the files, which takes a second."""
    for kind in CONVERTED:
        AutoConfig.register(f"kda_{kind}", _stand_in(f"kda_{kind}"), exist_ok=True)


def _stand_in(name: str) -> type:
    class StandIn:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return load(name).config(*args, **kwargs)

        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            return load(name).config.from_dict(*args, **kwargs)

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            return load(name).config.from_pretrained(*args, **kwargs)

    return StandIn
