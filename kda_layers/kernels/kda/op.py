"""The public operators: `kda` for whole sequences, `kda_step` for decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_scale
from ..operator import NoGradOperator, Operator, no_output
from ..tracing import may_run_again, needs_gradients
from .checks import (
    check_decode,
    check_prefill,
    check_recompute,
    check_segments,
    check_state_dtype,
    check_values,
    check_whole,
    gate_bound,
)
from .contract import (
    DecodeInputs,
    Gradients,
    Inputs,
    KDAOutput,
    PrefillInputs,
    Problem,
    outputs_like,
    state_dtypes,
)
from .dispatch import KDA
from .reference import activate

_kda: Operator[Inputs, KDAOutput] = Operator("kda", Inputs, KDAOutput, Gradients, KDA, outputs_like)
_cache, _step_cache, _prefill_cache = map(KDA.call_cache, (Inputs, DecodeInputs, PrefillInputs))
_kda_prefill: NoGradOperator[PrefillInputs] = NoGradOperator(
    "kda_prefill", PrefillInputs, ("o", "state", "checkpoints"), KDA, "prefill", no_output
)
_kda_step: NoGradOperator[DecodeInputs] = NoGradOperator(
    "kda_step", DecodeInputs, ("state", "state_scale"), KDA, "decode", lambda x: x.v.new_empty(x.v.shape)
)
_kda_step_into: NoGradOperator[DecodeInputs] = NoGradOperator(
    "kda_step_into", DecodeInputs, ("state", "state_scale", "out"), KDA, "decode", no_output
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
    segments: str = "auto",
    backend: str | None = None,
    state_indices: Tensor | None = None,
    checkpoint_at: Tensor | None = None,
    out: Tensor | None = None,
) -> KDAOutput:
    """Kimi Delta Attention over whole sequences, differentiable in every tensor.

    Tokens come before heads, [B, T, H, D], as in flash-linear-attention; transpose tensors [B, H, T, D] of PyTorch's
    attention. If all of them, beta too, have their heads first, T and H cannot be told apart.

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
        lower_bound: in [-5, 0), in nats per token; None for -5 with gate_activation='lower_bound', as the layer's
            default; only None with others.
        beta_activation: 'sigmoid', '2sigmoid' (negative eigenvalues) or 'given'.
        qk_l2norm: normalise q and k over K: x / sqrt(sum(x^2) + 1e-6).
        scale: factor of the output; K ** -0.5 if None.
        final_state: also return the state after the last token. With bf16 inputs our CUDA backend then computes the
            gradients of v and beta with more bits, as gradients of the state need, and keeps 7 % more for the backward.
        checkpoint_every: 0, or 64 to also return the state at every 64-token boundary of each sequence.
        state_dtype: dtype of the returned states, one that initial_state may have; if None, initial_state's, or fp32
            (fp64) without one. States are computed in fp32 (fp64) and rounded once.
        recompute: True: keep only the inputs for the backward, which runs the forward again; False: also keep what the
            forward computed; a float between 0 and 1: keep that while it is at most this share of the device's memory;
            'auto': 0.01. Only our CUDA backends read it.
        segments: 'never', 'always' or 'auto': whether a long sequence of few heads is cut into segments that a GPU
            computes at once, exactly for any decays; outputs differ by rounding from those of the sequence in one
            piece. Where it is cut depends on its own length and HV alone, so that it has the same bits in any batch.
            'always' cuts what is longer than 1,024 tokens, if HV is at most 32. It is served by the 'sm90' and 'sm100'
            backends, and not with what engines ask for. 'auto' cuts from 65,536 tokens on if HV is at most 4, where one
            or two sequences gain (more of them lose), but nothing where 'always' is not served, and nothing of a call
            that takes or returns states: a prefill in parts has the bits of the whole.
        backend: name of a backend; None chooses (see `explain`).
        state_indices, checkpoint_at, out: for inference engines, under torch.no_grad(); no value is read on the host of
            a GPU, so that a CUDA graph can capture the call.
        state_indices: [N] int32 or int64: initial_state is a pool [slots, HV, V, K] whose slot state_indices[n] holds
            the state before sequence n, zeros for a new one, and is overwritten with the state after it. -1 is no slot:
            a padding sequence, which gets o = 0 (on a CPU, a given beta and log-decay of it are checked, too). Two
            sequences must not share a slot. As in `kda_step`, 'eager' raises on that and on slots outside of the pool;
            on CUDA such slots count as -1, and which update of a shared slot survives is undefined. Not with
            final_state, which is in the pool.
        checkpoint_at: [N] int32 or int64: return one state of each sequence, after checkpoint_at[n] tokens, a multiple
            of 64 up to its length. -1: none, the row is zero, as for a padding sequence. Other values raise with
            'eager' and give zeros on CUDA. Not with checkpoint_every.
        out: [B, T, HV, V] contiguous, in v's dtype: o is written there. It must not overlap an input.

    Returns:
        KDAOutput: o [B, T, HV, V] in v's dtype; final_state [N, HV, V, K] or None; checkpoints
        [B, T // 64, HV, V, K] or None, for packed sequences one after the other, unused rows zero; with checkpoint_at
        [N, HV, V, K].

    Raises:
        TypeError, ValueError: an argument breaks this contract; the message names it, what was expected, what came.
        RuntimeError: called under a torch.func transform (grad, vmap, ...) or forward-mode differentiation.

    NaN and inf in k, v, g or beta at token t reach the outputs and states of later tokens of the sequence and, as
    chunks are computed as matrices, those of earlier tokens of t's chunk of 64 tokens (counted from the start of the
    sequence); never an earlier chunk or another sequence. To find t, check the inputs with torch.isfinite, or run the
    tokens through `kda_step` or `kda_layers.kernels.reference.recurrence`, whose first bad output is at t.

    Source: Kimi Linear, arXiv 2510.26692, equation (1).
    """
    kept, again = check_recompute(recompute), may_run_again()
    x = Inputs(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,
        gate_activation, gate_bound(gate_activation, lower_bound), beta_activation, bool(qk_l2norm),
        check_scale(q, scale), bool(final_state), checkpoint_every, 0.0 if again else kept,  # no backward reads it
        check_segments(segments), bool(final_state),
    )  # fmt: skip
    if not (state_indices is checkpoint_at is out is None):
        return _prefill(x, state_indices, checkpoint_at, out, state_dtype, backend)
    cached = _cache.get(x, state_dtype, backend, again)
    computed, returned, needs_grad, name, *fused = cached or _prepare(x, state_dtype, backend, again)
    check_values(x)
    if initial_state is not None and initial_state.dtype != computed:
        x = x._replace(initial_state=initial_state.to(computed))
    result = _kda(activate(x, fused), needs_grad, name, plain=cached is not None)
    if returned == computed:
        return result
    states = result.final_state, result.checkpoints
    return KDAOutput(result.o, *(None if t is None else t.to(returned) for t in states))


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
    out: Tensor | None = None,
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
        out: [B, T, HV, V] contiguous, in v's dtype: o is written there and nothing is allocated. It must not overlap an
            input.

    Returns:
        o [B, T, HV, V] in v's dtype, or `out`.

    Raises:
        TypeError, ValueError: as `kda`, or the state cannot be written (it is expanded, or an inference tensor outside
            of torch.inference_mode()); the state is then unchanged.
    """
    x = DecodeInputs(
        q, k, v, g, beta, state, A_log, dt_bias, state_indices, num_accepted, cu_seqlens, state_scale, out,
        gate_activation, gate_bound(gate_activation, lower_bound), beta_activation, bool(qk_l2norm),
        check_scale(q, scale),
    )  # fmt: skip
    cached = _step_cache.get(x, backend)
    name, *fused = cached or _prepare_step(x, backend)
    check_values(x)
    x, plain = activate(x, fused), cached is not None
    if out is None:
        return _kda_step(x, name, plain)
    _kda_step_into(x, name, plain)
    return out


