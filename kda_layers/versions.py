"""The versions of torch and transformers that the tests have passed with, and what happens with others.

`tested_versions.json` is written by the tests: `pytest tests/modeling --record-versions`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import warnings
from pathlib import Path

OLDEST_TRANSFORMERS = (5, 17)
FILE = Path(__file__).with_name("tested_versions.json")


@functools.cache
def tested(package: str) -> tuple[str, ...]:
    """Return the versions of "torch" or "transformers" that the tests have passed with, in order."""
    return tuple(sorted(json.loads(FILE.read_text(encoding="utf-8"))[package], key=release))


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (5, 24, 0) for "5.24.0", (2, 13, 0) for "2.13.0+cpu", (6, 0) for "6.0rc1"."""
    return tuple(int(n) for n in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))  # type: ignore[index]


@functools.cache
def installed(package: str) -> tuple[int, ...]:
    """Return the numbers of the installed version; () if there is none."""
    try:
        return release(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return ()


def has_transformers() -> bool:
    """Return True if the installed transformers is new enough for models."""
    return installed("transformers") >= OLDEST_TRANSFORMERS


def require_transformers(what: str) -> None:
    """Raise an ImportError that names `what` if there is no transformers that is new enough for models."""
    if not has_transformers():
        least = ".".join(map(str, OLDEST_TRANSFORMERS))
        got = ".".join(map(str, installed("transformers"))) or "none"
        raise ImportError(
            f"{what} of kda_layers needs transformers {least} or newer, got {got}: pip install "
            f"'transformers>={least}'. The operators, KimiDeltaAttention and kernels.fla_api work without"
        )


def warn_if_untested() -> None:
    """Warn if torch or transformers is newer than what the tests have passed with; a patch release is not newer."""
    for package in ("torch", "transformers"):
        newest = tested(package)[-1]
        if installed(package)[:2] > release(newest)[:2]:
            warnings.warn(
                f"kda_layers was tested with {package} {tested(package)[0]} to {newest}, got "
                f"{importlib.metadata.version(package)}: most of it should work; a part of {package} that it needs and "
                "does not find raises an error that names the part",
                stacklevel=3,
            )
