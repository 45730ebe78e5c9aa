"""The definition of KDA in plain torch, the oracle of the tests: slow, differentiable by autograd, also in fp64.

Source: Kimi Linear, arXiv 2510.26692, equation (1); gates and norms as flash-linear-attention 0.6 defines them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import sequence_offsets
from .activations import GIVEN, LOG_DECAY, log_decay, write_strength
from .contract import CHUNK, HEAD_GATES, AnyInputs, Inputs, state_dtype

L2NORM_EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension, computed in x's dtype."""
    return x * (x.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt()


def activate(x: AnyInputs, fused: Sequence[str] = ()) -> AnyInputs:
    """Apply in fp32 (fp64 for fp64) the activations of `x` that are not in `fused` ('gate', 'beta', 'qk_l2norm').

    Gates of heads, g [B, T, HV], become [B, T, HV, 1], or [B, T, HV, K] unless HEAD_GATES is in `fused`.
    """
    wide = state_dtype(x.q.dtype)
    if x.g.ndim == 3:
        x = x._replace(g=x.g[..., None], dt_bias=None if x.dt_bias is None else x.dt_bias[:, None])
    if "gate" not in fused and x.gate_activation != LOG_DECAY:
        g = log_decay(x.g.to(wide), x.A_log, x.dt_bias, x.gate_activation, x.lower_bound)
        x = x._replace(g=g, A_log=None, dt_bias=None, gate_activation=LOG_DECAY, lower_bound=0.0)
    if "beta" not in fused and x.beta_activation != GIVEN:
        x = x._replace(beta=write_strength(x.beta.to(wide), x.beta_activation), beta_activation=GIVEN)
    if "qk_l2norm" not in fused and x.qk_l2norm:
        x = x._replace(q=l2norm(x.q.to(wide)), k=l2norm(x.k.to(wide)), qk_l2norm=False)
    return x if HEAD_GATES in fused or x.g.shape[3] == x.q.shape[3] else _repeat_gates(x)


def _repeat_gates(x: AnyInputs) -> AnyInputs:
    """View gates of heads as one for every key channel, [B, T, HV, K]; autograd sums their gradients over channels."""
    K = x.q.shape[3]
    bias = None if x.dt_bias is None else x.dt_bias.expand(-1, K)
    return x._replace(g=x.g.expand(-1, -1, -1, K), dt_bias=bias)


def recurrence(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence, token by token, in fp32 (fp64 for fp64 inputs).

    Per value head, with S [V, K] and a token's q, k [K], v [V], log-decay g [K] and beta:

        S <- S * exp(g);   S <- S + beta (v - S k) k^T;   o = scale * S q

    The first output of a sequence that is not finite is at the first token whose inputs are not; see `kda`.

    Returns:
        o [B, T, HV, V] in v's dtype, the final state [N, HV, V, K], and the states at every 64-token boundary
        [B, T // 64, HV, V, K] (packed: sequence after sequence, unused rows zero).
    """
    out_dtype, wide = x.v.dtype, state_dtype(x.v.dtype)
    x = activate(x)
    B, T = x.q.shape[:2]
    HV, V, K = x.v.shape[2], x.v.shape[3], x.q.shape[3]
    heads = torch.arange(HV, device=x.q.device) // (HV // x.q.shape[2])
    q, k = (t.to(wide)[:, :, heads] for t in (x.q, x.k))
    v, decay, beta = x.v.to(wide), x.g.to(wide).exp(), x.beta.to(wide)
    if x.cu_seqlens is None:
        spans = [(slice(None), 0, T)]  # every batch row at once
    else:
        offsets = sequence_offsets(x.cu_seqlens, T)
        spans = [(slice(n, n + 1), a, b) for n, (a, b) in enumerate(itertools.pairwise(offsets))]
    o: list[Tensor] = []
    finals: list[Tensor] = []
    checkpoints: list[Tensor] = []
    tokens = [*zip(*(t.unbind(1) for t in (q, k, v, decay, beta)), strict=True)]  # a slice's backward writes T tokens
    for sequences, start, end in spans:
        S = v.new_zeros(B, HV, V, K) if x.initial_state is None else x.initial_state[sequences]
        for t, (qt, kt, vt, decay_t, beta_t) in enumerate(tokens[start:end], 1):
            S = S * decay_t[:, :, None]
            error = vt - (S * kt[:, :, None]).sum(-1)
            S = S + (beta_t[..., None] * error)[..., None] * kt[:, :, None]
            o.append(x.scale * (S * qt[:, :, None]).sum(-1))
            if t % CHUNK == 0:
                checkpoints.append(S)
        finals.append(S)
    unused = x.checkpoint_count - len(checkpoints)
    checkpoints += [v.new_zeros(B, HV, V, K)] * unused
    boundary = torch.stack(checkpoints, 1) if checkpoints else v.new_zeros(B, 0, HV, V, K)
    return torch.stack(o, 1).to(out_dtype), torch.cat(finals), boundary
