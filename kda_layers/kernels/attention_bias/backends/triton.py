"""Triton kernels: any CUDA GPU, 16 bits and fp32; for tests also a CPU, in Triton's interpreter."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...declarations import arch_of
from ...triton_package import OnTriton, on_device_of
from ..contract import Backend, Gradients, Inputs, Problem, empty_lse

MAX_D = 256
NO_BIAS, PER_KEY, PER_PAIR = range(3)  # as in triton/parts.py
# o; dq; dk, dv and dbias per key; dbias per query and key; o of one query
KERNELS = ("forward", "query", "key", "pair", "split")
SPLITS = 64  # combined at a time


class Launch(NamedTuple):
    """Rows and columns of a tile, warps and pipeline stages of a kernel."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    warps: int
    stages: int


Launches = dict[str, Launch]  # one for each of KERNELS


@functools.cache
def launches(arch: int, dtype: torch.dtype, block_d: int, per_pair: bool) -> Launches:
    """The launches for head widths up to `block_d`, a power of two.

    With `per_pair` the bias has size [T, S], so that its tiles take shared memory too.
    """
    roomy = arch in (80, 87) or 90 <= arch < 120  # at least 160 KB of shared memory for a block; others have 99
    if dtype == torch.float32:  # exact MMAs run without tensor cores, on registers
        n = 32 if block_d <= 64 else 16
        table = (n, 32, 4, 1), (n, n, 4, 1), (n, n, 4, 1), (n, 32, 4, 1), (16, 32, 4, 1)
    elif block_d == 128 and 90 <= arch < 120 and not per_pair:  # the fastest of those tried on an H200
        table = (128, 128, 8, 3), (128, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (16, 128, 4, 1)
    elif block_d <= 128 and roomy:
        # With three stages an fp32 bias of [T, S] does not fit beside wide heads on sm_100.
        warps, stages = 8 if block_d == 128 else 4, 3 if arch >= 90 and (arch < 100 or block_d < 128) else 2
        table = (128, 64, warps, 3), (128, 64, warps, stages), (64, 128, 8, stages), (64, 64, 4, 2), (16, 128, 4, 1)
    elif block_d <= 128:
        n, warps = (64, 4) if block_d <= 64 else (32, 8)
        table = (128, n, warps, 2), (64, n, 4, 2), (n, 64, 4, 2), (64, 32, 4, 1), (16, 64, 4, 1)
    else:
        table = (64, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (16, 64, 4, 1)
    return {kernel: Launch(*values) for kernel, values in zip(KERNELS, table, strict=True)}


class TritonBackend(OnTriton, Backend):
    """The backend with launches from `table`; tests and tuning replace the default."""

    def __init__(self, table: Callable[[int, torch.dtype, int, bool], Launches] = launches):
        self.table = table

    def more_reasons(self, problem: Problem) -> list[str]:
        reasons = super().more_reasons(problem)
        if problem.device == "cpu" and problem.dtype == torch.bfloat16:
            reasons.append("dtype is bfloat16, which Triton's interpreter multiplies wrongly, needs float16 or float32")
        if problem.D > MAX_D:
            reasons.append(f"D is {problem.D}, needs at most {MAX_D}")
        return reasons

    def attend(self, x: Inputs) -> tuple[Tensor, Tensor]:
        from ..triton.forward import forward_kernel

        if x.q.shape[1] == 1 and x.cu_seqlens is None:
            return _attend_once(_Call(x, self.table))
        call, o, lse = _Call(x, self.table), x.v.new_empty(x.q.shape), empty_lse(x)
        with on_device_of(x.q):
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
        with on_device_of(x.q):
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
        q, k, v = (t if t.stride(3) == 1 and _is_near(t.stride(1)) else t.contiguous() for t in (x.q, x.k, x.v))
        bias = bias if bias is None or _is_near(*bias.stride()[2:]) else bias.contiguous()
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


def _attend_once(call: _Call) -> tuple[Tensor, Tensor]:
    """`attend` for one query, split over the keys, as one program per head would leave most of the GPU idle."""
    from ..triton.decode import combine_kernel, split_kernel

    x, S, launch = call.x, call.sizes[1], call.launches["split"]
    (B, _, H, D), H_kv, group = x.q.shape, x.k.shape[2], call.options["GROUP"]
    splits, o, lse = -(-S // launch.block_n), x.v.new_empty(x.q.shape), empty_lse(x)
    parts, tops, sums = (x.q.new_empty((B, H, splits, *d), dtype=torch.float32) for d in ((D,), (), ()))
    sizes, tiles = {"D": D, "BLOCK_D": call.block_d}, -(-group // launch.block_m)
    with on_device_of(x.q):
        split_kernel[(B * H_kv * tiles * splits,)](
            *call.tensors, parts, tops, sums, *call.strides, call.scale_log2, splits, S, H_kv,
            GROUP=group, BIAS_GROUP=call.options["BIAS_GROUP"], BIAS=call.bias, **sizes,
            BLOCK_G=launch.block_m, BLOCK_N=launch.block_n,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
        combine_kernel[(B * H,)](parts, tops, sums, o, lse, splits, **sizes, BLOCK_S=SPLITS)
    return o, lse


def _pairs(call: _Call, bias: Tensor, lse: Tensor, delta: Tensor, d_o: Tensor) -> Tensor:
    """The gradient of a bias for each query and key."""
    from ..triton.backward import pair_kernel

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


def _is_near(*strides: int) -> bool:
    """True if 32-bit offsets reach every element of a tile with these strides and at most 128 rows and columns."""
    return max(strides) < 2**24


def tile_table(cu_seqlens: Tensor, T: int, block: int) -> Tensor:
    """[tiles, 3] int32: each tile's first row, its sequence's first row and end; surplus tiles have no rows.

    The table has room for the most tiles that N sequences of T tokens in all can have. Offsets are clamped to T, so
    that nothing beyond it is read.
    """
    offsets = cu_seqlens.clamp(0, T).int()
    N = offsets.shape[0] - 1
    before = torch.nn.functional.pad(((offsets.diff() + block - 1) // block).cumsum(0, dtype=torch.int32), (1, 0))
    tile = torch.arange((T + (block - 1) * N) // block, device=offsets.device, dtype=torch.int32)
    sequence = (torch.searchsorted(before, tile, right=True) - 1).clamp(max=N - 1)
    begin, end = offsets[sequence], offsets[sequence + 1]
    return torch.stack((begin + (tile - before[sequence]) * block, begin, end), 1).contiguous()


def sequence_numbers(cu_seqlens: Tensor, T: int) -> Tensor:
    """[T] int32: the number of each token's sequence, from 1 on."""
    tokens = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, tokens, right=True).int()


BACKEND = TritonBackend()