def _prepare(x: Inputs, state_dtype: torch.dtype | None, backend: str | None, again: bool) -> tuple[Any, ...]:
    """Check `x`; return the dtypes of states as computed and returned, needs_grad, the backend and what it fuses."""
    check_whole(x)
    computed, returned = state_dtypes(x.q.dtype)[0], check_state_dtype(x, state_dtype)
    needs_grad = needs_gradients(x)
    chosen = KDA.choose(backend, x.q.device, *Problem.fields_of(x, needs_grad))
    prepared = computed, returned, needs_grad, *chosen
    return _cache.put(x, prepared, state_dtype, backend, again)


def _prefill(
    given: Inputs, slots: Tensor | None, at: Tensor | None, out: Tensor | None, dtype: torch.dtype | None, backend: Any
) -> KDAOutput:
    """`kda` for engines: everything that it returns is written by the op."""
    if given.segments == "always":
        raise ValueError(
            "segments='always' is not served with state_indices, checkpoint_at or out, needs segments='never' or 'auto'"
        )
    o: Any = out  # None until a new one is made
    x = PrefillInputs(
        *given[:5], o, given.initial_state, None, given.A_log, given.dt_bias, slots, at,
        given.cu_seqlens, given.gate_activation, given.lower_bound, given.beta_activation, given.qk_l2norm, given.scale,
    )  # fmt: skip
    cached = _prefill_cache.get(x, given.final_state, given.checkpoint_every, dtype, backend)
    state_shape, computed, returned, name, *fused = cached or _prepare_prefill(x, given, dtype, backend)
    check_values(given)
    if out is None:
        x = x._replace(o=torch.empty_like(x.v, memory_format=torch.contiguous_format))
    if at is not None:
        x = x._replace(checkpoints=x.q.new_zeros(state_shape, dtype=computed))
    if slots is None:  # the caller's initial state is not written
        if x.state is not None:
            x = x._replace(state=x.state.to(computed, copy=True, memory_format=torch.contiguous_format))
        elif given.final_state:
            x = x._replace(state=x.q.new_zeros(state_shape, dtype=computed))
    _kda_prefill(activate(x, fused), name, plain=cached is not None)
    final = x.state if given.final_state else None
    return KDAOutput(x.o, *(None if t is None else t.to(returned) for t in (final, x.checkpoints)))


