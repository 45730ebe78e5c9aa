"""Plug-ins for inference engines, which load them at startup and then run their KDA models on our operator.

They are off by default. To turn them on, list engines in the environment: KDA_LAYERS_ENGINES=vllm,sglang.
"""

from __future__ import annotations

import os

ENVIRONMENT_VARIABLE = "KDA_LAYERS_ENGINES"
ENGINES = ("sglang", "vllm")


def wanted(engine: str) -> bool:
    """True if the environment asks for our operator in `engine`.

    Raises:
        ValueError: the variable names something else than an engine.
    """
    names = [name.strip() for name in os.environ.get(ENVIRONMENT_VARIABLE, "").split(",") if name.strip()]
    unknown = sorted(set(names) - set(ENGINES))
    if unknown:
        raise ValueError(f"{ENVIRONMENT_VARIABLE} must name engines of {', '.join(ENGINES)}, got {', '.join(unknown)}")
    return engine in names
