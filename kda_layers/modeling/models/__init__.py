"""Language models with KDA layers.

`configuration_variants` is imported when one of its configurations is first used, as that takes a second. Until then,
AutoConfig has stand-ins for them.
"""

import importlib
from typing import Any

from transformers import AutoConfig

# Softmax decoders that have a configuration with KDA layers: model_type -> name in `configuration_variants`.
VARIANTS = {
    "llama": "KDALlamaConfig",
    "mistral": "KDAMistralConfig",
    "qwen2": "KDAQwen2Config",
    "qwen3": "KDAQwen3Config",
}


def variant_config(kind: str) -> Any:
    """Return the configuration with KDA layers of a model_type in `VARIANTS`."""
    return getattr(importlib.import_module(f"{__name__}.configuration_variants"), VARIANTS[kind])


def _stand_in(kind: str) -> type:
    class StandIn:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return variant_config(kind)(*args, **kwargs)

        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            return variant_config(kind).from_dict(*args, **kwargs)

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            return variant_config(kind).from_pretrained(*args, **kwargs)

    return StandIn


for _kind in VARIANTS:
    AutoConfig.register(f"kda_{_kind}", _stand_in(_kind), exist_ok=True)
