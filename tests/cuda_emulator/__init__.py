"""Runs the CUDA C++ kernels on the host: g++ compiles them with this folder's `ptx.cuh` in the place of their own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch

from kda_layers.kernels.cuda import build

HERE = Path(__file__).parent
MACHINE = "scheduler.hpp"  # which includes all of it
KERNELS = build.FOLDER
# Compiling takes most of a test's time: -Og compiles in two thirds of the time of -O1, and runs a quarter slower.
FLAGS = (
    *("-std=c++17", "-Og", "-march=native", "-g1", "-fPIC", "-fno-exceptions", "-U_FORTIFY_SOURCE"),
    *("-fvisibility=hidden", "-fno-gnu-unique"),  # libraries share nothing
    "-fno-strict-aliasing",  # kernels look at shared memory as several types
    # A misaligned access and an index outside an array trap.
    *("-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error"),
    "-ftrivial-auto-var-init=pattern",  # what is not initialized is a large number
)
# Loads and stores call functions of order.hpp. Local variables do not share the stack, on which registers are emulated.
ORDER_FLAGS = (
    *("-DCHECK_ORDER=1", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"),
    "-fstack-reuse=none",
)
DEBUG_FLAGS = ("-g3",)
_stacks = ctypes.create_string_buffer(24)  # struct GuardedMemory, shared by all libraries
_more_flags: ContextVar[tuple[str, ...]] = ContextVar("more_flags", default=())


class EmulatorError(RuntimeError):
    """The kernel does not compile, never ends, or does what the emulator knows to be undefined (see README.md)."""


@contextlib.contextmanager
def order_checked(active: bool = True) -> Iterator[None]:
    """Kernels compiled in this context check that a barrier or a fence orders every two accesses that need one.

    Such a kernel takes five to seven times as long. README.md says what it finds.
    """
    with _compiled_with(ORDER_FLAGS if active else ()):
        yield


@contextlib.contextmanager
def debuggable(active: bool = True) -> Iterator[None]:
    """Kernels compiled in this context can be followed in gdb, with their variables."""
    with _compiled_with(DEBUG_FLAGS if active else ()):
        yield


@contextlib.contextmanager
def _compiled_with(flags: tuple[str, ...]) -> Iterator[None]:
    token = _more_flags.set((*_more_flags.get(), *flags))
    try:
        yield
    finally:
        _more_flags.reset(token)


@functools.cache
def unavailable() -> str:
    """Why kernels cannot be emulated on this machine; empty where they can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the emulator needs Linux on x86-64, got {platform.system()} on {platform.machine()}"
    if not shutil.which("g++"):
        return "the emulator needs g++"
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True).stdout.strip()
    return "" if int(version.split(".")[0]) >= 12 else f"the emulator needs g++ 12 or newer, got {version}"


@dataclass(frozen=True)
class Kernel:
    """A kernel compiled for the host; see `compile_kernel`."""

    entry: str
    path: Path
    library: ctypes.PyDLL

    def __call__(
        self,
        *,
        grid: tuple[int, int, int],
        block: int,
        params: bytes | ctypes.Structure,
        cluster: int = 1,
        resident: int = 1,
        shared_bytes: int = 0,
        seed: int = 0,
    ) -> None:
        """Run the kernel to its end.

        Args:
            grid: blocks in x, y and z.
            block: threads in a block.
            params: the bytes of the kernel's one argument; pointers are `data_ptr()` of CPU tensors.
            cluster: blocks, adjacent in x, that share their memory.
            resident: clusters that run at a time, and may wait for one another through global memory.
            shared_bytes: dynamic shared memory of a block.
            seed: chooses the order of warps, lanes and copies.

        Raises:
            EmulatorError: if the kernel does what README.md lists under "What fails".
        """
        data = bytes(params)
        message = self.library.launch(data, len(data), *grid, block, cluster, resident, shared_bytes, seed, _stacks)
        if message is not None:
            text = re.sub(r"\[\+(0x[0-9a-f]+)\]", lambda m: self._lines(int(m[1], 16) - 1), message.decode())
            fault = self.library.fault_offset()
            trapped = f"; trapped at {self._lines(fault)}" if fault else ""
            raise EmulatorError(f"{self.entry}, seed {seed}: {text}{trapped}")

    def _lines(self, offset: int) -> str:
        """The source lines of the instruction at an offset in the library, innermost first."""
        if not shutil.which("addr2line"):
            return hex(offset)
        lines = subprocess.run(["addr2line", "-i", "-e", self.path, hex(offset)], capture_output=True, text=True).stdout
        places = (Path(line.split(" ")[0]).name for line in lines.splitlines())
        return ", from ".join(places)


