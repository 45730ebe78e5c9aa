"""Triton kernels, one launch each way: any CUDA GPU, 16 bits and fp32; for tests also the interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...declarations import OneOf
from ...triton_package import TritonBackend, even_rows, on_device_of
from ..contract import Backend, Gradients, Inputs, Outputs

BLOCK, WARPS = 512, 2  # elements of a program: 8 for each thread, loads of 16 bytes


class SwigluBackend(TritonBackend, Backend):
    serves = {"dtype": OneOf(torch.bfloat16, torch.float16, torch.float32)}  # noqa: RUF012

    def saved_like(self, x: Inputs) -> list[Tensor]:
        return []

    def forward(self, x: Inputs, save: bool) -> tuple[Outputs, list[Tensor]]:
        from ..triton.elementwise import swiglu_forward_kernel

        y = x.gate.new_empty(x.gate.shape)
        _launch(swiglu_forward_kernel, (even_rows(x.gate), even_rows(x.up)), (y,))
        return Outputs(y), []

    def backward(self, x: Inputs, saved: list[Tensor], d_y: Tensor) -> Gradients:
        return _gradients(x, even_rows(d_y), output=False)

    def backward_over_output(self, x: Inputs, d_y: Tensor) -> Gradients:
        return _gradients(x, d_y, output=True)


def _gradients(x: Inputs, d_y: Tensor, output: bool) -> Gradients:
    from ..triton.elementwise import swiglu_backward_kernel

    d_gate, d_up = x.gate.new_empty(x.gate.shape), x.up.new_empty(x.up.shape)
    _launch(swiglu_backward_kernel, (even_rows(x.gate), even_rows(x.up), d_y), (d_gate, d_up), output)
    return Gradients(d_gate, d_up)


def _launch(kernel: Any, read: tuple[Tensor, ...], written: tuple[Tensor, ...], *options: bool) -> None:
    B, T, D = written[0].shape
    blocks = -(-D // BLOCK)
    if B * T * blocks == 0:
        return
    with on_device_of(read[0]):
        kernel[(B * T * blocks,)](
            *read, *written, *(t.stride(1) for t in read), D, blocks, *options,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


BACKEND = SwigluBackend()
