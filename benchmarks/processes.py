"""A contender in a process of its own, for contenders that cannot share one."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 60  # for a process to end


def send(connection: Connection, value: Any) -> None:
    """Send by plain pickle: torch registers reducers for `Connection.send` that would share the memory of tensors."""
    connection.send_bytes(pickle.dumps(value))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def serve(fd: int, make: Callable[[], Any]) -> None:
    """Answer `Process.ask` with the methods of `make()` until the connection of that file descriptor is closed."""
    served: Any = None
    with Connection(fd) as connection, contextlib.suppress(EOFError):
        while True:
            method, args = receive(connection)
            try:
                if served is None:
                    served = make()
                answer = getattr(served, method)(*args)
            except Exception as problem:
                answer = RuntimeError(f"{type(problem).__name__}: {problem}")
            send(connection, answer)


class Process:
    """A Python process that serves an object."""

    def __init__(
        self,
        name: str,
        function: str,
        *args: Any,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        """Start the process.

        Args:
            name: in messages.
            function: "module:name" of a function that takes a file descriptor and `args`, and calls `serve`.
            folder: its working directory, which comes first on its path, before the working tree and what is installed.
            environment: variables in addition to this process's.
        """
        self.name = name
        self.connection, other = Pipe()
        module, _, called = function.partition(":")
        code = f"from {module} import {called}; {called}({other.fileno()}, *{args!r})"
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            pass_fds=[other.fileno()],
        )
        other.close()  # so that the end of the process is noticed

    def ask(self, method: str, *args: Any) -> Any:
        """Return what a method of the served object returns.

        Raises:
            RuntimeError: the method raised, or the process ended.
        """
        try:
            send(self.connection, (method, args))
            answer = receive(self.connection)
        except (EOFError, OSError):
            asked = " ".join(map(str, (method, *args)))
            raise RuntimeError(f"the process of {self.name} ended with {self.process.wait()}: {asked}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process, and return once it has ended."""
        self.connection.close()
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
