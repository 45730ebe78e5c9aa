"""`python -m tests.kernels.compiled_short_conv sm`: compiles the short convolution's kernels for a GPU not here.

In bf16, with 4 taps, as the layer calls them with wide heads; prints for each one its registers, shared memory, stack
(what registers spill to) and its vector loads of rows, as one line of JSON.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kda_layers.kernels.fused.triton.short_conv import (
    FORWARD_LIMIT,
    FORWARD_STRIPS,
    MOST_CHANNELS,
    WARP_CHANNELS,
    conv_backward_kernel,
    conv_forward_kernel,
)
from tests.kernels.triton_usage import usage

INTEGERS = {"D0", "D1", "D2", "T", "N", "strips"}


ONES = {"D0", "D1", "x1_stride", "dy1_stride", "n_stride", "w_stride", "d_stride"}


def compiled(kernel: Any, sm: int, packed: bool, ones: bool = False) -> dict[str, Any]:
    """Compile a kernel; with `ones`, arguments that may be 1 are, which Triton takes for constants."""
    constants = {
        "W": 4,
        "PACKED": packed,
        "STATE": 4 * packed,
        "COLUMNS": 4,
        "STRIP": FORWARD_STRIPS[0],
        "BLOCK_D": MOST_CHANNELS,
    }
    types, values, hints = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            types[argument], values[(i,)] = "constexpr", constants[argument]
            continue
        if ones and argument in ONES:
            types[argument], values[(i,)] = "constexpr", 1
            continue
        integer = argument in INTEGERS or argument.endswith("_stride")
        types[argument] = "i32" if integer else {"Partial": "*fp32", "Offsets": "*i32"}.get(argument, "*bf16")
        if argument not in kernel.do_not_specialize:
            hints[(i,)] = [["tt.divisibility", 16]]
    limit = FORWARD_LIMIT if kernel is conv_forward_kernel and sm >= 90 else {}
    done = triton.compile(
        ASTSource(kernel, types, values, hints),
        target=GPUTarget("cuda", sm, 32),
        options={"num_warps": MOST_CHANNELS // WARP_CHANNELS, **limit},
    )
    registers, stack = usage(done)
    vectors = len(re.findall(r"ld\.global\S*\.v[24]\.b32", done.asm["ptx"]))
    return {
        "kernel": kernel.__name__, "packed": packed, "ones": ones, "registers": registers, "stack": stack,
        "shared": done.metadata.shared, "row loads": vectors,
    }  # fmt: skip


if __name__ == "__main__":
    for kernel in (conv_forward_kernel, conv_backward_kernel):
        for packed in (False, True):
            print(json.dumps(compiled(kernel, int(sys.argv[1]), packed)))
        print(json.dumps(compiled(kernel, int(sys.argv[1]), True, ones=True)))
