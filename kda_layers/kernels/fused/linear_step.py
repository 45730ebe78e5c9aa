"""A linear layer of a decode step: one launch from the residual stream to the next operator."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import check_is_tensor, check_tensor
from ..cuda.arch import OVERLAPS
from ..declarations import OneOf, arch_of
from ..declarations import Problem as AnyProblem
from ..operator import NoGradOperator
from ..triton_package import FLOATS, RepeatedLaunch, even_rows
from . import swiglu
from .mechanism import Forms, Plain, Triton

# Sizes tuned on an H200. A program of row_kernel: elements of the output, warps, and the most columns read at a time.
OUTPUTS, WARPS = 4, 4
MOST_COLUMNS = 2048
MOST_IDLE = 0.125  # share of the last columns' lanes that may be idle
# A program of tile_kernel: rows -> warps and stages.
TILES = {16: (2, 3), 32: (4, 4), 64: (4, 5)}
TILE_OUTPUTS, TILE_COLUMNS = 16, 256
TILE_ARCHS = (90, 100, 103)  # with the shared memory for its stages
# What is faster than cuBLAS (docs/internals/kernels/linear_step.md).
MOST_ROWS = 4
MOST_PRODUCTS = 2**25  # rows times elements of the weight, for more than one row
MOST_IN_TILE = 64  # rows


class Inputs(NamedTuple):
    """The arguments of the op, in its order."""

    x: Tensor  # [B, T, D]
    weight: Tensor  # [N, D], or [2 N, D] with swiglu: the gate's rows first
    norm_weight: Tensor | None  # [D]
    residual: Tensor | None  # [B, T, N]
    norm_eps: float
    swiglu: bool
    overlap: bool


def work_of(x: Inputs) -> str:
    """Return the kind of a call by its number of tokens.

    "row" is one token, or a few of a small weight; "tile" is up to `MOST_IN_TILE` onto a residual, without norm or
    activation; "product" is everything else.
    """
    rows = x.x.shape[0] * x.x.shape[1]
    if rows == 1 or (rows <= MOST_ROWS and rows * x.weight.numel() <= MOST_PRODUCTS):
        return "row"
    if rows <= MOST_IN_TILE and x.residual is not None and x.norm_weight is None and not x.swiglu:
        return "tile"
    return "product"


@dataclass(frozen=True)
class Problem(AnyProblem):
    """The facts of a call on which a form may decide."""

    work: str = "product"  # see `work_of`

    def __str__(self) -> str:
        return f"linear layer of a decode step, {super().__str__()}, {self.work}"


def _plain(x: Inputs) -> Tensor:
    """Plain PyTorch, for any number of tokens; torch.compile fuses what surrounds the product."""
    y = x.x
    if x.norm_weight is not None:
        y = F.rms_norm(y, x.norm_weight.shape, x.norm_weight, x.norm_eps)
    y = F.linear(y, x.weight)
    if x.swiglu:
        gate, up = y.chunk(2, -1)
        y = swiglu.swiglu(gate, up)
    return y if x.residual is None else x.residual + y


class _Triton(Triton):
    serves = {"dtype": FLOATS, "work": OneOf("row", "tile")}  # noqa: RUF012

    def more_reasons(self, problem: Problem) -> list[str]:
        reasons = super().more_reasons(problem)
        if problem.work == "tile" and not reasons:
            archs, dtypes = OneOf(*TILE_ARCHS, prefix="sm_"), OneOf(torch.bfloat16, torch.float16)
            if problem.device == "cuda" and (refused := archs.refuses(problem.arch)):
                reasons.append(f"arch {refused} for a tile")
            if refused := dtypes.refuses(problem.dtype):
                reasons.append(f"dtype {refused} for a tile")
            if problem.device == "cpu" and problem.dtype == torch.bfloat16:
                reasons.append("dtype is bfloat16, which Triton's interpreter multiplies wrongly, needs float16")
        return reasons


def _output_like(x: Inputs) -> Tensor:
    return x.x.new_empty((*x.x.shape[:2], x.weight.shape[0] // (2 if x.swiglu else 1)))


def _fused(x: Inputs) -> Tensor:
    even = _evened(x)
    if even.weight is not x.weight:  # whose copy the launch would overlap
        even = even._replace(overlap=False)
    return Launch(even)(*even[:4])


def _evened(x: Inputs) -> Inputs:
    """Return `x` with evenly spaced rows and a contiguous weight; tensors that comply are not copied."""
    residual = None if x.residual is None else even_rows(x.residual)
    return x._replace(x=even_rows(x.x), weight=x.weight.contiguous(), residual=residual)


class Launch:
    """Launch of a kernel for inputs with the shapes, strides and dtypes of the first ones.

    Rows are evenly spaced and the weight is contiguous (`_evened`).
    """

    def __init__(self, x: Inputs) -> None:
        overlap = x.overlap and arch_of(x.x.device) >= OVERLAPS
        options: dict[str, Any] = {"launch_pdl": True} if overlap else {}
        (B, T, D), N = x.x.shape, x.weight.shape[0] // (2 if x.swiglu else 1)
        strides = x.x.stride(1), 0 if x.residual is None else x.residual.stride(1)
        self._shape, self._is_row = (B, T, N), work_of(x) != "tile"
        if self._is_row:
            from .triton.linear_step import row_kernel

            kernel, grid, options["num_warps"] = row_kernel, B * T * -(-N // OUTPUTS), WARPS
            block, parts = columns(D, x.swiglu), (x.norm_weight is not None, x.residual is not None, x.swiglu)
            rest: tuple[Any, ...] = *strides, x.norm_eps, B * T, N, D, OUTPUTS, block, -(-D // block), *parts, overlap
        else:
            from .triton.linear_step import tile_kernel

            rows = next(n for n in TILES if n >= B * T)
            kernel, grid, (options["num_warps"], stages) = tile_kernel, -(-N // TILE_OUTPUTS), TILES[rows]
            rest = *strides, B * T, N, D, rows, TILE_OUTPUTS, TILE_COLUMNS, stages, overlap
        self._run = RepeatedLaunch(kernel, grid, rest, options)

    def __call__(self, x: Tensor, weight: Tensor, norm_weight: Tensor | None, residual: Tensor | None) -> Tensor:
        """Return the output [B, T, N]."""
        y = x.new_empty(self._shape)
        if y.numel() and self._is_row:
            self._run(x, weight, norm_weight, residual, y)
        elif y.numel():
            self._run(x, weight, residual, y)
        return y


@functools.cache
def columns(D: int, swiglu: bool) -> int:
    """Columns of a weight with D of them that a program reads at a time, a power of two."""
    block = MOST_COLUMNS // (2 if swiglu else 1)
    while block > 256 and -D % block > MOST_IDLE * D:
        block //= 2
    return block


LINEAR_STEP = Forms("linear_step", Problem, Plain(_plain), _Triton(_fused))
_cache = LINEAR_STEP.call_cache(Inputs)


_linear_step: NoGradOperator[Inputs] = NoGradOperator("linear_step", Inputs, (), LINEAR_STEP, "run", _output_like)


def linear_step(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    residual: Tensor | None = None,
    swiglu: bool = False,
    overlap: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Return residual + f(rms_norm(x) weight^T), where the norm, the sum and f, SwiGLU, are optional. No gradient.

    Args:
        x: [B, T, D], any float dtype.
        weight: [N, D] in x's dtype, contiguous; with swiglu [2 N, D], the rows of the gate above those of the other.
        norm_weight: [D] in x's dtype, with which x is RMS-normalised; None for x as it is.
        norm_eps: epsilon of the norm.
        residual: [B, T, N] in x's dtype, or None.
        swiglu: True for f(gate, up) = silu(gate) * up.
        overlap: True if the kernel launched before this one on the stream does not write `weight`, which may then be
            read before that kernel has ended (programmatic dependent launch, from compute capability 9.0 on).
        backend: name of a backend, used if it serves this call; None chooses.

    Returns:
        [B, T, N]. A fused kernel rounds once; plain PyTorch after each operation.

    Raises:
        TypeError, ValueError: an argument breaks this contract; the message names it.
        RuntimeError: called while gradients are recorded.
    """
    inputs = Inputs(x, weight, norm_weight, residual, float(norm_eps), swiglu, overlap)
    cached = _cache.get(inputs, backend)
    if type(cached) is Launch:
        return cached(*inputs[:4])
    name = cached or _prepare(inputs, backend)
    if name == "eager":  # which torch.compile traces
        return LINEAR_STEP.backend(name).run(inputs)
    return _linear_step(inputs, name, plain=cached is not None)


