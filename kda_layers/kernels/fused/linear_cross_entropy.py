"""The sum of cross entropies of softmax(x W^T), by chunks of tokens, with the gradients computed in the forward.

The logits of all tokens are never in memory. A chunk's logits become their own gradient, softmax minus one-hot, which
is multiplied into the gradients of x and W at once; the backward multiplies these with the gradient of the loss. They
are not divided by a number of tokens before, so that float16 does not underflow.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from .. import torch_private
from ..declarations import OneOf
from ..operator import define, once_differentiable
from ..tracing import is_plain, refuse_transforms, without_autocast
from ..triton_package import FLOATS
from . import mechanism
from .mechanism import Forms, Plain, Triton

CHUNK_BYTES = 128 << 20  # logits of a chunk: 2048 tokens of 32000 bf16 logits. Fewer tokens slow the matrix products.
SOFTMAX_BYTES = 32 << 20  # fp32 logits that plain PyTorch takes at a time; they stay in the cache of a large GPU
ROWS_MULTIPLE = 64  # of tokens in a chunk, for the tiles of matrix products


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the sum over tokens of -log softmax(x W^T)[target], differentiable once in x and W.

    Matrix products are computed in the dtype of x, softmax, the loss and sums over chunks in fp32 (fp64 for fp64).

    Args:
        x: [T, D].
        weight: W [vocab_size, D]; converted to the dtype of x, and its gradient comes from sums in fp32.
        target: [T], int64: the classes.
        ignore_index: a target without loss and gradient.

    Returns:
        The sum, fp32 (fp64 for fp64).

    Raises:
        ValueError: a tensor of another shape, or a target that is not int64; the message names it.
        RuntimeError: a torch.func transform, forward-mode differentiation, a second backward or derivative.
    """
    _check(x, weight, target)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not torch.compiler.is_compiling():
        refuse_transforms("linear_cross_entropy", (x, weight))
        if needs_grad:
            return _Loss.apply(x, weight, target, ignore_index)
        if is_plain((x, weight, target)):
            return without_autocast(_loss_and_gradients, (x, weight, target), ignore_index, False, False)[0]
    return _op(x, weight, target, ignore_index, needs_grad, needs_grad)[0]


