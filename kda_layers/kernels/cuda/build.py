"""From CUDA C++ source to a cubin, by NVRTC: no compiler on the user's machine, and neither GPU nor driver needed.

NVRTC is called through cuda-bindings, NVIDIA's own, which PyTorch's CUDA wheels bring along, like NVRTC itself.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import cache, params

FOLDER = Path(__file__).parent
OLDEST = (12, 9)  # NVRTC: the first that knows all of them
# The report of -v is for `resources`; a cubin from NVRTC's own cache, which the driver keeps, comes without one.
OPTIONS = ("--std=c++17", "--generate-line-info", "--ptxas-options=-v", "--no-cache")

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
ENTRY = re.compile(r"Compiling entry function '(\w+)'")
COUNTS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "shared_bytes": re.compile(r"(\d+) bytes smem"),
    "stack_bytes": re.compile(r"(\d+) bytes stack frame"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
}


class Cubin(NamedTuple):
    """What compiling gives."""

    code: bytes
    log: str  # the compiler's, with its warnings and each kernel's resources


class Resources(NamedTuple):
    """What one kernel takes, and the functions that it calls: registers a thread, bytes a block or thread."""

    registers: int
    shared_bytes: int  # a block, static
    stack_bytes: int  # a thread: arrays that are not in registers, and spilled registers
    spill_stores: int  # bytes a thread
    spill_loads: int


@functools.cache
def problems() -> list[str]:
    """Why nothing can be compiled here, each 'what it is, what it needs'; empty means that it can."""
    try:
        from cuda.bindings import nvrtc  # noqa: F401
    except ImportError as error:
        return [f"cuda-bindings cannot be imported ({error}), needs pip install cuda-bindings"]
    try:
        version = nvrtc_version()
    except Exception as error:  # cuda-bindings' own for a library that it does not find, and others by its version
        reason = str(error).partition("\n")[0]
        return [f"NVRTC cannot be loaded ({reason}), needs pip install nvidia-cuda-nvrtc"]
    if version < OLDEST:
        return [f"NVRTC is {dotted(version)}, needs {dotted(OLDEST)} or newer"]
    return []


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the NVRTC in use."""
    from cuda.bindings import nvrtc

    major, minor = _check(nvrtc.nvrtcVersion())
    return major, minor


def dotted(version: tuple[int, int]) -> str:
    """13.0 for (13, 0)."""
    return f"{version[0]}.{version[1]}"


def compile(source: str, defines: Mapping[str, str | int], arch: str) -> Cubin:
    """The cubin of one variant of a source, from the cache if it was compiled before.

    Args:
        source: path of the .cu file; its headers are beside it, in the folder `common` next to its own, or here
        defines: macros; a different value makes a different variant
        arch: a target of `arch.TARGETS`, as "sm_90a"

    Raises:
        RuntimeError: the compiler refuses; the message names the variant and holds its log
    """
    files = _files(source)
    macros = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    options = [f"--gpu-architecture={arch}", *OPTIONS, *macros]
    key = hashlib.sha256(repr((nvrtc_version(), options, list(files.items()))).encode()).hexdigest()
    stem = Path(source).stem

    def build() -> bytes:
        code, log = _run_nvrtc(f"{stem} [{' '.join(macros)}] for {arch}", files, options)
        return log.encode() + b"\0" + code

    log, _, code = cache.fetch(f"{stem}-{arch}-{key[:32]}", build).partition(b"\0")
    return Cubin(code, log.decode())


def resources(cubin: Cubin) -> dict[str, Resources]:
    """What each kernel of a cubin takes, by its name, as the compiler reported it.

    Raises:
        RuntimeError: the report is not in the expected form
    """
    _, *parts = ENTRY.split(cubin.log)  # name, report, name, report ...
    found = {}
    for name, report in zip(parts[::2], parts[1::2], strict=True):
        counts = {field: [int(n) for n in pattern.findall(report)] for field, pattern in COUNTS.items()}
        if len(counts["registers"]) != 1 or not counts["spill_stores"]:
            raise RuntimeError(f"expected registers and spills of {name} in ptxas' report, got: {report}")
        found[name] = Resources(**{field: sum(numbers) for field, numbers in counts.items()})
    return found


def _files(source: str) -> dict[str, str]:
    """The text of a source, first, and of every file of ours that it includes, by the names that they include."""
    path = Path(source)
    found = {path.name: path.read_text()}
    waiting = [found[path.name]]
    while waiting:
        for name in INCLUDE.findall(waiting.pop()):
            text = header(name, path)
            if name not in found and text is not None:  # what is nowhere, the compiler will name
                found[name] = text
                waiting.append(text)
    return found


def header(name: str, source: Path) -> str | None:
    """The text that `source` includes by `name`: of its own folder, of the folder `common` beside that, of this one, or
    the definition of a parameter struct; None if it is nowhere."""
    places = source.parent, source.parent.parent / "common", FOLDER
    found = next((place / name for place in places if (place / name).exists()), None)
    return params.header(name) if found is None else found.read_text()


def _run_nvrtc(variant: str, files: dict[str, str], options: list[str]) -> tuple[bytes, str]:
    """(code, log). The headers are handed over as texts, so that what was hashed is what is compiled."""
    from cuda.bindings import nvrtc

    (name, text), *headers = ((n.encode(), t.encode()) for n, t in files.items())
    texts, names = [t for _, t in headers], [n for n, _ in headers]
    program = _check(nvrtc.nvrtcCreateProgram(text, name, len(headers), texts, names))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program)))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        report = log.rstrip(b"\0 \n").decode(errors="replace")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"compiling {variant} failed: {result.name}\n{report}")
        code = bytearray(_check(nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc.nvrtcGetCUBIN(program, code))
        return bytes(code), report
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _check(answer: tuple[Any, ...]) -> Any:
    """What a function of cuda-bindings returns beside its status, which must be success."""
    status, *values = answer
    if status.value != 0:
        raise RuntimeError(f"expected success of NVRTC, got {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
