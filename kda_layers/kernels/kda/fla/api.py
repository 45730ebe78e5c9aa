"""`chunk_kda`, `fused_recurrent_kda` and `fused_kda_gate` with the interface of flash-linear-attention 0.6.

Arguments, their positions, defaults and meaning, and the returned dtypes are those of that package. These raise here:

* arguments that it ignores: unknown keywords, A_log and dt_bias without use_gate_in_kernel;
* cp_context, use_graph, max_num_seqs and chunk_indices other than their defaults;
* lower_bound outside [-5, 0), beta of another shape than [B, T, HV], and intermediate states of 32-token chunks.

Only here: fp64 (computed in fp32 there), a bf16 initial_state of `chunk_kda`, gradients of `fused_recurrent_kda`, its
states in place and in slots of a pool, and `backend`.

Source of names and meaning: flash-linear-attention 0.6.0, fla.ops.kda and fla.ops.kda.gate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import DtypeError, check_is_tensor, dtype_names
from ..activations import log_decay
from ..checks import check_lower_bound
from ..contract import CHUNK, state_dtype
from ..op import kda, kda_step
from .arguments import (
    check_arguments,
    checked_offsets,
    gate_parameters,
    operator_activations,
    state_to_update,
    v_first_view,
)

__all__ = ["chunk_kda", "fused_kda_gate", "fused_recurrent_kda"]


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: None = None,
    use_graph: bool = False,
    max_num_seqs: None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = CHUNK,
    chunk_indices: None = None,
    transpose_state_layout: bool | None = None,
    intermediate_states_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi Delta Attention over full sequences, with flash-linear-attention's arguments; see `kda_layers.kda`.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. g: [B, T, HV, K]. beta: [B, T, HV].
        scale: K ** -0.5 if None.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first; fp32 (fp64 for fp64 inputs), with 16-bit
            inputs also bf16.
        output_final_state: also return the final state, in the same layout.
        use_qk_l2norm_in_kernel: normalise q and k.
        use_gate_in_kernel: g holds logits: -exp(A_log) softplus(g + dt_bias), or with lower_bound
            lower_bound sigmoid(exp(A_log) (g + dt_bias)); otherwise g is the log-decay.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: beta holds logits; the latter doubles their sigmoid.
        safe_gate: declares that gates are bounded, which needs lower_bound with use_gate_in_kernel; no gate needs it
            here.
        lower_bound: in [-5, 0).
        disable_recompute: recompute='never' of `kda_layers.kda`, else 'always'; its own default chooses by size. With
            our CUDA kernels False takes 18 to 19 % more time, True 451 MiB at (1, 8192, 32) in bf16.
        return_intermediate_states: also return the state before each 64-token chunk, [B, ceil(T / 64), HV, K, V] in
            q's dtype, or [1, their number, HV, K, V] of packed sequences, which waits for the GPU unless
            cu_seqlens_cpu is given; only without gradients.
        state_v_first: states are [V, K].
        cu_seqlens, cu_seqlens_cpu: [N + 1] offsets of packed sequences, and the same on the CPU.
        cp_context, use_graph, max_num_seqs, chunk_indices: must keep their defaults.
        A_log: HV elements in any shape. dt_bias: [HV * K] or [HV, K], and any dimensions of size 1. Any float dtype.
            Their gradients have their shapes and dtypes.
        chunk_size: 64, or 32, which changes no result here.
        transpose_state_layout: deprecated name of state_v_first.
        intermediate_states_dtype: q's dtype (also if None), or fp32 (fp64 for fp64 inputs), in which the states are
            computed. Not in flash-linear-attention.
        backend: see `kda_layers.kda`.

    Returns:
        (o [B, T, HV, V] in v's dtype, final state or None), and the intermediate states where asked for. The final
        state is fp32 (fp64 for fp64 inputs), also after a bf16 initial_state.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    v_first = check_arguments(
        q, v, state_v_first, transpose_state_layout, cp_context, use_graph, max_num_seqs, chunk_indices
    )
    if chunk_size not in (32, CHUNK):
        raise ValueError(f"`chunk_size` must be either 32 or {CHUNK}, got {chunk_size}")
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError("lower_bound must be given with safe_gate=True and use_gate_in_kernel=True, got None")
    if return_intermediate_states:
        _check_intermediate(chunk_size, (q, k, v, g, beta))
    dtype, dtypes = intermediate_states_dtype or q.dtype, (q.dtype, state_dtype(q.dtype))
    if dtype not in dtypes:
        raise ValueError(f"intermediate_states_dtype must be {dtype_names(dtypes)}, got {dtype}")
    cu_seqlens = checked_offsets(q, cu_seqlens, cu_seqlens_cpu)
    activations = use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval, A_log, dt_bias
    options = operator_activations(q, g, *activations)
    state = None if initial_state is None else v_first_view(initial_state, q, v, v_first).contiguous()
    out = kda(
        q, k, v, g, beta,
        initial_state=state, cu_seqlens=cu_seqlens, qk_l2norm=use_qk_l2norm_in_kernel, scale=scale,
        return_final_state=output_final_state, checkpoint_every=CHUNK if return_intermediate_states else 0,
        state_dtype=state_dtype(q.dtype), recompute="never" if disable_recompute else "always", backend=backend,
        **options,
    )  # fmt: skip
    final = out.final_state if v_first or out.final_state is None else out.final_state.mT.contiguous()
    if not return_intermediate_states:
        return out.o, final
    assert out.checkpoints is not None
    offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    before = _states_before_chunks(out.checkpoints.to(dtype), state, q.shape[1], offsets)
    return out.o, final, before if v_first else before.mT.contiguous()


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cp_context: None = None,
    use_graph: bool = False,
    max_num_seqs: None = None,
    chunk_indices: None = None,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Decoding with flash-linear-attention's arguments; see `kda_layers.kda_step`.

    If a gradient is needed, which flash-linear-attention does not have, and no state is written in place, `chunk_kda`
    is called. Arguments that are not listed are those of `chunk_kda`.

    Args:
        inplace_final_state: write the final state over initial_state (then required), in its dtype, and return it.
        ssm_state_indices: [N] or [N, T] slots of initial_state, a pool [slots, HV, K, V], as `state_indices` of
            `kda_layers.kda_step`; needs inplace_final_state=True. Without state_v_first the pool is copied to the other
            layout and back.
        num_accepted_tokens: [N], with ssm_state_indices [N, T].

    Returns:
        (o [B, T, HV, V] in v's dtype, final state in initial_state's layout or None). Unless written in place, the
        final state is fp32 (fp64 for fp64 inputs), also after a bf16 initial_state.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    v_first = check_arguments(
        q, v, state_v_first, transpose_state_layout, cp_context, use_graph, max_num_seqs, chunk_indices
    )
    if inplace_final_state and initial_state is None:
        raise ValueError("initial_state must be given with inplace_final_state=True, got None")
    if ssm_state_indices is not None and not inplace_final_state:
        raise ValueError("inplace_final_state must be True with ssm_state_indices: slots of the pool are overwritten")
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    if not inplace_final_state and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        o, final, *_ = chunk_kda(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound=lower_bound, state_v_first=v_first,
            cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias, backend=backend,
        )  # fmt: skip
        return o, final
    activations = use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval, A_log, dt_bias
    options = operator_activations(q, g, *activations)
    state = state_to_update(q, v, initial_state, cu_seqlens, v_first, inplace_final_state)
    o = kda_step(
        q, k, v, g, beta, state,
        state_indices=ssm_state_indices, num_accepted=num_accepted_tokens, cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel, scale=scale, backend=backend, **options,
    )  # fmt: skip
    final = state if v_first else state.mT.contiguous()
    if inplace_final_state:
        assert initial_state is not None
        return o, initial_state if v_first else initial_state.copy_(final)
    return o, final if output_final_state else None


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | int | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = torch.float32,
    *,
    g_bias: Tensor | None = None,
) -> Tensor:
    """Log-decay from gate logits, differentiable in g, A_log and dt_bias.

    -exp(A_log) softplus(g + dt_bias), or if lower_bound is given lower_bound sigmoid(exp(A_log) (g + dt_bias)),
    computed in fp32 (fp64 for fp64 g). `chunk_kda(use_gate_in_kernel=True)` does not store it.

    Args:
        g: [..., HV, K], any float dtype.
        A_log: HV elements in any shape; with lower_bound, None means a rate of 1.
        dt_bias: [HV * K] or [HV, K], and any dimensions of size 1.
        lower_bound: in [-5, 0).
        output_dtype: dtype of the result; g's if None.
        g_bias: dt_bias in the signature of version 0.4.0, which Moonshot's published Kimi-Linear code calls:
            `fused_kda_gate(g, A_log, head_k_dim, g_bias=dt_bias)` with g [..., HV * K].

    Returns:
        [..., HV, K] in output_dtype.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    check_is_tensor("g", g)
    if isinstance(dt_bias, int):
        if dt_bias < 1 or g.ndim < 1 or g.shape[-1] % dt_bias:
            raise ValueError(f"g must have shape [..., HV * {dt_bias}] with head_k_dim={dt_bias}, got {list(g.shape)}")
        g, dt_bias = g.unflatten(-1, (-1, dt_bias)), g_bias
    elif g_bias is not None:
        raise ValueError("g_bias needs head_k_dim as the third argument; with g [..., HV, K] pass dt_bias")
    if not g.is_floating_point():
        raise DtypeError(f"g must be of a float dtype, got {dtype_names([g.dtype])}")
    activation = "softplus" if lower_bound is None else "lower_bound"
    bound, wide = check_lower_bound(activation, lower_bound), state_dtype(g.dtype)
    A_log, dt_bias = gate_parameters(g, A_log, dt_bias, lower_bound, wide)
    return log_decay(g.to(wide), A_log, dt_bias, activation, bound).to(output_dtype or g.dtype)


