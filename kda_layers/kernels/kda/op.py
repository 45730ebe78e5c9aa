"""The public operators: `kda` for whole sequences, `kda_prefill` and `kda_step` for inference engines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_scale
from ..deprecation import new_keywords, warn_deprecated
from ..operator import NoGradOperator, Operator, no_output
from ..tracing import is_plain, may_run_again, needs_gradients
from . import checks
from .contract import (
    KDA,
    DecodeInputs,
    Gradients,
    Inputs,
    KDAOutput,
    PrefillInputs,
    PrefillOutput,
    Problem,
    outputs_like,
    state_dtypes,
    state_shape,
)
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
    return_final_state: bool = False,
    checkpoint_every: int = 0,
    state_dtype: torch.dtype | None = None,
    recompute: str = "auto",
    memory_share: float | None = None,
    segments: str = "auto",
    state_layout: str = "vk",
    backend: str | None = None,
    state_indices: Tensor | None = None,
    checkpoint_at: Tensor | None = None,
    out: Tensor | None = None,
    final_state: bool | None = None,
) -> KDAOutput:
    """Kimi Delta Attention over whole sequences, differentiable in every tensor; states are [N, HV, V, K].

    Tokens come before heads, [B, T, H, D], as in flash-linear-attention; transpose tensors [B, H, T, D] of PyTorch's
    attention. If all of them, beta too, have their heads first, T and H cannot be told apart.

    Per value head and token, with log-decay g [K] and the state S [V, K]:
    S <- S * exp(g);  S <- S + beta (v - S k) k^T;  o = scale * S q.

    Args:
        q, k: [B, T, H, K], bf16, fp16, fp32 or fp64.
        v: [B, T, HV, V] in q's dtype; HV a multiple of H, value head i reads q/k head i // (HV // H).
        g: [B, T, HV, K] gate logits, or the log-decay itself (natural log, <= 0); q's dtype or fp32. A positive
            log-decay makes the state grow without bound: it raises on the CPU and is not checked on other devices.
            [B, T, HV]: one gate for all channels of a head, as gated delta nets have (Qwen3-Next, Qwen3.5, OLMo).
        beta: [B, T, HV] logits, or beta itself (in [0, 2], checked on the CPU alone); q's dtype or fp32.
        A_log: [HV] fp32 (fp64 for fp64 inputs): log of the gate's rate; optional with 'lower_bound' (rate 1).
        dt_bias: [HV, K] fp32 ([HV] with g [B, T, HV]), added to the gate logits; optional.
        initial_state: [N, HV, V, K] fp32 or bf16 (fp64 for fp64 inputs), zero if None; N is B, or the number of packed
            sequences.
        cu_seqlens: [N + 1] int32 or int64, offsets from 0 to T of the sequences packed along T (then B = 1), checked on
            the CPU alone; empty ones allowed.
        gate_activation: 'lower_bound': lower_bound * sigmoid(exp(A_log) * (g + dt_bias));
            'softplus': -exp(A_log) * softplus(g + dt_bias); 'log_decay': g as it is.
        lower_bound: in [-5, 0), in nats per token; None for -5 with gate_activation='lower_bound', as the layer's
            default; only None with others.
        beta_activation: 'sigmoid', '2sigmoid' (negative eigenvalues) or 'given'.
        qk_l2norm: normalise q and k over K: x / sqrt(sum(x^2) + 1e-6).
        scale: factor of the output; K ** -0.5 if None.
        return_final_state: also return the state after the last token. With bf16 inputs our CUDA backend then computes
            the gradients of v and beta with more bits, as gradients of the state need, and keeps 7 % more for the
            backward.
        checkpoint_every: 0, or 64 to also return the state at every 64-token boundary of each sequence.
        state_dtype: dtype of the returned states, one that initial_state may have; if None, initial_state's, or fp32
            (fp64) without one. States are computed in fp32 (fp64) and rounded once.
        recompute: 'always': keep only the inputs for the backward, which runs the forward again; 'never': also keep
            what the forward computed; 'auto': keep that while it is at most `memory_share` of the device's memory. Only
            our CUDA backends read it.
        memory_share: between 0 and 1, with recompute='auto' only; 0.01 if None.
        segments: 'never', 'always' or 'auto': whether a long sequence of few heads is cut into segments that a GPU
            computes at once, exactly for any decays; outputs differ by rounding from those of the sequence in one
            piece. Where it is cut depends on its own length and HV alone, so that it has the same bits in any batch.
            'always' cuts what is longer than 1,024 tokens, if HV is at most 32. It is served by the 'sm90' and 'sm100'
            backends. 'auto' cuts from 65,536 tokens on if HV is at most 4, where one
            or two sequences gain (more of them lose), but nothing where 'always' is not served, and nothing of a call
            that takes or returns states: a prefill in parts has the bits of the whole.
        state_layout: 'vk', or 'kv' where all states of the call are [N, HV, K, V], as flash-linear-attention's are by
            default. An initial state is then copied; returned states are views that `kda_prefill` and `kda_step` can
            update in place.
        backend: name of a backend; None chooses (see `explain`).
        state_indices, checkpoint_at, out: deprecated, those of `kda_prefill`; with state_indices, initial_state is its
            `state`.
        final_state: deprecated, the old name of return_final_state.

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
    if final_state is not None:
        if return_final_state:
            raise TypeError("kda() got return_final_state under its old name, too")
        return_final_state = new_keywords("kda", dict(final_state=final_state))["return_final_state"]
    kept, kv = checks.check_recompute(recompute, memory_share), checks.check_state_layout(state_layout)
    again = may_run_again()
    if kv and initial_state is not None:
        initial_state = checks.from_kv("initial_state", initial_state, in_place=state_indices is not None)
    x = Inputs(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,
        gate_activation, checks.gate_bound(gate_activation, lower_bound), beta_activation, bool(qk_l2norm),
        check_scale(q, scale), bool(return_final_state), checkpoint_every,
        0.0 if again else kept,  # no backward reads it
        checks.check_segments(segments), bool(return_final_state),
    )  # fmt: skip
    if not (state_indices is checkpoint_at is out is None):
        return _in_layout(_as_prefill(x, state_indices, checkpoint_at, out, state_dtype, backend), kv)
    cached = _cache.get(x, state_dtype, backend, again)
    computed, returned, needs_grad, name, *fused = cached or _prepare(x, state_dtype, backend, again)
    checks.check_values(x)
    if initial_state is not None and initial_state.dtype != computed:
        x = x._replace(initial_state=initial_state.to(computed))
    result = _kda(activate(x, fused), needs_grad, name, plain=cached is not None)
    if returned != computed:
        states = result.final_state, result.checkpoints
        result = KDAOutput(result.o, *(None if t is None else t.to(returned) for t in states))
    return _in_layout(result, kv)


