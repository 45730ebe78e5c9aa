"""What the examples share as commands: mistakes and full disks are one line on stderr, never a traceback."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable

from huggingface_hub.errors import StrictDataclassError
from text_data import InputError


def exit_status(name: str, example: Callable[[], int]) -> int:
    """Run an example and return its exit status: 2 for what an argument could mend, 1 for files that cannot be used.

    A character that the encoding of stdout lacks is printed as an escape; a reader of stdout that goes away ends the
    example quietly, with the status that a shell gives for SIGPIPE.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if it was closed
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = example()
        print(end="", flush=True)  # at the interpreter's end a full disk would be a traceback
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
    """First line of the message; that of the cause for a StrictDataclassError, which says nothing itself."""
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _drop_stdout() -> None:
    """If stdout does not take what is left in its buffer, send that nowhere, or the interpreter's end would raise."""
    try:
        print(end="", flush=True)
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
