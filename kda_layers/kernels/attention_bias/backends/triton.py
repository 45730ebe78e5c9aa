"""Triton kernels: any CUDA GPU, 16 bits and fp32; for tests also a CPU, in Triton's interpreter."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...declarations import OneOf, arch_of
from ...triton_package import interprets as _interprets
from ..contract import Backend, Gradients, Inputs, Problem, empty_lse
from ..triton.launches import Launch, Launches, launches
from ..triton.packing import sequence_numbers, tile_table

MAX_D = 256
NO_BIAS, PER_KEY, PER_PAIR = range(3)  # as in triton/parts.py


class TritonBackend(Backend):
    """The backend with launches from `table`; tests and tuning replace the default."""

    name = "triton"
    serves = {"dtype": OneOf(torch.bfloat16, torch.float16, torch.float32)}  # noqa: RUF012

    def __init__(self, table: Callable[[int, torch.dtype, int, bool], Launches] = launches):
        self.table = table

    @property
    def priority(self) -> int:  # type: ignore[override]
        """10, or -10 without a GPU: Triton's interpreter serves only calls that name the backend."""
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

        call, o, lse = _Call(x, self.table), x.v.new_empty(x.q.shape), empty_lse(x)
        with call.device():
            call.launch("forward", forward_kernel, x.q.shape[2], (call.scale_log2,), {}, o, lse)
        return o, lse

    def attend_backward(self, x: Inputs, o: Tensor, lse: Tensor, d_o: Tensor) -> Gradients:
        from ..triton.backward import key_kernel, query_kernel

        (B, _, H, _), (_, S, H_kv, _) = x.q.shape, x.k.shape
        call, d_o, delta = _Call(x, self.table), d_o.contiguous(), torch.empty_like(lse)
        dq, dk, dv = (t.new_empty(t.shape) for t in (x.q, x.k, x.v))
        bias = x.bias if x.bias_grad else None
        per_key = bias is not None and call.bias == PER_KEY
        # The kernel sums over a group of heads, unless each has a bias of its own.
        per_head = bias is not None and per_key and bias.shape[1] == H
        partial = x.q.new_empty((B, H if per_head else H_kv, S) if per_key else 0, dtype=torch.float32)
        scales = x.scale, call.scale_log2
        with call.device():
            call.launch("query", query_kernel, H, scales, {}, o, d_o, lse, delta, dq)
            flags = {"BIAS_GRAD": per_key, "PER_HEAD": per_head}
            call.launch("key", key_kernel, H_kv, scales, flags, d_o, lse, delta, dk, dv, partial)
            if bias is None:
                d_bias = None
            elif per_key:
                d_bias = partial.sum_to_size(*bias.shape[:2], S).unsqueeze(2).to(bias.dtype)
            else:
                d_bias = _pairs(call, bias, lse, delta, d_o)
        return Gradients(dq, dk, dv, d_bias)


class _Call:
    """The arguments that the kernels of one call share."""

    def __init__(self, x: Inputs, table: Callable[[int, torch.dtype, int, bool], Launches]):
        (_, T, H, D), (_, S, H_kv, _), bias = x.q.shape, x.k.shape, x.bias
        self.x, self.sizes = x, (T, S)
        q, k, v = (t if t.stride(3) == 1 and _is_near(t) else t.contiguous() for t in (x.q, x.k, x.v))
        bias = bias if bias is None or _is_near(bias) else bias.contiguous()
        self.tensors = (q, k, v, q if bias is None else bias)
        # The bias needs stride 0 in the dimensions that it is broadcast in, whose size is 1.
        shape, strides = ((1,) * 4, (0,) * 4) if bias is None else (bias.shape, bias.stride())
        bias_strides = tuple(0 if n == 1 else s for n, s in zip(shape, strides, strict=True))
        self.strides = (*(t.stride()[:3] for t in (q, k, v)), bias_strides)
        self.bias = NO_BIAS if bias is None else PER_KEY if bias.shape[2] == 1 else PER_PAIR
        self.scale_log2 = x.scale / math.log(2)
        self.block_d = max(16, 1 << (D - 1).bit_length())
        self.launches = table(arch_of(x.q.device), x.q.dtype, self.block_d, self.bias == PER_PAIR)
        self.options: dict[str, Any] = {
            "GROUP": H // H_kv, "BIAS_GROUP": 1 if bias is None else H // bias.shape[1], "CAUSAL": x.causal,
            "PACKED": x.cu_seqlens is not None,
        }  # fmt: skip

    def launch(
        self, name: str, kernel: Any, heads: int, scales: tuple[float, ...], flags: dict[str, bool], *tensors: Tensor
    ) -> None:
        """Launch the kernel `name` with a program for each batch row, head and tile of queries ("key": of keys)."""
        launch = self.launches[name]
        length, block = (self.sizes[1], launch.block_n) if name == "key" else (self.sizes[0], launch.block_m)
        if self.x.cu_seqlens is None:
            tiles, table = -(-length // block), self.x.q  # the kernel reads no table
        else:
            table = tile_table(self.x.cu_seqlens, length, block)
            tiles = table.shape[0]
        kernel[(self.x.q.shape[0] * heads * tiles,)](
            *self.tensors, *tensors, table, *self.strides, *scales, tiles, *self.sizes, heads,
            BIAS=self.bias, **flags, **self.options, **self.blocks(launch),
        )  # fmt: skip

    def blocks(self, launch: Launch) -> dict[str, Any]:
        return {
            "D": self.x.q.shape[3], "BLOCK_D": self.block_d, "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n,
            "num_warps": launch.warps, "num_stages": launch.stages,
        }  # fmt: skip

    def device(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.x.q.device) if self.x.q.is_cuda else contextlib.nullcontext()


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
    """True if 32-bit offsets reach every element of a tile, which has at most 128 rows and columns."""
    return max(t.stride()[1:]) < 2**24


BACKEND = TritonBackend()
