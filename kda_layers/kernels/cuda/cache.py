"""A cache of compiled kernels on disk, shared by all processes of a user.

A file holds the checksum of its contents, then the contents, and gets its name when it is complete. The checksum
detects damage but authenticates nothing, so an entry is read only if no user other than this one and root can have
written it: owner and mode of folder and file are checked on the descriptors that are read from, and entries are opened
relative to the folder's descriptor, so that swapping the folder gains nothing.

Processes that miss the same entry at the same time all build it, and the last one's stays. A lock would save some
seconds once, and hangs on network file systems that implement it badly.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

SUFFIX = ".cubin"
ENVIRONMENT_VARIABLE = "KDA_LAYERS_CACHE"
DIGEST_BYTES = hashlib.sha256().digest_size

_memory: dict[str, tuple[bytes, str]] = {}  # entries that could not be written, each with the reason


def folder() -> Path:
    """Return the folder of the entries: $KDA_LAYERS_CACHE, or kda_layers in $XDG_CACHE_HOME or ~/.cache.

    Raises:
        ValueError: $KDA_LAYERS_CACHE is a relative path, whose meaning would depend on the working directory
        RuntimeError: the home directory is needed and unknown
    """
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        path = Path(named).expanduser()
        if not path.is_absolute():
            raise ValueError(f"{ENVIRONMENT_VARIABLE} must be an absolute path, got {named!r}")
        return path
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # the XDG specification ignores relative paths
    return (base if base.is_absolute() else Path.home() / ".cache") / "kda_layers"


def entries() -> list[Path]:
    """Return the files of all entries, damaged or not; none if the folder cannot be read or is not trusted."""
    try:
        with _opened_folder() as home:
            return sorted(folder() / name for name in os.listdir(home) if name.endswith(SUFFIX))
    except (OSError, RuntimeError):
        return []


def problems() -> list[str]:
    """Reasons why entries of this process are not on disk; empty if all of them are."""
    return list(dict.fromkeys(reason for _, reason in _memory.values()))


def fetch(key: str, build: Callable[[], bytes]) -> bytes:
    """Return the contents of the entry `key`: read from disk if they are complete and trusted, else built and stored.

    If the folder is not trusted or cannot be written, they stay in this process's memory, and one warning says why.

    Args:
        key: the name of the entry, a valid file name; different contents need different keys
        build: makes the contents; its exceptions propagate
    """
    if key in _memory:
        return _memory[key][0]
    contents = _read(key)
    if contents is None:
        contents = build()
        try:
            _write(key, contents)
        except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
            if not _memory:
                warnings.warn(
                    f"compiled kernels cannot be kept ({error}), so that every process compiles its own; "
                    f"{ENVIRONMENT_VARIABLE} names another folder",
                    stacklevel=2,
                )
            _memory[key] = contents, str(error)
    return contents


def _read(key: str) -> bytes | None:
    try:
        path = folder() / f"{key}{SUFFIX}"
        # O_NONBLOCK: opening a named pipe in the entry's place would wait for its writer.
        with _opened_folder() as home, _open(path.name, "rb", home, os.O_NOFOLLOW | os.O_NONBLOCK) as file:
            if reason := _distrust(os.fstat(file.fileno())):
                warnings.warn(f"{path} is compiled again, not read: it {reason}", stacklevel=3)
                return None
            data = file.read()
    except (OSError, RuntimeError):
        return None
    checksum, contents = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return contents if hashlib.sha256(contents).digest() == checksum else None


def _write(key: str, contents: bytes) -> None:
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"{key}.{secrets.token_hex(8)}"
    with _opened_folder() as home:
        try:
            with _open(name, "xb", home) as file:
                file.write(hashlib.sha256(contents).digest() + contents)
            os.replace(name, f"{key}{SUFFIX}", src_dir_fd=home, dst_dir_fd=home)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=home)
            raise


@contextmanager
def _opened_folder() -> Iterator[int]:
    """Yield a descriptor of the folder, if it is trusted; an OSError, also one of the body, names the folder."""
    home = folder()
    descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if reason := _distrust(os.fstat(descriptor)):
            raise PermissionError(reason)
        yield descriptor
    except OSError as error:  # errors of files opened relative to the descriptor do not name the folder
        raise OSError(f"{home}: {error}") from error
    finally:
        os.close(descriptor)


def _open(name: str, mode: str, home: int, more_flags: int = 0) -> IO[bytes]:
    """Open a file of the folder with the descriptor `home`; a new file gets mode 600."""
    return open(name, mode, opener=lambda path, flags: os.open(path, flags | more_flags, 0o600, dir_fd=home))


def _distrust(found: os.stat_result) -> str | None:
    """Reason why users other than this one and root may have written a file or folder; None if they cannot have."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}, neither this user ({os.geteuid()}) nor root"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by other users (mode {stat.S_IMODE(found.st_mode):o}), needs chmod go-w"
    return None
