"""Additions without a pass of their own over memory.

Those of the residual stream are fused with the norms that read their sums. Those of the gradients of one input, which
autograd would add pairwise (five additions of [B, T, D] tensors for the six projections of a layer), accumulate in one
buffer: the first product writes it and the others accumulate into it in their epilogue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.fused.add_rms_norm import add_rms_norm
from .fast_paths import Call, Reason, additions, fast_path, name_of, other_dtype, training_additions

# Elsewhere the sums of the gradient keep torch's order, and with it their bits.
DEVICES, DTYPES = ("cuda",), (torch.bfloat16, torch.float16)
NARROW = 512  # outputs of a layer whose product is mostly reading the input: such layers share one product


@fast_path("projections with one gradient of their input", instead="a node of autograd for each projection")
def SHARED_INPUT(call: Any, layers: Sequence[nn.Module]) -> Iterator[Reason]:
    """Training in 16 bits on a GPU, where only the weights of plain linear layers matter in a call on x."""
    if not call.records:
        yield Reason("no gradients are recorded")
    if call.device.type not in DEVICES:
        yield Reason(f"on {call.device.type} sums of gradients keep torch's order")
    if call.dtype not in DTYPES:
        yield Reason(f"is computed in {name_of(call.dtype)}", "load the model in bfloat16")
    for layer in layers:
        yield from training_additions(layer)
        yield from other_dtype(layer, call.dtype)
    if call.autocast:
        yield Reason("runs under autocast", "load the model in bfloat16 instead")
    if not call.is_plain or call.is_transformed:
        yield Reason("is traced, transformed or observed (torch.compile, torch.func, a dispatch mode)")


def projections(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Return layer(x) for each of `layers`."""
    if SHARED_INPUT.serves(Call(x), layers):
        return multiplied(x, [layer.weight for layer in layers])  # type: ignore[misc]
    return tuple(layer(x) for layer in layers)


def multiplied(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return x @ weight.mT for each of `weights` [N_i, D]; those that are narrow are rows of one tensor."""
    rows = [w.shape[0] for w in weights]
    narrow = [i for i, n in enumerate(rows) if n < NARROW]
    if len(narrow) < 2:
        return _SharedInput.apply(x, *weights)
    wide = [i for i in range(len(rows)) if i not in narrow]
    *outputs, together = _SharedInput.apply(x, *(weights[i] for i in wide), torch.cat([weights[i] for i in narrow]))
    outputs += together.split([rows[i] for i in narrow], -1)
    found = dict(zip([*wide, *narrow], outputs, strict=True))
    return tuple(found[i] for i in range(len(rows)))


class _SharedInput(torch.autograd.Function):
    """(x [..., D], weights [N_i, D]) -> x @ weight.mT for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return tuple(nn.functional.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, *needs_weights = ctx.needs_input_grad
        inputs = x.flatten(0, -2)
        d_x: Tensor | None = None
        d_weights: list[Tensor | None] = []
        for weight, d, needed in zip(weights, d_outputs, needs_weights, strict=True):
            rows = None if d is None else d.flatten(0, -2)
            if needs_x and rows is not None:
                d_x = rows @ weight if d_x is None else d_x.addmm_(rows, weight)
            d_weights.append(rows.mT @ inputs if needed and rows is not None else None)
        return None if d_x is None else d_x.view(x.shape), *d_weights


def normal(norm: nn.Module, dtype: torch.dtype) -> Iterator[Reason]:
    """Yield what a norm does beyond a plain `nn.RMSNorm` with an epsilon, in inputs' dtype."""
    yield from additions(norm, nn.RMSNorm)
    if getattr(norm, "eps", None) is None:
        yield Reason("has no eps", "", norm)
    yield from other_dtype(norm, dtype)


@fast_path("norm fused with the addition before it", instead="an addition, then nn.RMSNorm")
def FUSED_NORM(call: Any, norm: nn.Module) -> Iterator[Reason]:
    """A plain `nn.RMSNorm` in x's dtype."""
    if call.compiling:
        yield Reason("is traced by torch.compile, which fuses them itself")
    yield from normal(norm, call.dtype)
    if norm._backward_hooks or norm._backward_pre_hooks:
        yield Reason("has backward hooks", "remove them", norm)
    if call.autocast:
        yield Reason("runs under autocast", "load the model in bfloat16 instead")
    if call.global_hooks:
        yield Reason("runs under global hooks of torch.nn", "remove them")


def add_and_normalise(residual: Tensor, x: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return residual + x (residual for None) and norm of it.

    Use the returned sum, also for x=None: the norm's backward adds its gradient.
    """
    if FUSED_NORM.serves(Call(residual), norm):
        return add_rms_norm(residual, x, norm.weight, norm.eps)  # type: ignore[arg-type]
    total = residual if x is None else residual + x
    return total, norm(total)
