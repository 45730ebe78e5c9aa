"""Plug-ins that put our operator under the KDA models of inference engines; each engine loads its own at its start.

Installing this package changes nothing in an engine: KDA_LAYERS_ENGINES names those that shall use it, for example
KDA_LAYERS_ENGINES=vllm,sglang.
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
