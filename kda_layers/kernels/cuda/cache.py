"""Results of compiling, kept on disk: each is built once for a machine, whatever the number of processes.

A file holds the checksum of its contents, then the contents, and appears under its name only when it is whole.
Processes that miss the same entry at once all build it, and the last one's stays: a lock would save their processors
some seconds, once, and hang where a network's file system implements it badly.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

SUFFIX = ".cubin"
ENVIRONMENT_VARIABLE = "KDA_LAYERS_CACHE"
DIGEST_BYTES = hashlib.sha256().digest_size

_memory: dict[str, bytes] = {}  # what could not be written


def folder() -> Path:
    """Where the entries are: $KDA_LAYERS_CACHE, or kda_layers in $XDG_CACHE_HOME or ~/.cache."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kda_layers"


def entries() -> list[Path]:
    """The files of all entries, whole or not; none where the folder cannot be read."""
    try:
        return sorted(folder().glob(f"*{SUFFIX}"))
    except (OSError, RuntimeError):
        return []


def fetch(key: str, build: Callable[[], bytes]) -> bytes:
    """The contents of the entry `key`, from disk if it is there whole, else built and stored.

    Where the folder cannot be written, they stay in this process' memory, and a warning names it once.

    Args:
        key: the name of the entry, fit for a file name; other contents must have another key
        build: makes the contents; what it raises is passed on
    """
    contents = _memory.get(key) or _read(key)
    if contents is None:
        contents = build()
        try:
            _write(key, contents)
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
            if not _memory:
                warnings.warn(
                    f"compiled kernels cannot be kept ({error}), so that every process compiles its own; "
                    f"{ENVIRONMENT_VARIABLE} names another folder",
                    stacklevel=2,
                )
            _memory[key] = contents
    return contents


def _read(key: str) -> bytes | None:
    try:
        data = (folder() / f"{key}{SUFFIX}").read_bytes()
    except (OSError, RuntimeError):
        return None
    checksum, contents = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return contents if hashlib.sha256(contents).digest() == checksum else None


def _write(key: str, contents: bytes) -> None:
    home = folder()
    home.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=home, prefix=f"{key}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(contents).digest() + contents)
        os.replace(name, home / f"{key}{SUFFIX}")
    except BaseException:
        os.unlink(name)
        raise
