"""Unpacked wheels of vLLM and SGLang, in the folders vllm and sglang of KDA_LAYERS_ENGINE_WHEELS.

`tools/engine_calls.py` says how to make them. The tests of benchmarks read those of flash-qla and nvidia-cudnn-frontend
in the folders flash_qla and cudnn.
"""

import os
from pathlib import Path

import pytest

_FOLDER = os.environ.get("KDA_LAYERS_ENGINE_WHEELS")


def wheel(package: str) -> Path:
    """The folder of a package's wheel; skips without one."""
    if _FOLDER is None or not (Path(_FOLDER) / package).is_dir():
        pytest.skip(f"needs KDA_LAYERS_ENGINE_WHEELS, a folder with an unpacked wheel in {package}")
    return Path(_FOLDER) / package
