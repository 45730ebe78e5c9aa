"""The public operators: `kda` for whole sequences, `kda_step` for decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_scale
from ..operator import NoGradOperator, Operator
from .checks import check_decode, check_lower_bound, check_recompute, check_state_dtype, check_values, check_whole
from .contract import DecodeInputs, Gradients, Inputs, KDAOutput, Problem, outputs_like, state_dtypes
from .dispatch import KDA
from .reference import activate

_kda: Operator[Inputs, KDAOutput] = Operator("kda", Inputs, KDAOutput, Gradients, KDA, outputs_like)
_cache, _step_cache = KDA.call_cache(tensors=9), KDA.call_cache(tensors=12)
_kda_step: NoGradOperator[DecodeInputs] = NoGradOperator(
    "kda_step", DecodeInputs, ("state", "state_scale"), KDA, "decode", lambda x: x.v.new_empty(x.v.shape)
)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    gate_activation: str = "lower_bound",
    lower_bound: float | None = None,
    beta_activation: str = "sigmoid",
    qk_l2norm: bool = True,
    scale: float | None = None,
    final_state: bool = False,
    checkpoint_every: int = 0,
    state_dtype: torch.dtype | None = None,
    recompute: bool | float | str = "auto",
    backend: str | None = None,
) -> KDAOutput:
    """Kimi Delta Attention over whole sequences, differentiable in every tensor.

    Per value head and token, with log-decay g [K] and the state S [V, K]:
    S <- S * exp(g);  S <- S + beta (v - S k) k^T;  o = scale * S q.

    Args:
        q, k: [B, T, H, K], bf16, fp16, fp32 or fp64.
        v: [B, T, HV, V] in q's dtype; HV a multiple of H, value head i reads q/k head i // (HV // H).
        g: [B, T, HV, K] gate logits, or the log-decay itself (natural log, <= 0); q's dtype or fp32. A positive
            log-decay makes the state grow without bound: it raises on the CPU and is not checked on other devices.
        beta: [B, T, HV] logits, or beta itself (in [0, 2], checked on the CPU alone); q's dtype or fp32.
        A_log: [HV] fp32 (fp64 for fp64 inputs): log of the gate's rate; optional with 'lower_bound' (rate 1).
        dt_bias: [HV, K] fp32, added to the gate logits; optional.
        initial_state: [N, HV, V, K] fp32 (fp64 for fp64 inputs; with 16-bit inputs also bf16), zero if None; N is B, or
            the number of packed sequences.
        cu_seqlens: [N + 1] int32 or int64, offsets of the sequences packed along T (then B = 1); empty ones allowed.
        gate_activation: 'lower_bound': lower_bound * sigmoid(exp(A_log) * (g + dt_bias));
            'softplus': -exp(A_log) * softplus(g + dt_bias); 'log_decay': g as it is.
        lower_bound: in [-5, 0), in nats per token; required with gate_activation='lower_bound', else None.
        beta_activation: 'sigmoid', '2sigmoid' (negative eigenvalues) or 'given'.
        qk_l2norm: normalise q and k over K: x / sqrt(sum(x^2) + 1e-6).
        scale: factor of the output; K ** -0.5 if None.
        final_state: also return the state after the last token.
        checkpoint_every: 0, or 64 to also return the state at every 64-token boundary of each sequence.
        state_dtype: dtype of the returned states, one that initial_state may have; if None, initial_state's, or fp32
            (fp64) without one. States are computed in fp32 (fp64) and rounded once.
        recompute: True: keep only the inputs for the backward, which runs the forward again; False: also keep what the
            forward computed; a float between 0 and 1: keep that while it is at most this share of the device's memory;
            'auto': 0.01. Only our CUDA backends read it.
        backend: name of a backend; None chooses (see `explain`).

    Returns:
        KDAOutput: o [B, T, HV, V] in v's dtype; final_state [N, HV, V, K] or None; checkpoints
        [B, T // 64, HV, V, K] or None, for packed sequences one after the other, unused rows zero.

    Raises:
        TypeError, ValueError: an argument breaks this contract; the message names it, what was expected, what came.
        RuntimeError: called under a torch.func transform (grad, vmap, ...) or forward-mode differentiation.

    NaN and inf in k, v, g or beta at token t reach the outputs and states of later tokens of the sequence and, as
    chunks are computed as matrices, those of earlier tokens of t's chunk of 64 tokens (counted from the start of the
    sequence); never an earlier chunk or another sequence. To find t, check the inputs with torch.isfinite, or run the
    tokens through `kda_step` or `kda_layers.kernels.reference.recurrence`, whose first bad output is at t.

    Source: Kimi Linear, arXiv 2510.26692, equation (1).
    """
    x = Inputs(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,
        gate_activation, check_lower_bound(gate_activation, lower_bound), beta_activation, bool(qk_l2norm),
        check_scale(q, scale), bool(final_state), checkpoint_every, check_recompute(recompute),
    )  # fmt: skip
    cached = _cache.get(x, state_dtype, backend)
    computed, returned, needs_grad, name, *fused = cached or _prepare(x, state_dtype, backend)
    check_values(x)
    if initial_state is not None and initial_state.dtype != computed:
        x = x._replace(initial_state=initial_state.to(computed))
    out = _kda(activate(x, fused), needs_grad, name, plain=cached is not None)
    if returned == computed:
        return out
    return KDAOutput(out.o, *(None if t is None else t.to(returned) for t in (out.final_state, out.checkpoints)))


def kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_scale: Tensor | None = None,
    state_indices: Tensor | None = None,
    num_accepted: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    gate_activation: str = "lower_bound",
    lower_bound: float | None = None,
    beta_activation: str = "sigmoid",
    qk_l2norm: bool = True,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Decode one or a few tokens per sequence, updating `state` in place; not differentiable.

    Args:
        q, k, v, g, beta, A_log, dt_bias, gate_activation, lower_bound, beta_activation, qk_l2norm, scale, backend:
            as in `kda`; T is the number of new tokens of each sequence, usually 1.
        state: [N, HV, V, K] fp32 (fp64 for fp64 inputs), read and overwritten with the state after the last token.
            With 16-bit inputs, CUDA backends also take bf16: half of the bytes, rounded at every call.
            int8 with `state_scale`, in a quarter of the bytes: docs/guides/caches.md says when not to use it.
            With `state_indices` a pool [slots, HV, V, K], whose other slots are not changed.
        state_scale: [N, HV, V] fp32 with an int8 state, else None; a pool [slots, HV, V] as the state is. Read and
            overwritten with it (see `quantize_state`). Backends that take such states: 'eager' and ours for CUDA; not
            for fp64 inputs.
        state_indices: [N] int32 or int64: each sequence's slot. [N, T]: sequence n reads slot [n, 0] and writes the
            state after its token t to slot [n, t], so that drafted tokens can be taken back. -1 is no slot: a sequence
            that reads it (a row of padding) gets o = 0 and writes nothing, and a state written to it is discarded. Two
            sequences must not share a slot. 'eager', which reads the values, raises on that and on slots outside of the
            pool; on CUDA, where the host reads no value, such slots count as -1, and which update of a shared slot
            survives is undefined.
        num_accepted: [N] int32 or int64, with state_indices [N, T]: how many of the previous call's tokens were
            accepted; sequence n then reads slot [n, num_accepted[n] - 1]. Ignored in rows where every slot is -1.
        cu_seqlens: as in `kda`, for sequences of different lengths.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        TypeError, ValueError: as `kda`, or the state cannot be written (it is expanded, or an inference tensor outside
            of torch.inference_mode()); the state is then unchanged.
    """
    x = DecodeInputs(
        q, k, v, g, beta, state, A_log, dt_bias, state_indices, num_accepted, cu_seqlens, state_scale,
        gate_activation, check_lower_bound(gate_activation, lower_bound), beta_activation, bool(qk_l2norm),
        check_scale(q, scale),
    )  # fmt: skip
    cached = _step_cache.get(x, backend)
    name, *fused = cached or _prepare_step(x, backend)
    check_values(x)
    return _kda_step(activate(x, fused), name, plain=cached is not None)


def _prepare(x: Inputs, state_dtype: torch.dtype | None, backend: str | None) -> tuple[Any, ...]:
    """Check `x`; return the dtypes of states as computed and returned, needs_grad, the backend and what it fuses."""
    check_whole(x)
    computed, returned = state_dtypes(x.q.dtype)[0], check_state_dtype(x, state_dtype)
    needs_grad = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in x)
    chosen = KDA.choose(backend, x.q.device, *Problem.fields_of(x, needs_grad))
    prepared = computed, returned, needs_grad, *chosen
    return _cache.put(x, prepared, state_dtype, backend)


def _prepare_step(x: DecodeInputs, backend: str | None) -> tuple[Any, ...]:
    """Check `x`; return the backend and what it fuses."""
    check_decode(x)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in x):
        raise ValueError("kda_step updates the state in place and has no gradient: call it under torch.no_grad()")
    chosen: tuple[Any, ...] = KDA.choose(backend, x.q.device, *Problem.fields_of(x))
    return _step_cache.put(x, chosen, backend)
