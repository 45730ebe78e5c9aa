"""`python -m tests.kernels.attention.compiled sm "per key" forward ...`: compiles kernels for a GPU that is not here.

In bf16 at D = 128, causal, with a bias for each key in bf16, or for each pair in fp32 ("per pair"); prints for each one
its shared memory, its stack (what registers spill to), and how often it has an instruction of the tensor cores, as one
line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kda_layers.kernels.attention_bias.backends.triton import launches
from kda_layers.kernels.attention_bias.triton import backward, decode, forward
from tests.kernels.triton_usage import usage

KERNELS = {
    "forward": forward.forward_kernel,
    "query": backward.query_kernel,
    "key": backward.key_kernel,
    "pair": backward.pair_kernel,
    "split": decode.split_kernel,
}
ALIGNED = [["tt.divisibility", 16]]
FLOATS = {
    "Lse": "*fp32",
    "Parts": "*fp32",
    "Top": "*fp32",
    "Sum": "*fp32",
    "Delta": "*fp32",
    "DBias": "*fp32",
    "scale": "fp32",
    "scale_log2": "fp32",
}
INTEGERS = {"Tiles": "*i32", "Sequences": "*i32", "T": "i32", "S": "i32", "H": "i32", "H_KV": "i32"}
COUNTS = {"tiles": "i32", "splits": "i32", "batch": "i32", "heads": "i32"}


def compiled(name: str, sm: int, per_pair: bool) -> dict[str, Any]:
    launch = launches(sm, torch.bfloat16, 128, per_pair)[name]
    constants = {
        "GROUP": 1, "BIAS_GROUP": 1, "BIAS": 1 + per_pair, "BIAS_GRAD": not per_pair, "PER_HEAD": True,
        "CAUSAL": True, "PACKED": False,
        "D": 128, "BLOCK_D": 128, "BLOCK_M": launch.block_m, "BLOCK_G": launch.block_m, "BLOCK_N": launch.block_n,
    }  # fmt: skip
    kernel, types, values, hints = KERNELS[name], {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            types[argument], values[(i,)] = "constexpr", constants[argument]
        elif argument == "bias_strides":
            types[argument], values[(i, 3)] = ("i32", "i32", "i32", "constexpr"), 1
            hints |= {(i, j): ALIGNED for j in range(3)}
        elif argument.endswith("_strides"):
            types[argument] = ("i32", "i32", "i32")
            hints |= {(i, j): ALIGNED for j in range(3)}
        else:
            known = FLOATS | INTEGERS | COUNTS | ({"Bias": "*fp32"} if per_pair else {})
            types[argument] = known.get(argument, "*bf16")
            if argument not in COUNTS and not argument.startswith("scale"):
                hints[(i,)] = ALIGNED
    done = triton.compile(
        ASTSource(kernel, types, values, hints),
        target=GPUTarget("cuda", sm, 32),
        options={"num_warps": launch.warps, "num_stages": launch.stages},
    )
    instructions = sum(done.asm["ptx"].count(i) for i in ("wgmma.mma_async", "tcgen05.mma", "mma.sync"))
    return {"kernel": name, "shared": done.metadata.shared, "stack": usage(done).stack, "products": instructions}


if __name__ == "__main__":
    sm, bias, *names = sys.argv[1:]
    for name in names:
        print(json.dumps(compiled(name, int(sm), bias == "per pair")))