def _in_layout(out: Any, kv: bool) -> Any:
    """Return outputs with their states as views [..., K, V] if `kv`."""
    return type(out)(out.o, *(None if t is None else t.mT for t in out[1:])) if kv else out


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_indices: Tensor | None = None,
    checkpoint_at: Tensor | None = None,
    gate_activation: str = "lower_bound",
    lower_bound: float | None = None,
    beta_activation: str = "sigmoid",
    qk_l2norm: bool = True,
    scale: float | None = None,
    state_layout: str = "vk",
    backend: str | None = None,
    out: Tensor | None = None,
) -> PrefillOutput:
    """Run whole sequences or parts of them, updating `state` [N, HV, V, K] in place; not differentiable.

    No value of a tensor is read on the host of a GPU, so that a CUDA graph can capture the call.

    Args:
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, gate_activation, lower_bound, beta_activation, qk_l2norm, scale,
            backend: as in `kda`.
        state: [N, HV, V, K] fp32 or bf16 (fp64 for fp64 inputs), the state before each sequence, overwritten with the
            one after it. None: zero, and not kept. With state_indices a pool [slots, HV, V, K],
            whose other slots are not changed.
        state_indices: [N] int32 or int64, each sequence's slot. -1 is no slot: a padding sequence, which gets o = 0 (on
            a CPU, a given beta and log-decay of it are checked, too). Two sequences must not share a slot. As in
            `kda_step`, 'eager' raises on that and on slots outside of the pool; on CUDA such slots count as -1, and
            which update of a shared slot survives is undefined.
        state_layout: 'vk', or 'kv' where `state` and checkpoints are [..., K, V]. As `state` is updated in place and
            kernels read rows of K, its memory must still be [V, K]: a view like `t.mT` of a contiguous t [N, HV, V, K].
        checkpoint_at: [N] int32 or int64: return one state of each sequence, after checkpoint_at[n] tokens, a multiple
            of 64 up to its length. -1: none, the row is zero, as for a padding sequence. Other values raise with
            'eager' and give zeros on CUDA.
        out: [B, T, HV, V] contiguous, in v's dtype: o is written there. It must not overlap an input.

    Returns:
        PrefillOutput: o [B, T, HV, V] in v's dtype, or `out`; checkpoints [N, HV, V, K] in fp32 (fp64 for fp64 inputs)
        with checkpoint_at, else None.

    Raises:
        TypeError, ValueError: as `kda_step`.
    """
    kv = checks.check_state_layout(state_layout)
    if kv and state is not None:
        state = checks.from_kv("state", state, in_place=True)
    o: Any = out  # None until a new one is made
    x = PrefillInputs(
        q, k, v, g, beta, o, state, None, A_log, dt_bias, state_indices, checkpoint_at, cu_seqlens,
        gate_activation, checks.gate_bound(gate_activation, lower_bound), beta_activation, bool(qk_l2norm),
        check_scale(q, scale),
    )  # fmt: skip
    return _in_layout(_prefill(x, backend), kv)


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
    state_layout: str = "vk",
    backend: str | None = None,
    out: Tensor | None = None,
    initial_state: Tensor | None = None,
    initial_indices: Tensor | None = None,
) -> Tensor:
    """Decode one or a few tokens per sequence, updating `state` [N, HV, V, K] in place; not differentiable.

    Args:
        q, k, v, g, beta, A_log, dt_bias, gate_activation, lower_bound, beta_activation, qk_l2norm, scale, backend:
            as in `kda`; T is the number of new tokens of each sequence, usually 1.
        state: [N, HV, V, K] fp32 (fp64 for fp64 inputs), read and overwritten with the state after the last token.
            bf16, in half of the bytes, is rounded at every call. Backends that take it: 'eager' and ours for CUDA.
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
        state_layout: as in `kda_prefill`.
        num_accepted: [N] int32 or int64, with state_indices [N, T]: how many of the previous call's tokens were
            accepted; sequence n then reads slot [n, num_accepted[n] - 1]. Ignored in rows where every slot is -1.
        cu_seqlens: as in `kda`, for sequences of different lengths.
        out: [B, T, HV, V] contiguous, in v's dtype: o is written there and nothing is allocated. It must not overlap an
            input.
        initial_state, initial_indices: a pool [slots, HV, V, K] in the state's dtype that does not overlap `state`, and
            a slot of it for each sequence, [N] int32 or int64, -1 for padding. Sequences start from there, and
            `state` is only written, to state_indices, which must be given: drafts leave the states untouched. Not with
            int8 states or num_accepted.

    Returns:
        o [B, T, HV, V] in v's dtype, or `out`.

    Raises:
        TypeError, ValueError: as `kda`, or the state cannot be written (it is expanded, or an inference tensor outside
            of torch.inference_mode()); the state is then unchanged.
    """
    if checks.check_state_layout(state_layout):
        state = checks.from_kv("state", state, in_place=True)
        if initial_state is not None:
            initial_state = checks.from_kv("initial_state", initial_state, in_place=False)
    x = DecodeInputs(
        q, k, v, g, beta, state, A_log, dt_bias, state_indices, num_accepted, cu_seqlens, state_scale, out, None,
        None, initial_state, initial_indices, gate_activation, checks.gate_bound(gate_activation, lower_bound),
        beta_activation, bool(qk_l2norm), check_scale(q, scale),
    )  # fmt: skip
    cached = _step_cache.get(x, backend)
    name, run, *fused = cached or _prepare_step(x, backend)
    checks.check_values(x)
    x, plain = activate(x, fused), cached is not None
    if out is None:
        return _kda_step(x, name, plain, run)
    _kda_step_into(x, name, plain, run)
    return out


