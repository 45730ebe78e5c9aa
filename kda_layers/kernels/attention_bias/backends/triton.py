"""Triton kernels: any CUDA GPU, 16 bits and fp32; in Triton's interpreter (TRITON_INTERPRET=1) a CPU, for tests."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...declarations import OneOf, arch_of
from ..contract import Backend, Gradients, Inputs, Problem, empty_lse
from ..triton.launches import Launch, Launches, launches
from ..triton.packing import sequence_numbers, tile_table

MAX_D = 256
NO_BIAS, PER_KEY, PER_PAIR = range(3)  # as in triton/parts.py


class TritonBackend(Backend):
    """`table` says how kernels are launched; others than the default are for tests and tuning."""

    name = "triton"
    serves = {"dtype": OneOf(torch.bfloat16, torch.float16, torch.float32)}  # noqa: RUF012

    def __init__(self, table: Callable[[int, torch.dtype, int, bool], Launches] = launches):
        self.table = table

    @property
    def priority(self) -> int:  # type: ignore[override]
        """Without a GPU only Triton's interpreter is left, which has to be asked for by name."""
        return 10 if torch.cuda.is_available() else -10

    def more_reasons(self, problem: Problem) -> list[str]:
        reasons = []
        if problem.device == "cuda" and problem.arch < 80:
            reasons.append(f"arch is sm_{problem.arch}, needs sm_80 or newer")
        if problem.device == "cpu" and problem.dtype == torch.bfloat16:
            reasons.append("dtype is bfloat16, which Triton's interpreter multiplies wrongly, needs float16 or float32")
        if problem.D > MAX_D:
            reasons.append(f"D is {problem.D}, needs at most {MAX_D}")
        if problem.device not in ("cuda", "cpu"):
            reasons.append(f"device is {problem.device}, needs cuda")
        elif not importlib.util.find_spec("triton"):
            reasons.append("triton is not installed")
        elif problem.device == "cpu" and not _interprets():
            reasons.append("device is cpu, needs cuda")
        return reasons

    def attend(self, x: Inputs) -> tuple[Tensor, Tensor]:
        from ..triton.forward import forward_kernel

        B, T, H, _ = x.q.shape
        call = _Call(x, self.table)
        launch = call.launches["forward"]
        o = x.v.new_empty(x.q.shape)
        lse = empty_lse(x)
        tiles, table = call.tiles(T, launch.block_m)
        with call.device():
            forward_kernel[(B * H * tiles,)](
                *call.tensors, o, lse, table, *call.strides, call.scale_log2, tiles, *call.sizes, H,
                BIAS=call.bias, **call.options, **call.blocks(launch),
            )  # fmt: skip
        return o, lse

    def attend_backward(self, x: Inputs, o: Tensor, lse: Tensor, d_o: Tensor) -> Gradients:
        from ..triton.backward import key_kernel, query_kernel

        (B, T, H, _), (_, S, H_kv, _) = x.q.shape, x.k.shape
        call, d_o, delta = _Call(x, self.table), d_o.contiguous(), torch.empty_like(lse)
        dq, dk, dv = (t.new_empty(t.shape) for t in (x.q, x.k, x.v))
        bias = x.bias if x.bias_grad else None
        per_key = bias is not None and call.bias == PER_KEY
        # The sum over a group is taken on the chip, unless its heads have biases of their own.
        per_head = bias is not None and per_key and bias.shape[1] == H
        partial = x.q.new_empty((B, H if per_head else H_kv, S) if per_key else 0, dtype=torch.float32)
        with call.device():
            launch = call.launches["query"]
            tiles, table = call.tiles(T, launch.block_m)
            query_kernel[(B * H * tiles,)](
                *call.tensors, o, d_o, lse, delta, dq, table, *call.strides, x.scale, call.scale_log2, tiles,
                *call.sizes, H, BIAS=call.bias, **call.options, **call.blocks(launch),
            )  # fmt: skip
            launch = call.launches["key"]
            tiles, table = call.tiles(S, launch.block_n)
            key_kernel[(B * H_kv * tiles,)](
                *call.tensors, d_o, lse, delta, dk, dv, partial, table, *call.strides, x.scale, call.scale_log2, tiles,
                *call.sizes, H_kv, BIAS=call.bias, BIAS_GRAD=per_key, PER_HEAD=per_head, **call.options,
                **call.blocks(launch),
            )  # fmt: skip
            d_bias = None
            if bias is not None:
                d_bias = _over_rows_and_heads(partial, bias) if per_key else _pairs(call, bias, lse, delta, d_o)
        return Gradients(dq, dk, dv, d_bias)


