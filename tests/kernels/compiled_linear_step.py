"""`python -m tests.kernels.compiled_linear_step sm`: compiles linear_step's kernel for a GPU not here.

In bf16, in the forms that a decoder layer calls; prints for each one its registers, stack (what registers spill to),
vector loads and waits for the kernel before, as one line of JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kda_layers.kernels.linear_step.backends.triton import OUTPUTS, OVERLAPS, WARPS, columns
from kda_layers.kernels.linear_step.triton.row import row_kernel

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INTEGERS = ("x_stride", "residual_stride", "N", "D")


def compiled(sm: int, D: int, norm: bool, residual: bool, swiglu: bool) -> dict[str, Any]:
    block, overlap = columns(D, swiglu), sm >= OVERLAPS
    constants = {
        "OUTPUTS": OUTPUTS, "BLOCK": block, "STEPS": -(-D // block), "NORM": norm, "RESIDUAL": residual,
        "SWIGLU": swiglu, "OVERLAP": overlap,
    }  # fmt: skip
    constants |= {} if norm else {"Norm": None}
    constants |= {} if residual else {"Residual": None}
    types, values, hints = {}, {}, {}
    for i, argument in enumerate(row_kernel.arg_names):
        if argument in constants:
            types[argument], values[(i,)] = "constexpr", constants[argument]
            continue
        types[argument] = "i32" if argument in INTEGERS else "fp32" if argument == "eps" else "*bf16"
        if argument != "eps":
            hints[(i,)] = [["tt.divisibility", 16]]
    done = triton.compile(
        ASTSource(row_kernel, types, values, hints),
        target=GPUTarget("cuda", sm, 32),
        options={"num_warps": WARPS, "launch_pdl": overlap},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        usage = subprocess.run([BINARIES / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    ptx = done.asm["ptx"]
    return {
        "D": D, "registers": int(registers), "stack": int(stack),
        "row loads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)), "waits": "griddepcontrol.wait" in ptx,
    }  # fmt: skip


if __name__ == "__main__":
    for form in (
        (2048, True, False, False),
        (2048, False, True, False),
        (2048, True, False, True),
        (5632, False, True, False),
    ):
        print(json.dumps(compiled(int(sys.argv[1]), *form)))
