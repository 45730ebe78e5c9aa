"""The public operator `biased_attention`: checks, and an expanded bias made compact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import (
    DTYPES,
    DtypeError,
    accumulator_dtype,
    check_is_tensor,
    check_offsets,
    check_scale,
    check_tensor,
    dtype_names,
)
from ..operator import Operator
from .contract import ATTENTION, Gradients, Inputs, Outputs, Problem

_attention: Operator[Inputs, Outputs] = Operator(
    "biased_attention", Inputs, Outputs, Gradients, ATTENTION, lambda x: Outputs(x.v.new_empty(x.q.shape)), reads=["o"]
)


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention with an additive bias, differentiable in every tensor, the bias included.

    o_i = sum_j softmax_j(scale q_i . k_j + bias_ij) v_j over the keys j that query i sees. Memory grows with T + S, not
    with T S: neither the scores nor a broadcast bias are materialised. The gradient of the bias is summed in fp32 over
    the dimensions that it is broadcast in, in an order that depends only on the shapes.

    Args:
        q: [B, T, H, D], bf16, fp16, fp32 or fp64.
        k, v: [B, S, H_kv, D] in q's dtype; H a multiple of H_kv, query head h reads key head h // (H // H_kv).
        bias: [1|B, 1|H_kv|H, 1|T, S], in nats, q's dtype or fp32 (fp64 for fp64 inputs); None for no bias. It is
            broadcast where its size is 1 or where it is expanded (stride 0). -inf hides a key.
        scale: factor of the scores; D ** -0.5 if None.
        causal: query i sees only the keys j <= i + S - T, which needs T <= S.
        cu_seqlens: [N + 1] int32 or int64, offsets of the sequences packed along both T and S (then B = 1 and T = S);
            tokens see only their own sequence. Sequences may be empty.
        backend: name of a backend; None chooses (see `kda_layers.explain`).

    Returns:
        o [B, T, H, D] in v's dtype. Where a query sees no key, or only keys with a bias of -inf, it is 0, and so is
        every gradient through it.

    The gradient of an expanded bias goes to the tensor that it is a view of. Where that is impossible (an expanded
    leaf, a view with hooks, inside torch.compile), elements that share memory get equal parts of the sum, which may
    underflow in fp16: prefer size 1.

    Raises:
        TypeError, ValueError: an argument breaks this contract; the message names it, what was expected and what came.
        RuntimeError: the call is under a torch.func transform (grad, vmap, ...) or forward-mode AD, or a second
            derivative is taken.

    Source: FlashAttention-2, arXiv 2307.08691, for the tiles; docs/internals/kernels/biased_attention.md for the bias.
    """
    x = Inputs(q, k, v, bias, cu_seqlens, check_scale(q, scale), causal, False)
    check(x)
    grads = torch.is_grad_enabled()
    if bias is not None:
        x = x._replace(bias=compact(bias), bias_grad=grads and bias.requires_grad)
    needs_grad = grads and any(t.requires_grad for t in x[:4] if t is not None)
    return _attention(x, needs_grad, ATTENTION.choose(backend, q.device, *Problem.fields_of(x, needs_grad))).o


def check(x: Inputs) -> None:
    """Raise a TypeError or ValueError that names the argument unless `x` keeps the contract."""
    q, k = x.q, x.k
    for name, t in (("q", q), ("k", k)):
        check_is_tensor(name, t)
        if t.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions, got shape {tuple(t.shape)}")
    (B, T, H, D), (_, S, H_kv, _) = q.shape, k.shape
    for name, dim in (("H", H), ("H_kv", H_kv), ("D", D)):
        if dim == 0:
            raise ValueError(f"{name} must be at least 1, got 0 (q {tuple(q.shape)}, k {tuple(k.shape)})")
    if H % H_kv != 0:
        raise ValueError(f"q's {H} heads must be a multiple of k's {H_kv} heads (grouped heads)")
    if q.dtype not in DTYPES:
        raise DtypeError(f"q must be one of {dtype_names(DTYPES)}, got {q.dtype}: pass q.to(torch.bfloat16)")
    check_tensor("k", k, (B, S, H_kv, D), (q.dtype,), q)
    check_tensor("v", x.v, (B, S, H_kv, D), (q.dtype,), q)
    if not isinstance(x.causal, bool):
        raise TypeError(f"causal must be True or False, got {x.causal!r}")
    if x.cu_seqlens is not None:
        check_offsets(x.cu_seqlens, q)
        if T != S:
            raise ValueError(f"cu_seqlens needs as many queries as keys, got T = {T} and S = {S}")
    if x.causal and T > S:
        raise ValueError(
            f"causal needs T <= S, as query i sees the keys up to i + S - T, got T = {T} queries and S = {S} keys"
        )
    if x.bias is not None:
        _check_bias(x.bias, q, ((1, B), (1, H_kv, H), (1, T), (S,)))


def _check_bias(bias: Tensor, q: Tensor, allowed: tuple[tuple[int, ...], ...]) -> None:
    check_is_tensor("bias", bias)
    got = list(bias.shape)
    if len(got) != 4:
        raise ValueError(f"bias must have 4 dimensions [1|B, 1|H_kv|H, 1|T, S], got shape {got}")
    # Not `n in sizes`: torch.compile does not find a number in a tuple of symbolic sizes.
    if not all(any(n == size for size in sizes) for n, sizes in zip(got, allowed, strict=True)):
        texts = [" or ".join(map(str, dict.fromkeys(sizes))) for sizes in allowed]
        raise ValueError(f"bias must have shape [1|B, 1|H_kv|H, 1|T, S] = [{', '.join(texts)}], got {got}")
    check_tensor("bias", bias, bias.shape, (q.dtype, accumulator_dtype(q.dtype)), q)


def compact(bias: Tensor) -> Tensor:
    """Return the bias with size 1 in place of every leading dimension that is expanded (stride 0), differentiable."""
    dims = tuple(d for d in range(3) if bias.shape[d] > 1 and bias.stride(d) == 0)
    if not dims:
        return bias
    base = _base(bias)
    if base is None:
        return _Compact.apply(bias, dims)
    size = [1 if d in dims else n for d, n in enumerate(bias.shape)]
    return base.as_strided(size, bias.stride(), bias.storage_offset())


def _base(bias: Tensor) -> Tensor | None:
    """The tensor that the bias is an expanded view of, if the gradient may bypass the view: nothing reads it there."""
    if torch.compiler.is_compiling() or not bias.requires_grad or bias.is_leaf or not bias._is_view():
        return None  # tensors have no _base while compiling
    base, is_read = bias._base, bias.retains_grad or bias._backward_hooks
    return base if base is not None and not is_read and base.requires_grad and base.dtype == bias.dtype else None


class _Compact(torch.autograd.Function):
    """Give every element of the expanded bias an equal part of the sum, as one element with stride 0.

    The backward of the expansion adds the parts up again, and no tensor of the expanded size is ever in memory. The
    parts may underflow in fp16.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, dims: tuple[int, ...]) -> Tensor:
        ctx.shape, ctx.copies = bias.shape, 1
        for d in dims:
            ctx.copies *= bias.shape[d]
            bias = bias.narrow(d, 0, 1)
        return bias

    @staticmethod
    def backward(ctx: Any, d_bias: Tensor) -> Any:
        return (d_bias / ctx.copies).expand(ctx.shape), None
