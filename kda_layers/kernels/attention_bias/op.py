"""The public operator `biased_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_scale
from ..operator import Operator
from .checks import check
from .compact import compact
from .contract import Gradients, Inputs, Outputs, Problem
from .dispatch import ATTENTION

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
