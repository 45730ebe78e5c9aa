"""Unpacked wheels of vLLM and SGLang, in the folders vllm and sglang of KDA_LAYERS_ENGINE_WHEELS.

`tools/engine_calls.py` says how to make them. The tests of benchmarks read those of flash-qla and nvidia-cudnn-frontend
in the folders flash_qla and cudnn.
"""

import os
from pathlib import Path

import pytest

_FOLDER = os.environ.get("KDA_LAYERS_ENGINE_WHEELS")


def wheel(package: str) -> Path:
    """The folder of a package's wheel; skips where no wheels are given, and fails where only this one is missing."""
    needed = f"KDA_LAYERS_ENGINE_WHEELS must be a folder with an unpacked wheel in {package}"
    if _FOLDER is None:
        pytest.skip(needed)
    folder = Path(_FOLDER) / package
    assert folder.is_dir(), f"{needed}, got {_FOLDER!r} without it"
    return folder
