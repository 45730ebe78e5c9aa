"""Command lines of the examples: options, checks, and errors in one line on stderr instead of a traceback."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError


class InputError(ValueError):
    """An argument or a file that cannot be used; the message explains it completely."""


def exit_status(name: str, example: Callable[[], int]) -> int:
    """Run an example and return its exit status: 2 for an InputError, 1 for any other OSError, such as a full disk.

    Characters that the encoding of stdout lacks are printed as escapes. If the reader of stdout goes away, the example
    ends quietly with the status that a shell gives for SIGPIPE.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if it was closed
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = example()
        print(end="", flush=True)  # a full disk would otherwise be a traceback at interpreter exit
        return status
    except InputError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        _drop_stdout()
        print(f"{name}: error: {error}", file=sys.stderr)
        return 1


def first_line(error: BaseException) -> str:
    """First line of the error's message, or of its cause's for a StrictDataclassError, which has no reason itself."""
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def option(default: Any, help: str, **more: Any) -> Any:
    """Dataclass field that `add_options` turns into a command line option."""
    return field(default=default, metadata={"help": help, **more})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_options(parser: Any, settings: Any, presets: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Add an option for each field of a settings dataclass; `given` returns those that were used.

    The help shows the default of each field, or what each of the presets makes it.
    """
    for f in fields(settings):
        values = {name: preset.get(f.name, f.default) for name, preset in (presets or {"": {}}).items()}
        names = {name: str(value).rpartition("/")[2] for name, value in values.items()}  # of a file: without its folder
        same = len(set(names.values())) == 1
        default = names.popitem()[1] if same else ", ".join(f"{name}: {value}" for name, value in names.items())
        help = f"{f.metadata['help']} ({default})"
        parser.add_argument(flag(f.name), type=type(f.default), **dict(f.metadata) | {"help": help})


def given(args: argparse.Namespace, settings: Any) -> dict[str, Any]:
    """Fields of a settings dataclass that were set on the command line, with their values."""
    return {f.name: value for f in fields(settings) if (value := getattr(args, f.name)) is not None}


def add_data_option(parser: argparse.ArgumentParser, default: str = "Python's reference documentation") -> None:
    parser.add_argument("--data", metavar="FILE", help=f"text to train on ({default})")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")


def integers(text: str, name: str) -> list[int]:
    """Parse integers separated by commas. Raise an InputError that names the option if there is anything else."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"{flag(name)} {text}: expected integers, separated by commas") from error


def check_range(name: str, value: float, least: float) -> None:
    """Raise an InputError that names the option unless least <= value < 2^32, which NaN and infinity are not."""
    if not least <= value < 2**32:
        raise InputError(f"{flag(name)} {value}: expected at least {least} and less than 2^32")


def check_ranges(values: Mapping[str, float], least: Mapping[str, float], otherwise: float = 1) -> None:
    """Apply `check_range` to each value; the bound of a name that `least` lacks is `otherwise`."""
    for name, value in values.items():
        check_range(name, value, least.get(name, otherwise))


def as_device(name: str) -> torch.device:
    """Return the device of that name. Raise an InputError unless a number can be written to it and read back."""
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except Exception as error:  # torch raises many kinds
        raise InputError(f"--device {name}: expected a device that works here, got: {first_line(error)}") from error
    return device


def check_writable(directory: Path, option: str = "--output") -> None:
    """Make `directory` if it is missing. Raise an InputError unless files can be written to it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:  # permissions are not enough: file systems refuse too
            file.write(b"\0")
    except OSError as error:
        raise InputError(f"{option} {directory}: expected a directory to write to, got: {error.strerror}") from error


def _drop_stdout() -> None:
    """Redirect stdout to /dev/null if it refuses what is left in its buffer: flushing at exit would raise again."""
    try:
        print(end="", flush=True)
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
