"""Run functions of an unpacked wheel of vLLM or SGLang on the CPU, by Triton's interpreter.

    python -m tests.stock_engines FOLDER CALLS RESULTS

CALLS is a list of (function, keyword arguments) as torch saves it; RESULTS gets for each what was returned and the
arguments, which may have been written. Only the modules with the Triton functions are the wheel's; of what they import
around them (devices, logging, configuration) there are stand-ins.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

if __name__ == "__main__":
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
import triton
import triton.language as tl

VLLM_OPS = "vllm.third_party.flash_linear_attention.ops"
SGLANG_OPS = "sglang.kernels.ops.attention"
REAL = (
    "vllm.utils.math_utils",
    "vllm.models.kimi_k3.nvidia.ops.third_party.kda",
    "vllm.models.glm5next.nvidia.ops.third_party.kda",
    *(f"{VLLM_OPS}.{name}" for name in ("kda", "index", "op", "utils", "l2norm", "cumsum", "chunk_delta_h")),
    *(f"{VLLM_OPS}.{name}" for name in ("solve_tril", "fused_recurrent", "fused_norm_gate")),
    f"{SGLANG_OPS}.fla",
    f"{SGLANG_OPS}.linear.fused_sigmoid_gating_recurrent",
    "sglang.srt.layers.attention.linear.kernels.kda_triton",
    "sglang.srt.layers.attention.linear.kernels.kernel_backend",
)


class Nothing:
    """A platform that has none of what is asked for."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: False


class CustomOp(torch.nn.Module):
    @classmethod
    def register(cls, *_: Any, **__: Any) -> Any:
        return lambda decorated: decorated


@contextlib.contextmanager
def nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def anything(name: str) -> Any:
    """An attribute of a stand-in: a question is answered by False."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing().any if name.startswith(("is_", "get_", "covered")) else MagicMock()


STAND_INS: dict[str, dict[str, Any]] = {
    "vllm.triton_utils": {"tl": tl, "triton": triton, "tldevice": None},
    "vllm.platforms": {"current_platform": Nothing()},
    "vllm.model_executor.custom_op": {"CustomOp": CustomOp},
    "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": nothing},
    "vllm.utils.torch_utils": {"async_tensor_h2d": lambda x, dtype, device, **_: torch.as_tensor(x, dtype=dtype)},
    "sglang.srt.utils.common": {"torch_release": tuple(int(n) for n in torch.__version__.split(".")[:2])},
}


class Wheel(MetaPathFinder, Loader):
    """Imports REAL from a folder, and stand-ins for the rest of its packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        parts = name.split(".")
        if parts[0] not in ("vllm", "sglang"):
            return None
        if any(name == real or name.startswith(f"{real}.") for real in REAL):
            return PathFinder.find_spec(name, [str(self.folder.joinpath(*parts[:-1]))])
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(STAND_INS.get(module.__name__, {}))
        if not any(real.startswith(f"{module.__name__}.") for real in REAL):
            module.__getattr__ = anything  # type: ignore[method-assign]


# The interpreter replaces triton.language's functions while a kernel runs, but not their aliases.
@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def exp2(x):
    return tl.exp2(x)


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def log2(x):
    return tl.log2(x)


@triton.jit
def gather(x, index, axis):
    return tl.gather(x, index, axis)


def tensors(*bounds: Any) -> Iterator[Any]:
    """`range` of Triton's tensors, as compiled kernels have it; the interpreter's is of integers."""
    for i in builtins.range(*(int(b.handle.data.item()) if hasattr(b, "handle") else int(b) for b in bounds)):
        yield tl.full((), i, tl.int32)


def first_configuration(self: Any, *args: Any, **options: Any) -> Any:
    """Instead of tuning."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    return self.fn.run(*args, **(options | self.configs[0].all_kwargs()))


def prepare(folder: Path) -> None:
    sys.meta_path.insert(0, Wheel(folder))
    triton.runtime.autotuner.Autotuner.run = first_configuration
    ops = VLLM_OPS if (folder / "vllm").is_dir() else f"{SGLANG_OPS}.fla"
    op = importlib.import_module(f"{ops}.op")
    for function in (exp, exp2, log, log2, gather):
        setattr(op, function.__name__, function)
    importlib.import_module(f"{ops}.chunk_delta_h").range = tensors  # type: ignore[attr-defined]


def function(name: str) -> Any:
    """A function by its full name, or a method of SGLang's kernel class by its own."""
    module, _, name = name.rpartition(".")
    if module == "TritonKDAKernel":
        found = importlib.import_module("sglang.srt.layers.attention.linear.kernels.kda_triton")
        return getattr(found.TritonKDAKernel(), name)
    return getattr(importlib.import_module(module), name)


def main(folder: str, calls: str, results: str) -> None:
    prepare(Path(folder))
    done = []
    for name, arguments in torch.load(calls, weights_only=True):
        returned = function(name)(**arguments)
        done.append((returned, arguments))
    torch.save(done, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
