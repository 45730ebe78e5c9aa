"""Lets AutoConfig find configurations without importing them: those of transformers' families take a second."""

from __future__ import annotations

import importlib
from typing import Any

from transformers import AutoConfig

VARIANTS = {"kda_llama": "KDALlamaConfig", "kda_qwen3": "KDAQwen3Config", "kda_mistral": "KDAMistralConfig"}


def register_variants() -> None:
    """Puts a stand-in for each variant's configuration into AutoConfig's table; the class itself follows when used."""
    for model_type, name in VARIANTS.items():
        AutoConfig.register(model_type, _stand_in(name), exist_ok=True)


def _stand_in(name: str) -> type:
    def config_class() -> Any:
        return getattr(importlib.import_module("kda_layers.modeling.configuration_variants"), name)

    class StandIn:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return config_class()(*args, **kwargs)

        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            return config_class().from_dict(*args, **kwargs)

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            return config_class().from_pretrained(*args, **kwargs)

    return StandIn
