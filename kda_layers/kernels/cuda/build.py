"""Compile CUDA C++ to cubins with NVRTC: needs no compiler on the user's machine, no GPU and no driver.

PyTorch's CUDA wheels install NVRTC and NVIDIA's cuda-bindings, through which it is called.
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import cache, params

FOLDER = Path(__file__).parent
OLDEST = (12, 9)  # the first NVRTC that knows every arch
# -v reports what `resources` reads; a cubin from NVRTC's own cache, which the driver keeps, comes without the report.
OPTIONS = ("--std=c++17", "--generate-line-info", "--ptxas-options=-v", "--no-cache")
LDGSTS_TO_SUM = 0xDAE  # opcode; see check_encoding

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
    """Result of a compilation."""

    code: bytes
    log: str  # warnings and the resources of each kernel


class Resources(NamedTuple):
    """Resources of one kernel and the functions that it calls."""

    registers: int  # per thread
    shared_bytes: int  # static, per block
    stack_bytes: int  # per thread: arrays that are not in registers, and spilled registers
    spill_stores: int  # bytes per thread
    spill_loads: int  # bytes per thread


@functools.cache
def problems() -> list[str]:
    """Reasons why nothing can be compiled here, each 'what it is, what it needs'; empty if it can."""
    try:
        version = nvrtc_version()
    except ImportError as error:
        return [f"cuda-bindings cannot be imported ({error}), needs pip install cuda-bindings"]
    except Exception as error:  # for a missing library, cuda-bindings raises its own types, which depend on its version
        reason = str(error).partition("\n")[0]
        return [f"NVRTC cannot be loaded ({reason}), needs pip install nvidia-cuda-nvrtc"]
    if version < OLDEST:
        return [f"NVRTC is {dotted(version)}, needs {dotted(OLDEST)} or newer"]
    return []


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the NVRTC in use."""
    major, minor = call("nvrtcVersion")
    return major, minor


def dotted(version: tuple[int, int]) -> str:
    """Return "13.0" for (13, 0)."""
    return f"{version[0]}.{version[1]}"


def compile(source: str, defines: Mapping[str, str | int], arch: str) -> Cubin:
    """Return the cubin of one variant of a source, from the cache if it has been compiled before.

    Args:
        source: path of the .cu file; `header` says where its headers are
        defines: macros; a different value makes a different variant
        arch: one of `arch.TARGETS`, such as "sm_90a"

    Raises:
        RuntimeError: the compiler refuses; the message names the variant and contains its log
    """
    files = _files(source)
    macros = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    options = [f"--gpu-architecture={arch}", *OPTIONS, *macros]
    key = hashlib.sha256(repr((nvrtc_version(), options, list(files.items()))).encode()).hexdigest()
    stem = Path(source).stem

    def build() -> bytes:
        variant = f"{stem} [{' '.join(macros)}] for {arch}"
        code, log = _run_nvrtc(variant, files, options)
        check_encoding(code, arch, variant)
        return log.encode() + b"\0" + code

    log, _, code = cache.fetch(f"{stem}-{arch}-{key[:32]}", build).partition(b"\0")
    return Cubin(code, log.decode())


def resources(cubin: Cubin) -> dict[str, Resources]:
    """Return the resources of each kernel of a cubin by its name, as the compiler reported them."""
    _, *parts = ENTRY.split(cubin.log)  # name, report, name, report ...
    found = {}
    for name, report in zip(parts[::2], parts[1::2], strict=True):
        counts = {field: [int(n) for n in pattern.findall(report)] for field, pattern in COUNTS.items()}
        if len(counts["registers"]) != 1 or not counts["spill_stores"]:
            raise RuntimeError(f"expected registers and spills of {name} in ptxas' report, got: {report}")
        found[name] = Resources(**{field: sum(numbers) for field, numbers in counts.items()})
    return found


def check_encoding(code: bytes, arch: str, variant: str) -> None:
    """Refuse a cubin with a cp.async to the sum of a register and a uniform register, which ptxas 13.0 cannot encode.

    On sm_90 the uniform register and the one of the global address share a field. A GPU meets an illegal instruction.

    Raises:
        RuntimeError: the cubin has one; the message names the variant and the compiler
    """
    if arch == "sm_90a" and any(low & 0xFFF == LDGSTS_TO_SUM for low, _ in _instructions(code)):
        raise RuntimeError(
            f"NVRTC {dotted(nvrtc_version())} encoded a cp.async of {variant} wrongly, expected none whose address is "
            "the sum of a register and a uniform register; install another nvidia-cuda-nvrtc, or choose another backend"
        )


def _instructions(code: bytes) -> Iterator[tuple[int, int]]:
    """The words of each instruction of a cubin, an ELF file."""
    (sections,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<3H", code, 0x3A)
    headers = [struct.unpack_from("<II4Q", code, sections + i * size) for i in range(count)]
    for name, _, _, _, at, length in headers:
        if code.startswith(b".text.", headers[names][4] + name):
            yield from struct.iter_unpack("<QQ", code[at : at + length])


def _files(source: str) -> dict[str, str]:
    """Texts of a source, which comes first, and of all the headers that it includes, by the names in their #include."""
    path = Path(source)
    found = {path.name: path.read_text()}
    waiting = [found[path.name]]
    while waiting:
        for name in INCLUDE.findall(waiting.pop()):
            text = header(name, path)
            if name not in found and text is not None:  # the compiler names headers that do not exist
                found[name] = text
                waiting.append(text)
    return found


def header(name: str, source: Path) -> str | None:
    """Return the text of the header `name` of `source`, or None if there is none.

    It is in the folder of the source, the folder `common` beside that, or this folder, or defines a parameter struct.
    """
    places = source.parent, source.parent.parent / "common", FOLDER
    found = next((place / name for place in places if (place / name).exists()), None)
    return params.header(name) if found is None else found.read_text()


def _run_nvrtc(variant: str, files: dict[str, str], options: list[str]) -> tuple[bytes, str]:
    """Return (code, log). NVRTC gets the headers as texts, so that it compiles exactly what was hashed."""
    from cuda.bindings import nvrtc

    (name, *names), (text, *texts) = ([s.encode() for s in strings] for strings in (files, files.values()))
    program = call("nvrtcCreateProgram", text, name, len(names), texts, names)
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = bytearray(call("nvrtcGetProgramLogSize", program))
        call("nvrtcGetProgramLog", program, log)
        report = log.rstrip(b"\0 \n").decode(errors="replace")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"compiling {variant} failed: {result.name}\n{report}")
        code = bytearray(call("nvrtcGetCUBINSize", program))
        call("nvrtcGetCUBIN", program, code)
        return bytes(code), report
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def call(function: str, *args: Any, subject: str = "") -> Any:
    """Call a function of NVRTC or the driver and return its values; for an error status, raise a RuntimeError."""
    from cuda.bindings import driver, nvrtc

    status, *values = getattr(nvrtc if function.startswith("nvrtc") else driver, function)(*args)
    if status.value != 0:
        raise RuntimeError(f"{function}({subject}) failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
