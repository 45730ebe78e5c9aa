"""Cases of the tests of `biased_attention`: inputs, the truth, and the allowed distance of a result from it.

The truth is dense attention in fp64, with the bias expanded and autograd through every score. The yardstick is the same
in the working dtype; no backend may be more than twice as wrong as that plus one rounding of the dtype.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kda_layers.kernels import biased_attention
from kda_layers.kernels.attention_bias.contract import ATTENTION, Backend, Gradients, Inputs, Problem
from kda_layers.kernels.checks import accumulator_dtype
from kda_layers.testing.cases import Call
from tests.kernels.cases import BEST_DEVICE, BF16, FP16, FP64, budget, error

PLACES = [("eager", BEST_DEVICE), ("triton", BEST_DEVICE)]
on_every_backend = pytest.mark.parametrize(("backend", "device"), PLACES, ids=lambda v: v)


@dataclass(frozen=True)
class BiasedCase(Call):
    """One call of `biased_attention`."""

    T: int = 65
    S: int = 0  # 0: as T
    B: int = 1
    H_kv: int = 1
    group: int = 1
    D: int = 16
    dtype: torch.dtype = BF16
    bias: str = "1H1S"  # which sizes are not 1: batch, heads (H, or K for key heads), queries; "" for no bias
    bias_wide: bool = False  # in fp32 (fp64 for fp64), not in q's dtype
    hidden: float = 0.0  # share of keys with a bias of -inf
    causal: bool = True
    scale: float | None = None
    lengths: tuple[int, ...] | None = None  # of packed sequences; T is then their sum
    offsets_dtype: torch.dtype = torch.int32
    layout: str = "contiguous"  # or "fused" (slices of one tensor), "heads_first" ([B, H, T, D] transposed)


def make_inputs(case: BiasedCase, device: str = "cpu") -> Inputs:
    """The inputs of a case, the same on every device and in every run."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    T = case.T if case.lengths is None else sum(case.lengths)
    B, S, H = case.B, case.S or T, case.H_kv * case.group

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=FP64)

    q, k, v = (normal(B, n, h, case.D).to(case.dtype) for n, h in ((T, H), (S, case.H_kv), (S, case.H_kv)))
    if case.layout == "heads_first":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif case.layout == "fused":
        q, k, v = (torch.cat((t, t), -1)[..., : case.D] for t in (q, k, v))
    bias = None
    if case.bias:
        sizes = {"1": 1, "B": B, "H": H, "K": case.H_kv, "T": T, "S": S}
        bias = normal(*(sizes[c] for c in case.bias))
        if case.hidden:
            bias = bias.masked_fill(torch.rand(bias.shape, generator=generator) < case.hidden, -torch.inf)
        bias = bias.to(accumulator_dtype(case.dtype) if case.bias_wide else case.dtype)
        if case.layout != "contiguous":
            bias = bias.mT.contiguous().mT
    offsets = None if case.lengths is None else torch.tensor((0, *case.lengths)).cumsum(0).to(case.offsets_dtype)
    scale = case.D**-0.5 if case.scale is None else case.scale
    q, k, v, bias, offsets = (None if t is None else _moved(t, device) for t in (q, k, v, bias, offsets))
    return Inputs(q, k, v, bias, offsets, scale, case.causal, False)


def _moved(t: Tensor, device: str) -> Tensor:
    """`t` on another device, with its strides."""
    if device == "cpu":
        return t
    moved = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    return moved.copy_(t)