def compile_kernel(source: str | Path, entry: str, defines: Mapping[str, object] | None = None) -> Kernel:
    """Compile a kernel for the host, or take it from the cache in the folder of temporary files.

    Args:
        source: a `.cu` file; relative paths start at KERNELS.
        entry: the kernel's name.
        defines: macros and their values.

    Raises:
        EmulatorError: with the compiler's messages.
    """
    source = KERNELS / source
    macros = {"KERNEL_SOURCE": f'"{source.name}"', "KERNEL_ENTRY": entry, **(defines or {})}
    files = _closure(source, "".join(f"#define {name} {value}\n" for name, value in macros.items()))
    compiler = ["g++", *FLAGS, *_more_flags.get()]
    headers = {name: text for name, text in files.items() if name.endswith(".hpp")}
    try:
        # Precompiled, as parsing the headers takes 0.8 s of each kernel.
        precompiled = _built(MACHINE, headers, [[*compiler, "-x", "c++-header", MACHINE]], f"{MACHINE}.gch")
        link = ["g++", "-shared", "launch.o", "-o", "kernel.so"]  # apart, as -fsanitize=thread links its runtime
        steps = [[*compiler, "-c", "launch.cpp"], link]
        library = _built(f"{source.stem}_{entry}", files, steps, "kernel.so", {f"{MACHINE}.gch": precompiled})
    except EmulatorError as error:
        raise EmulatorError(f"{source.name} {dict(defines or {})} does not compile:\n{error}") from None
    loaded = ctypes.PyDLL(str(library))  # keeps the GIL: the machine is global
    numbers = [ctypes.c_uint32] * 7
    loaded.launch.argtypes = [ctypes.c_char_p, ctypes.c_size_t, *numbers, ctypes.c_uint64, ctypes.c_void_p]
    loaded.launch.restype = ctypes.c_char_p
    loaded.fault_offset.restype = ctypes.c_uint64
    return Kernel(entry, library, loaded)


def _built(
    name: str, files: Mapping[str, str], steps: list[list[str]], output: str, links: Mapping[str, Path] | None = None
) -> Path:
    """Return what commands leave in a folder with these files, from the cache in the folder of temporary files."""
    key = hashlib.sha256(repr((steps, sorted(files.items()))).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"cuda_emulator_{os.getuid()}"
    built = folder / f"{name}_{key}{Path(output).suffix}"
    if not built.exists():
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as build:  # the kernels' ptx.cuh is not in it
            for file, text in files.items():
                Path(build, file).write_text(text)
            for file, target in (links or {}).items():
                Path(build, file).symlink_to(target)
            for step in steps:
                run = subprocess.run(step, cwd=build, capture_output=True, text=True)
                if run.returncode:
                    raise EmulatorError(run.stderr)
            Path(build, output).replace(built)  # at once: other processes may build it too
    return built


def _closure(source: Path, macros: str) -> dict[str, str]:
    """The texts, by name, of a kernel's source and all it includes in quotes, with this folder's `ptx.cuh`."""
    files = {"kernel.h": macros} | {path.name: path.read_text() for path in (HERE / "launch.cpp", source)}
    waiting = list(files.values())
    while waiting:
        for name in re.findall(r'^\s*#\s*include\s+"(.+)"', waiting.pop(), re.MULTILINE):
            if name not in files:
                text = (HERE / name).read_text() if (HERE / name).exists() else build.header(name, source)
                assert text is not None, f"{name}, included by {source.name} or a header of it, is nowhere"
                files[name] = text
                waiting.append(text)
    return files


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that ends (up to a multiple of 16 bytes) where memory ends: an access beyond it is an EmulatorError."""
    size = -(-tensor.nbytes // 16) * 16
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(base + room), mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect failed")
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=room - size)
    return flat.view(tensor.shape).copy_(tensor)
