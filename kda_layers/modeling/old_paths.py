"""Module paths of version 0.1: the code in its checkpoints imports them, and pickles of its models name them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

VARIANTS = ("swap.families.kda_llama", "swap.families.kda_mistral", "swap.families.kda_qwen3")
# Old path -> new paths, all below this folder.
MOVED = {
    "configuration_kda": ("models.configuration_kda",),
    "configuration_variants": VARIANTS,
    "families.llama": ("swap.families.kda_llama",),
    "families.mistral": ("swap.families.kda_mistral",),
    "families.qwen3": ("swap.families.kda_qwen3",),
    **{f"families.kda_{kind}": (f"swap.families.kda_{kind}",) for kind in ("llama", "mistral", "qwen2", "qwen3")},
    "hybrid": ("models.hybrid",),
    "modeling_kda": ("models.modeling_kda",),
}


class MovedModule(ModuleType):
    """A module at its old path; imports the new one when a name of it is first used."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):  # inspect looks for __file__ and the like in every module
            package, _, old = self.__name__.partition(".modeling.")
            for new in MOVED[old]:
                module = importlib.import_module(f"{package}.modeling.{new}")
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


for old in MOVED:
    name = f"kda_layers.modeling.{old}"
    sys.modules[name] = MovedModule(name)
