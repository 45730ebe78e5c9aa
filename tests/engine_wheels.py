"""Unpacked wheels of vLLM and SGLang, in the folders vllm and sglang of KDA_LAYERS_ENGINE_WHEELS.

`tools/engine_calls.py` says how to make them.
"""

import os
from pathlib import Path

import pytest

_FOLDER = os.environ.get("KDA_LAYERS_ENGINE_WHEELS")


def wheel(engine: str) -> Path:
    """The folder of an engine's wheel; skips without one."""
    if _FOLDER is None:
        pytest.skip("needs KDA_LAYERS_ENGINE_WHEELS, a folder with unpacked wheels of vLLM and SGLang")
    return Path(_FOLDER) / engine