def _prepare(x: Inputs, state_dtype: torch.dtype | None, backend: str | None, again: bool) -> tuple[Any, ...]:
    """Check `x`; return the dtypes of states as computed and returned, needs_grad, the backend and what it fuses."""
    checks.check_whole(x)
    computed, returned = state_dtypes(x.q.dtype)[0], checks.check_state_dtype(x, state_dtype)
    needs_grad = needs_gradients(x)
    chosen = KDA.choose(backend, x.q.device, *Problem.fields_of(x, needs_grad))
    prepared = computed, returned, needs_grad, *chosen
    return _cache.put(x, prepared, state_dtype, backend, again)


def _as_prefill(
    given: Inputs, slots: Tensor | None, at: Tensor | None, out: Tensor | None, dtype: torch.dtype | None, backend: Any
) -> KDAOutput:
    """`kda` with the keywords of `kda_prefill`; the initial state is not written without `slots`."""
    warn_deprecated("kda(state_indices=, checkpoint_at=, out=)", "kda_layers.kda_prefill, which updates the states")
    if given.segments == "always":
        raise ValueError("segments must be 'never' or 'auto' with state_indices, checkpoint_at or out, got 'always'")
    if given.checkpoint_every:
        raise ValueError(
            f"checkpoint_every must be 0 with state_indices, checkpoint_at or out, got {given.checkpoint_every}: pass "
            "checkpoint_at"
        )
    state = given.initial_state
    if slots is None:
        checks.check_whole(given)
        computed = state_dtypes(given.q.dtype)[0]
        if state is not None:
            state = state.to(computed, copy=True, memory_format=torch.contiguous_format)
        elif given.final_state:
            state = given.q.new_zeros(state_shape(given), dtype=computed)
    elif state is None or given.final_state:
        raise ValueError(
            "initial_state must be a pool of states and return_final_state False with state_indices, which has the "
            f"states after the call, got {type(state).__name__} and {given.final_state}"
        )
    o, boundaries = _prefill(
        PrefillInputs(
            *given[:5], out, state, None, given.A_log, given.dt_bias, slots, at, given.cu_seqlens,  # type: ignore[arg-type]
            given.gate_activation, given.lower_bound, given.beta_activation, given.qk_l2norm, given.scale,
        ),
        backend,
    )  # fmt: skip
    returned, final = checks.check_state_dtype(given, dtype), state if given.final_state else None
    return KDAOutput(o, *(None if t is None else t.to(returned) for t in (final, boundaries)))