def map_tensors(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    return Inputs(*(change(t) if isinstance(t, Tensor) else t for t in x))


def to_fp64(x: Inputs) -> Inputs:
    """The same values on the CPU in fp64."""
    return map_tensors(x, lambda t: t.cpu().double() if t.is_floating_point() else t.cpu())


# ---------------------------------------------------------------- running


def call(x: Inputs, backend: str | None = None) -> Tensor:
    """`biased_attention` on the fields of Inputs."""
    return biased_attention(
        x.q, x.k, x.v, x.bias, scale=x.scale, causal=x.causal, cu_seqlens=x.cu_seqlens, backend=backend
    )


def dense(x: Inputs, backwards: bool = False) -> Tensor:
    """The definition, score by score, in the dtype of `x`; `backwards` sums over tokens from the last to the first."""
    if x.cu_seqlens is not None:
        parts = []
        for a, b in itertools.pairwise(x.cu_seqlens.tolist()):
            bias = x.bias
            if bias is not None:
                bias = bias[..., a:b] if bias.shape[2] == 1 else bias[:, :, a:b, a:b]
            parts.append(dense(Inputs(x.q[:, a:b], x.k[:, a:b], x.v[:, a:b], bias, None, *x[5:]), backwards))
        return torch.cat(parts, 1)
    (B, T, H, _), (_, S, H_kv, _) = x.q.shape, x.k.shape
    turned = (lambda t, *dims: t.flip(dims)) if backwards else (lambda t, *dims: t)
    k, v = (turned(t.repeat_interleave(H // H_kv, 2), 1) for t in (x.k, x.v))
    scores = torch.einsum("bthd,bshd->bhts", turned(x.q, 1), k) * x.scale
    if x.bias is not None:
        bias = x.bias if x.bias.shape[1] in (1, H) else x.bias.repeat_interleave(H // H_kv, 1)
        scores = scores + turned(bias.expand(B, H, T, S), 2, 3)
    if x.causal:
        seen = torch.arange(S, device=x.q.device) <= torch.arange(T, device=x.q.device)[:, None] + S - T
        seen = turned(seen, 0, 1)
        scores = scores.masked_fill(~seen, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0)
    # Not by torch.softmax: what a backward has that keeps no scores is their logsumexp, rounded.
    p = (scores - scores.logsumexp(-1, keepdim=True)).exp().masked_fill(blind, 0)
    return turned(torch.einsum("bhts,bshd->bthd", p.to(v.dtype), v), 1)


def output_gradient(x: Inputs) -> Tensor:
    """A random gradient of the output, rounded to its dtype."""
    return torch.randn(x.q.shape, generator=torch.Generator().manual_seed(1)).to(x.v.dtype)


def run(fn: Callable[[Inputs], Tensor], x: Inputs, d_o: Tensor | None = None) -> dict[str, Tensor]:
    """The output of `fn` on `x` and the gradient of every tensor for `d_o` (random by default)."""
    names = [n for n in Gradients._fields if getattr(x, n) is not None]
    x = x._replace(**{n: getattr(x, n).detach().requires_grad_() for n in names})
    o = fn(x)
    d_o = output_gradient(x) if d_o is None else d_o
    grads = torch.autograd.grad(o, [getattr(x, n) for n in names], d_o.to(o))
    return {"o": o.detach()} | {f"d_{n}": d for n, d in zip(names, grads, strict=True)}


# ---------------------------------------------------------------- judging


def expected(x: Inputs, d_o: Tensor | None = None) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The truth of `x` and each tensor's limit.

    The yardstick sums in either direction: the rounding of one order alone, of few elements, may be small by chance.
    """
    truth = run(dense, to_fp64(x), d_o)
    yardsticks = [run(functools.partial(dense, backwards=b), x, d_o) for b in (False, True)]
    return truth, {n: budget(max(error(y[n], t) for y in yardsticks), x.q.dtype) for n, t in truth.items()}


def serve(backend: str, problem: Problem, required: frozenset[str]) -> Backend:
    """The backend, or a skip with its reasons for refusing; a failure instead if it is required and the problem is
    what it exists for (16 bits on the best device of this machine)."""
    chosen = ATTENTION.backends()[backend]
    reasons = chosen.unsupported(problem)
    if not reasons and backend == "triton" and problem.device == "cpu":
        reasons = interpreter_problems()
    if reasons:
        text = f"{backend} cannot serve [{problem}]: " + "; ".join(reasons)
        if backend in required and problem.dtype == BF16 and problem.device == BEST_DEVICE:
            pytest.fail("KDA_LAYERS_REQUIRE: " + text)
        pytest.skip(text)
    return chosen


@functools.cache
def interpreter_problems() -> list[str]:
    """Why Triton's interpreter cannot run anything here: Triton 3.6 counts loops in a way that numpy 2.4 refuses."""
    from triton.runtime.errors import InterpreterError

    try:
        ATTENTION.backends()["triton"].forward(make_inputs(BiasedCase(T=1, dtype=FP16)), False)
    except InterpreterError as problem:
        if "only 0-dimensional arrays" in str(problem):
            return [f"Triton's interpreter fails: {problem}"]
        raise
    return []
