"""`python -m tests.kernels.compiled_rows sm`: compiles the kernels that normalise rows, and SwiGLU's, for any GPU.

In bf16; prints for each one its width, registers, stack (what registers spill to) and its vector accesses of 16 bytes,
as one line of JSON.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kda_layers.kernels.fused import rows as launches
from kda_layers.kernels.fused.add_rms_norm import PER_THREAD as OF_ADD_RMS_NORM
from kda_layers.kernels.fused.gated_norm import PER_THREAD as OF_GATED_NORM
from kda_layers.kernels.fused.rows import RowTiles
from kda_layers.kernels.fused.swiglu import BLOCK, WARPS
from kda_layers.kernels.fused.triton import rows, swiglu
from tests.kernels.triton_usage import usage

SIZES = ("rows", "D", "W", "blocks", "heads")
CASES = [
    *[(rows, f"norm_{n}", D) for D in (1024, 2048, 4096, 8192) for n in ("forward_kernel", "backward_kernel")],
    *[(rows, f"gated_norm_{n}", D) for D in (64, 128, 256) for n in ("forward_kernel", "backward_kernel")],
    (rows, "column_sums_kernel", 2048),
    *[(swiglu, f"swiglu_{n}", 5632) for n in ("forward_kernel", "backward_kernel")],
]


def compiled(module: Any, name: str, D: int, sm: int) -> dict[str, Any]:
    kernel = getattr(module, name)
    tiles = RowTiles(8192, D, OF_GATED_NORM if "gated_norm" in name else OF_ADD_RMS_NORM)
    constants = {
        "ADD": True,
        "OUTPUT": True,
        "SILU": True,
        "ROWS": tiles.rows_per_tile,
        "BLOCK": tiles.block,
        "STAGES": tiles.stages(2),
    }
    warps = tiles.warps
    if "swiglu" in name:
        constants["BLOCK"], warps = BLOCK, WARPS
    if "sums" in name:
        constants["ROWS"], constants["COLUMNS"] = launches.SUM_ROWS, launches.SUM_COLUMNS
        warps = launches.SUM_WARPS
    types, values, hints = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            types[argument], values[(i,)] = "constexpr", constants[argument]
        elif argument == "eps":
            types[argument] = "fp32"
        else:
            integer = argument in SIZES or argument.endswith("_stride")
            types[argument] = "i32" if integer else {"Partial": "*fp32"}.get(argument, "*bf16")
            if argument != "blocks" and argument not in kernel.do_not_specialize:
                hints[(i,)] = [["tt.divisibility", 16]]
    done = triton.compile(
        ASTSource(kernel, types, values, hints), target=GPUTarget("cuda", sm, 32), options={"num_warps": warps}
    )
    registers, stack = usage(done)
    ptx = done.asm["ptx"]
    accesses = {
        "loads": len(re.findall(r"ld\.global", ptx)),
        "16-byte loads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        "copies": len(re.findall(r"cp\.async\.c[ag]", ptx)),
        "16-byte copies": len(re.findall(r"cp\.async\.cg\S* \[.*, 0x10", ptx)),
        "stores": len(re.findall(r"st\.global", ptx)),
        "16-byte stores": len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
    }
    launch = {"D": D, "warps": warps, "registers": registers, "stack": stack, "shared": done.metadata.shared}
    return {"kernel": name} | launch | accesses


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(compiled(*case, int(sys.argv[1]))))
