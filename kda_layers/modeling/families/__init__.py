"""One file per family of transformers models, named after the model_type of its models; found by listing this folder.

A file called kda_... makes KDA models of a family of softmax decoders; they have a model_type of their own. Any other
file gives a model_type of transformers layers that `swap_attention` puts in place of the stock ones. Each file defines
`FAMILY`; to add a family, add a file.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from transformers import AutoConfig

NAMES = sorted(module.name for module in pkgutil.iter_modules(__path__))
CONVERTED = [name.removeprefix("kda_") for name in NAMES if name.startswith("kda_")]
IN_PLACE = [name for name in NAMES if not name.startswith("kda_")]


def load(name: str, what: str = "FAMILY") -> Any:
    """Return the `FAMILY` of a file: a `models.variant.VariantFamily` or an `in_place.StockFamily`; or its `WEIGHTS`.

    None if this transformers has no such models, or if the file has no names of weights.
    """
    return getattr(importlib.import_module(f"{__name__}.{name}"), what, None)


def register_configs() -> None:
    """Let AutoConfig find the configurations of the kda_... files without importing these, which takes a second."""
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