def _prefill(x: PrefillInputs, backend: str | None) -> PrefillOutput:
    """`kda_prefill` of inputs that are not checked, with `x.o` None for a new tensor."""
    cached = _prefill_cache.get(x, backend)
    shape, computed, name, *fused = cached or _prepare_prefill(x, backend)
    checks.check_values(x)
    if x.o is None:
        x = x._replace(o=torch.empty_like(x.v, memory_format=torch.contiguous_format))
    if x.checkpoint_at is not None:
        x = x._replace(checkpoints=x.q.new_zeros(shape, dtype=computed))
    _kda_prefill(activate(x, fused), name, plain=cached is not None)
    return PrefillOutput(x.o, x.checkpoints)


def _prepare_prefill(x: PrefillInputs, backend: str | None) -> tuple[Any, ...]:
    """Check `x`; return the shape and dtype of checkpoints [N, HV, V, K], the backend and what it fuses."""
    checks.check_prefill(x)
    checks.refuse_gradients("kda_prefill", x)
    chosen = KDA.choose(backend, x.q.device, *Problem.fields_of(x))
    return _prefill_cache.put(x, (state_shape(x), state_dtypes(x.q.dtype)[0], *chosen), backend)


def _prepare_step(x: DecodeInputs, backend: str | None) -> tuple[Any, ...]:
    """Check `x`; return the backend, its function for such inputs or None, and what it fuses."""
    checks.check_decode(x)
    checks.refuse_gradients("kda_step", x)
    name, *fused = KDA.choose(backend, x.q.device, *Problem.fields_of(x))
    given = activate(x, fused)  # views of gates of heads may be repeated, what is computed may not
    computes = (given.gate_activation, given.beta_activation, given.qk_l2norm) != (
        x.gate_activation, x.beta_activation, x.qk_l2norm,
    )  # fmt: skip
    run = None if computes or not is_plain(x) else KDA.backend(name).repeated_decode(given)
    return _step_cache.put(x, (name, run, *fused), backend)