class RepeatedLinearStep:
    """`linear_step` with fixed weights and options; only the first call checks its tensors and chooses a form."""

    def __init__(self, weight: Tensor, norm: Any = None, swiglu: bool = False, overlap: bool = False) -> None:
        """Fix the arguments of `linear_step`; `norm` is a module with a weight and an eps."""
        self._weight, self._norm_weight = weight, None if norm is None else norm.weight
        self._options = 1e-6 if norm is None else float(norm.eps), swiglu, overlap
        self._launch: Launch | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return `linear_step(x, weight, residual=residual)`.

        Not checked: x and residual must have the types, shapes, strides, dtypes and device of the first call's, and
        torch's state (grad mode, autocast, transforms) and the requested backend must be the same.
        """
        tensors = x, self._weight, self._norm_weight, residual
        if self._launch is not None:
            return self._launch(*tensors)
        eps, swiglu, overlap = self._options
        y = linear_step(
            x, self._weight, norm_weight=self._norm_weight, norm_eps=eps, residual=residual, swiglu=swiglu,
            overlap=overlap,
        )  # fmt: skip
        found = _cache.get(Inputs(*tensors, *self._options), None)
        self._launch = found if type(found) is Launch else None
        return y


def _prepare(x: Inputs, backend: str | None) -> str:
    """Check `x`; return the name of a form, and remember it or its launch."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in x):
        raise RuntimeError("linear_step has no gradient: call it under torch.no_grad()")
    check(x)
    name: str = LINEAR_STEP.choose(backend, x.x.device, x.x.dtype, work_of(x))
    as_is = name == "triton" and not torch.compiler.is_compiling() and all(map(is_, _evened(x), x))
    _cache.put(x, Launch(x) if as_is else name, backend)
    return name


def check(x: Inputs) -> None:
    """Raise a TypeError or ValueError naming the argument unless `x` keeps the contract."""
    for name in ("x", "weight"):
        check_is_tensor(name, getattr(x, name))
    if x.x.ndim != 3 or x.weight.ndim != 2:
        raise ValueError(
            f"x and weight must have shapes [B, T, D] and [N, D], got {tuple(x.x.shape)} and {tuple(x.weight.shape)}"
        )
    (B, T, D), rows = x.x.shape, x.weight.shape[0]
    if x.swiglu and rows % 2:
        raise ValueError(f"weight must have an even number of rows with swiglu, got {rows}")
    expected = (
        ("weight", (rows, D)), ("norm_weight", (D,)), ("residual", (B, T, rows // 2 if x.swiglu else rows)),
    )  # fmt: skip
    for name, shape in expected:
        if (t := getattr(x, name)) is not None:
            check_tensor(name, t, shape, (x.x.dtype,), x.x, "x")