def _prepare_prefill(
    x: PrefillInputs, given: Inputs, dtype: torch.dtype | None, backend: str | None
) -> tuple[Any, ...]:
    """Check a call; return the shape and dtypes of states [N, HV, V, K], the backend and what it fuses."""
    check_prefill(x, given.final_state, given.checkpoint_every)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in x):
        raise ValueError(
            "state_indices, checkpoint_at and out are for inference and have no gradient: call kda under "
            "torch.no_grad(), or without them"
        )
    state_shape = x.sequences, *x.v.shape[2:], x.q.shape[3]
    dtypes = state_dtypes(x.q.dtype)[0], check_state_dtype(given, dtype)
    prepared = state_shape, *dtypes, *KDA.choose(backend, x.q.device, *Problem.fields_of(x))
    return _prefill_cache.put(x, prepared, given.final_state, given.checkpoint_every, dtype, backend)


def _prepare_step(x: DecodeInputs, backend: str | None) -> tuple[Any, ...]:
    """Check `x`; return the backend and what it fuses."""
    check_decode(x)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in x):
        raise ValueError("kda_step updates the state in place and has no gradient: call it under torch.no_grad()")
    chosen: tuple[Any, ...] = KDA.choose(backend, x.q.device, *Problem.fields_of(x))
    return _step_cache.put(x, chosen, backend)