def _check(x: Tensor, weight: Tensor, target: Tensor) -> None:
    if x.ndim != 2:
        raise ValueError(f"x must have shape [T, D], got {list(x.shape)}: pass x.flatten(0, -2)")
    if weight.ndim != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight must have shape [vocab_size, D = {x.shape[1]}], got {list(weight.shape)}")
    if target.shape != x.shape[:1] or target.dtype != torch.int64:
        raise ValueError(
            f"target must be int64 of shape [T = {x.shape[0]}], got {target.dtype} of shape {list(target.shape)}"
        )


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        d_x, d_weight = ctx.needs_input_grad[:2]
        if is_plain((x, weight, target)):
            out = without_autocast(_loss_and_gradients, (x, weight, target), ignore_index, d_x, d_weight)
        else:
            with torch_private.below_autograd():
                out = _op(x, weight, target, ignore_index, d_x, d_weight)
        ctx.weight_dtype = weight.dtype
        ctx.gradients = [out[1] if d_x else None, out[2] if d_weight else None]
        return out[0]

    @staticmethod
    @once_differentiable("linear_cross_entropy")
    def backward(ctx: Any, d_loss: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError(
                "the backward of linear_cross_entropy can be taken once, got a second one: it scales in place what its "
                "forward computed. Call the model again, or with skip_logits=False, whose loss keeps its graph"
            )
        d_x, d_weight = ctx.gradients
        ctx.gradients = None
        if d_x is not None:
            _scale(d_x, d_loss)
        if d_weight is not None:
            _scale(d_weight, d_loss)
            d_weight = d_weight.to(ctx.weight_dtype)
        return d_x, d_weight, None, None


def _loss_and_gradients(
    inputs: tuple[Tensor, Tensor, Tensor], ignore_index: int, d_x: bool, d_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of losses and its gradients, empty tensors where they are not asked for."""
    x, weight, target = inputs
    loss, dx, dw = _outputs_like(x, weight, target, ignore_index, d_x, d_weight)
    weight = weight.to(x.dtype)
    tokens, rows = x.shape[0], chunk_rows(x, weight)
    losses = x.new_empty(tokens, dtype=loss.dtype)
    logits = x.new_empty(min(rows, tokens), weight.shape[0])
    total: Tensor | None = None  # of the gradient of W, in fp32
    softmax = LINEAR_CROSS_ENTROPY.backend(_form(x)).run
    for first in range(0, tokens, rows):
        chunk = slice(first, min(first + rows, tokens))
        part, x_part = logits[: chunk.stop - first], x[chunk]
        torch.mm(x_part, weight.t(), out=part)
        softmax(part, target[chunk], losses[chunk], ignore_index, d_x or d_weight)
        if d_x:
            torch.mm(part, weight, out=dx[chunk])
        if d_weight:
            total = _add_product(total, part.t(), x_part, dw.dtype if rows >= tokens else loss.dtype)
    if d_weight:
        dw = torch.zeros_like(dw) if total is None else total.to(dw.dtype)
    return losses.sum(), dx, dw


def chunk_rows(x: Tensor, weight: Tensor) -> int:
    """Tokens of a chunk: as many as `CHUNK_BYTES` of logits allow, in chunks of the same size."""
    tokens, most = x.shape[0], max(1, CHUNK_BYTES // (weight.shape[0] * x.element_size()))
    if tokens <= most:
        return max(1, tokens)
    rows = -(-tokens // -(-tokens // most))
    return min(most, -(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE)


def _softmax(logits: Tensor, target: Tensor, losses: Tensor, ignore_index: int, gradient: bool) -> None:
    """Write the losses of the rows, and the gradient of their sum over the logits."""
    ignored = target == ignore_index
    safe = target.masked_fill(ignored, 0)[:, None]
    rows = max(1, SOFTMAX_BYTES // (logits.shape[1] * losses.element_size()))
    for part, at, out in zip(logits.split(rows), safe.split(rows), losses.split(rows), strict=True):
        log_p = torch.log_softmax(part, -1, dtype=losses.dtype)
        torch.neg(log_p.gather(1, at)[:, 0], out=out)
        if gradient:
            torch.exp(log_p, out=part)
    if gradient:
        of_target = torch.expm1(-losses[:, None])  # p - 1 from fp32: p may round to 1
        logits.scatter_(1, safe, of_target.to(logits.dtype))
        logits.masked_fill_(ignored[:, None], 0)
    losses.masked_fill_(ignored, 0)


def _fused_softmax(logits: Tensor, target: Tensor, losses: Tensor, ignore_index: int, gradient: bool) -> None:
    from .triton.cross_entropy import loss_rows

    with torch.cuda.device(logits.device):
        loss_rows(logits, target, losses, ignore_index, gradient)


def _scale(x: Tensor, factor: Tensor) -> None:
    """Multiply x by a scalar tensor, in place."""
    if is_plain((x, factor)) and x.is_contiguous() and _form(x) == "triton":
        from .triton.cross_entropy import scale

        with torch.cuda.device(x.device):
            scale(x, factor)
    else:
        x.mul_(factor.reshape(1))  # of one dimension: as a scalar it would be rounded to x's dtype


@functools.cache
def _build_problems(dtype: torch.dtype) -> list[str]:
    """Return the reason why Triton does not build the kernel, for which it needs a C compiler; warn of it."""
    logits, target = torch.zeros(1, 16, device="cuda", dtype=dtype), torch.zeros(1, device="cuda", dtype=torch.int64)
    try:
        _fused_softmax(logits, target, torch.zeros(1, device="cuda"), -100, True)
    except Exception as error:  # Triton raises its own types
        warnings.warn(f"the loss uses plain PyTorch, as Triton did not build its kernel: {error}", stacklevel=2)
        return [f"Triton did not build the kernel: {error}"]
    return []


class Problem(mechanism.Problem):
    """The facts of a call on which a form may decide."""

    LABEL = "linear cross entropy"


class _Triton(Triton):
    serves = {"device": OneOf("cuda"), "dtype": FLOATS}  # noqa: RUF012

    def more_reasons(self, problem: Problem) -> list[str]:
        return super().more_reasons(problem) if problem.device == "cuda" else []

    def unsupported(self, problem: Problem) -> list[str]:
        return super().unsupported(problem) or _build_problems(problem.dtype)


# The forms are those of the softmax; the matrix products are PyTorch's.
LINEAR_CROSS_ENTROPY = Forms("linear_cross_entropy", Problem, Plain(_softmax), _Triton(_fused_softmax))


def _form(x: Tensor) -> str:
    name: str = LINEAR_CROSS_ENTROPY.choose(None, x.device, x.dtype)
    return name


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a @ b in `dtype`, in place; a @ b for None."""
    if dtype == a.dtype:
        return a @ b if total is None else total.addmm_(a, b)
    if a.is_cuda and torch.version.hip is None:
        if total is None:
            return torch.mm(a, b, out_dtype=dtype)
        if _adds_to_fp32(a.device, a.dtype):
            return torch.addmm(total, a, b, out_dtype=dtype, out=total)
        return total.add_(torch.mm(a, b, out_dtype=dtype))
    product = (a.to(dtype) @ b.to(dtype)) if a.dtype == torch.float16 else a @ b  # float16 would overflow
    return product.to(dtype) if total is None else total.add_(product)


@functools.cache
def _adds_to_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """True if torch adds a product of 16-bit matrices to an fp32 matrix in one call; the first versions did not."""
    a, total = torch.zeros(16, 16, device=device, dtype=dtype), torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _outputs_like(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, d_x: bool, d_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Unwritten outputs: fp32 loss, gradients in the dtypes of x and W, of W in fp32 for float16, which overflows."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight_dtype = wide if torch.float16 in (x.dtype, weight.dtype) else weight.dtype
    dx = torch.empty_like(x) if d_x else x.new_empty(0)
    dw = weight.new_empty(weight.shape if d_weight else 0, dtype=weight_dtype)
    return x.new_empty((), dtype=wide), dx, dw


def _recording(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, d_x: bool, d_weight: bool) -> Any:
    """The op under autograd, which gets its gradient there."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Loss.apply(x, weight, target, ignore_index), x.new_empty(0), weight.new_empty(0)
    with torch_private.below_autograd():
        return _op(x, weight, target, ignore_index, d_x, d_weight)


_op = define(
    "linear_cross_entropy",
    "(Tensor x, Tensor weight, Tensor target, int ignore_index, bool d_x, bool d_weight) -> "
    "(Tensor loss, Tensor d_x, Tensor d_weight)",
    lambda x, weight, target, *options: _loss_and_gradients((x, weight, target), *options),
    _outputs_like,
    _recording,
)
