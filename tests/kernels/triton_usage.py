"""Resources that a Triton kernel takes of a multiprocessor, compiled for a GPU that is not here."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Usage(NamedTuple):
    """Registers and stack of a thread."""

    registers: int
    stack: int  # bytes, to which registers are spilled


def usage(compiled: Any) -> Usage:
    """Return the usage of a result of `triton.compile`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True).stdout
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return Usage(int(registers), int(stack))
