"""`python -m tests.kernels.compiled_linear_step sm`: compiles linear_step's kernel for a GPU not here.

In bf16, in the forms that a decoder layer calls; prints for each one its registers, stack (what registers spill
to), shared memory, vector loads or copies, and whether it waits for the kernel before, as one line of JSON.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kda_layers.kernels.fused.linear_step import (
    OUTPUTS,
    OVERLAPS,
    TILE_ARCHS,
    TILE_COLUMNS,
    TILE_OUTPUTS,
    TILES,
    WARPS,
    columns,
)
from kda_layers.kernels.fused.triton.linear_step import row_kernel, tile_kernel
from tests.kernels.triton_usage import usage

INTEGERS = ("x_stride", "residual_stride", "rows", "N", "D")


def compiled(kernel: Any, sm: int, warps: int, constants: dict[str, Any]) -> dict[str, Any]:
    types, values, hints = {}, {}, {}
    constants["OVERLAP"] = sm >= OVERLAPS
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            types[argument], values[(i,)] = "constexpr", constants[argument]
            continue
        types[argument] = "i32" if argument in INTEGERS else "fp32" if argument == "eps" else "*bf16"
        if argument not in ("eps", "rows"):
            hints[(i,)] = [["tt.divisibility", 16]]
    done = triton.compile(
        ASTSource(kernel, types, values, hints),
        target=GPUTarget("cuda", sm, 32),
        options={"num_warps": warps, "launch_pdl": sm >= OVERLAPS},
    )
    registers, stack = usage(done)
    ptx = done.asm["ptx"]
    return {
        "kernel": kernel.__name__, "registers": registers, "stack": stack, "shared": done.metadata.shared,
        "copies": len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\S* \[.*, 0x10", ptx)),
        "waits": "griddepcontrol.wait" in ptx,
    }  # fmt: skip


def rows(D: int, norm: bool, residual: bool, swiglu: bool) -> dict[str, Any]:
    """The constants of row_kernel."""
    block = columns(D, swiglu)
    constants = {"OUTPUTS": OUTPUTS, "BLOCK": block, "STEPS": -(-D // block)}
    absent = {name: None for name, given in (("Norm", norm), ("Residual", residual)) if not given}
    return constants | absent | {"NORM": norm, "RESIDUAL": residual, "SWIGLU": swiglu}


if __name__ == "__main__":
    sm = int(sys.argv[1])
    for norm, residual, swiglu in ((True, False, False), (False, True, False), (True, False, True)):
        print(json.dumps(compiled(row_kernel, sm, WARPS, rows(2048, norm, residual, swiglu))))
    print(json.dumps(compiled(row_kernel, sm, WARPS, rows(5632, False, True, False))))
    for size, (warps, stages) in TILES.items() if sm in TILE_ARCHS else ():
        constants = {"ROWS": size, "OUTPUTS": TILE_OUTPUTS, "BLOCK": TILE_COLUMNS, "STAGES": stages}
        print(json.dumps(compiled(tile_kernel, sm, warps, constants)))
