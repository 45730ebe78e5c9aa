"""Triton kernels for up to three tensors at once: any CUDA GPU, 16 bits and fp32; for tests also the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...declarations import OneOf
from ...fused.rows import column_sums
from ...triton_package import TritonBackend, even_rows, on_device_of
from ..contract import Backend, Gradients, Inputs, Outputs, TripleGradients, TripleInputs, TripleOutputs

TENSORS = 3  # that the kernels take
MOST_CHANNELS = 256  # of a program
FORWARD_CHANNELS, BACKWARD_CHANNELS = 256, 128  # of a warp: loads of 16 bytes; fewer registers for each thread
STRIPS = 64, 16  # tokens of a program: a call whose programs would not fill a GPU has short strips
PROGRAMS = 1024  # fill a GPU


class ConvolutionBackend(TritonBackend, Backend):
    together = True
    serves = {  # noqa: RUF012
        "dtype": OneOf(torch.bfloat16, torch.float16, torch.float32),
        "W": OneOf(2, 3, 4),
    }

    def saved_like(self, x: Inputs | TripleInputs) -> list[Tensor]:
        return []

    def forward(self, x: Inputs | TripleInputs, save: bool) -> tuple[Outputs | TripleOutputs, list[Tensor]]:
        from ..triton.convolution import conv_forward_kernel

        call = _Call(x)
        ys = [t.new_empty(t.shape) for t in call.xs]
        call.launch(conv_forward_kernel, FORWARD_CHANNELS, (call.xs,), (ys,))
        return (Outputs(*ys) if isinstance(x, Inputs) else TripleOutputs(*ys)), []

    def backward(
        self, x: Inputs | TripleInputs, saved: list[Tensor], *d_ys: Tensor | None
    ) -> Gradients | TripleGradients:
        from ..triton.convolution import conv_backward_kernel

        call = _Call(x)
        d_ys_read = [torch.zeros_like(t) if d is None else even_rows(d) for t, d in zip(call.xs, d_ys, strict=True)]
        d_xs = [t.new_empty(t.shape) for t in call.xs]
        partial = x.weight.new_empty((call.B * call.strips, *x.weight.mT.shape), dtype=torch.float32)
        call.launch(conv_backward_kernel, BACKWARD_CHANNELS, (call.xs, d_ys_read), (d_xs,), partial)
        d_weight = column_sums(partial, x.weight)  # no atomics: one order of sums
        return (Gradients if isinstance(x, Inputs) else TripleGradients)._make((*d_xs, d_weight))


class _Call:
    """The arguments that the kernels of one call share."""

    def __init__(self, x: Inputs | TripleInputs):
        self.xs = [even_rows(t) for t in x[:-3]]
        self.weight, self.state, self.offsets = x.weight.contiguous(), x.state, x.cu_seqlens
        self.B, self.T = x[0].shape[:2]
        widths = [t.shape[2] for t in self.xs]
        self.widths = widths + [0] * (TENSORS - len(widths))
        self.block = min(MOST_CHANNELS, max(32, 1 << (max(widths) - 1).bit_length()))
        self.blocks = sum(-(-width // self.block) for width in widths)
        long, short = STRIPS
        self.strip = long if self.B * -(-self.T // long) * self.blocks >= PROGRAMS else short
        self.strips = -(-self.T // self.strip)

    def launch(
        self,
        kernel: Any,
        warp_channels: int,
        read: tuple[Sequence[Tensor], ...],
        written: tuple[Sequence[Tensor], ...],
        *more: Tensor,
    ) -> None:
        """Launch `kernel` with a program for each batch row, strip and block of channels of a tensor."""
        programs = self.B * self.strips * self.blocks
        if not programs:
            return
        any_tensor = self.xs[0]  # in the place of those that the kernel does not read
        tensors = [t for group in (*read, *written) for t in _three(group, any_tensor)]
        strides = [n for group in read for n in _three([t.stride(1) for t in group], 0)]
        state = any_tensor if self.state is None else self.state
        offsets = any_tensor if self.offsets is None else self.offsets
        N = self.B if self.offsets is None else offsets.shape[0] - 1
        with on_device_of(any_tensor):
            kernel[(programs,)](
                *tensors, self.weight, state, offsets, *more, *strides, *state.stride(), *self.widths, self.T, N,
                self.strips, W=self.weight.shape[1], PACKED=self.offsets is not None, STATE=self.state is not None,
                STRIP=self.strip, BLOCK_D=self.block, num_warps=max(1, self.block // warp_channels),
            )  # fmt: skip


def _three(group: Sequence[Any], rest: Any) -> list[Any]:
    return [*group, *[rest] * (TENSORS - len(group))]


BACKEND = ConvolutionBackend()