class _Call:
    """The arguments that kernels share."""

    def __init__(self, x: Inputs, table: Callable[[int, torch.dtype, int, bool], Launches]):
        (_, T, H, D), (_, S, H_kv, _), bias = x.q.shape, x.k.shape, x.bias
        self.x, self.sizes = x, (T, S)
        q, k, v = (t if t.stride(3) == 1 and _is_near(t) else t.contiguous() for t in (x.q, x.k, x.v))
        bias = bias if bias is None or _is_near(bias) else bias.contiguous()
        self.tensors = (q, k, v, q if bias is None else bias)
        # Where a bias is broadcast its size is 1, and any step keeps it where it is.
        self.strides = (
            *(t.stride()[:3] for t in (q, k, v)),
            (0, 0, 0, 0)
            if bias is None
            else tuple(0 if n == 1 else s for n, s in zip(bias.shape, bias.stride(), strict=True)),
        )
        self.bias = NO_BIAS if bias is None else PER_KEY if bias.shape[2] == 1 else PER_PAIR
        self.scale_log2 = x.scale / math.log(2)
        self.block_d = max(16, 1 << (D - 1).bit_length())
        self.launches = table(arch_of(x.q.device), x.q.dtype, self.block_d, self.bias == PER_PAIR)
        self.options: dict[str, Any] = {
            "GROUP": H // H_kv, "BIAS_GROUP": 1 if bias is None else H // bias.shape[1], "CAUSAL": x.causal,
            "PACKED": x.cu_seqlens is not None,
        }  # fmt: skip

    def tiles(self, length: int, block: int) -> tuple[int, Tensor]:
        """How many tiles a head has at most, and the table of them that kernels read where sequences are packed."""
        if self.x.cu_seqlens is None:
            return -(-length // block), self.x.q
        table = tile_table(self.x.cu_seqlens, length, block)
        return table.shape[0], table

    def blocks(self, launch: Launch) -> dict[str, Any]:
        return {
            "D": self.x.q.shape[3], "BLOCK_D": self.block_d, "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n,
            "num_warps": launch.warps, "num_stages": launch.stages,
        }  # fmt: skip

    def device(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.x.q.device) if self.x.q.is_cuda else contextlib.nullcontext()


def _over_rows_and_heads(partial: Tensor, bias: Tensor) -> Tensor:
    """[B, heads, S] fp32 summed to the bias's [1|B, heads, 1, S]."""
    dims = [d for d in (0, 1) if bias.shape[d] == 1 < partial.shape[d]]
    return (partial.sum(dims, keepdim=True) if dims else partial).unsqueeze(2).to(bias.dtype)


def _pairs(call: _Call, bias: Tensor, lse: Tensor, delta: Tensor, d_o: Tensor) -> Tensor:
    """The gradient of a bias for each query and key."""
    from ..triton.pair_bias import pair_kernel

    x, (T, S), launch = call.x, call.sizes, call.launches["pair"]
    B, _, H, _ = x.q.shape
    d_bias = bias.new_empty(bias.shape)
    sequences = x.q if x.cu_seqlens is None else sequence_numbers(x.cu_seqlens, T)
    tiles = -(-T // launch.block_m) * -(-S // launch.block_n)
    options = {n: v for n, v in call.options.items() if n != "BIAS_GROUP"}
    pair_kernel[(bias.shape[0] * bias.shape[1] * tiles,)](
        *call.tensors, d_o, lse, delta, d_bias, sequences, *call.strides, call.scale_log2, T, S, H,
        B // bias.shape[0], H // bias.shape[1], **options, **call.blocks(launch),
    )  # fmt: skip
    return d_bias


def _is_near(t: Tensor) -> bool:
    """Whether rows and columns of a tile, of at most 128, lie within the range of 32 bits."""
    return max(t.stride()[1:]) < 2**24


def _interprets() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


BACKEND = TritonBackend()