def _check_intermediate(chunk_size: int, inputs: tuple[Tensor, ...]) -> None:
    if chunk_size != CHUNK:
        raise ValueError(f"chunk_size must be {CHUNK} with return_intermediate_states=True, got {chunk_size}")
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        raise ValueError("return_intermediate_states=True is for inference: call it under torch.inference_mode()")


def _states_before_chunks(checkpoints: Tensor, initial: Tensor | None, T: int, cu_seqlens: Tensor | None) -> Tensor:
    """Turn the states after full chunks [B, T // 64, HV, V, K] into the states before every chunk, full or not."""
    B, _, HV, V, K = checkpoints.shape
    if cu_seqlens is None:
        first = checkpoints.new_zeros(B, 1, HV, V, K) if initial is None else initial[:, None].to(checkpoints)
        return torch.cat((first, checkpoints), 1)[:, : -(-T // CHUNK)]
    rows, offset = [], 0
    for n, length in enumerate(cu_seqlens.diff().tolist()):
        first = checkpoints.new_zeros(1, HV, V, K) if initial is None else initial[n : n + 1].to(checkpoints)
        states = torch.cat((first, checkpoints[0, offset : offset + length // CHUNK]))
        rows.append(states[: -(-length // CHUNK)])
        offset += length // CHUNK
    return torch.cat(rows)[None]
