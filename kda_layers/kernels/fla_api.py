"""`chunk_kda` and `fused_recurrent_kda` with flash-linear-attention 0.6's argument names: adopting is one import.

Differences, all stated by an error where they matter: arguments that would be ignored there are refused here, states
are fp32 (fp64 for fp64 inputs; a bf16 one, with 16-bit inputs, returns bf16), and `lower_bound` must lie in [-5, 0).
Source of names and meaning: flash-linear-attention 0.6.0, fla.ops.kda.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_layers.kernels.contract import CHUNK, state_dtype
from kda_layers.kernels.op import kda, kda_step


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
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = CHUNK,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi Delta Attention over whole sequences, with flash-linear-attention's arguments; see `kda_layers.kda`.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. g: [B, T, HV, K]. beta: [B, T, HV].
        scale: K ** -0.5 if None.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first.
        output_final_state: also return the final state, in the same layout.
        use_qk_l2norm_in_kernel: normalise q and k.
        use_gate_in_kernel: g holds logits: -exp(A_log) softplus(g + dt_bias), or with lower_bound
            lower_bound sigmoid(exp(A_log) (g + dt_bias)); otherwise g is the log-decay.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: beta holds logits; the latter doubles their sigmoid.
        safe_gate: states that gates are bounded, which needs lower_bound with use_gate_in_kernel; every gate is
            exact here without it.
        lower_bound: in [-5, 0).
        disable_recompute: save more in the forward pass: `recompute` of `kda`.
        return_intermediate_states: also return the state before each 64-token chunk, [B, ceil(T / 64), HV, K, V] in
            the dtype of states (there bf16); only in inference.
        cu_seqlens, cu_seqlens_cpu: [N + 1] offsets of packed sequences; the second is the first on the CPU.
        A_log: [HV]. dt_bias: [HV * K] or [HV, K]. Any float dtype.
        chunk_size: 64, or 32, which changes no result here.
        backend: see `kda_layers.kda`.

    Returns:
        (o [B, T, HV, V], final state or None), and the intermediate states where asked for.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    if chunk_size not in (32, CHUNK):
        raise ValueError(f"chunk_size must be 32 or {CHUNK}, got {chunk_size}")
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError("lower_bound must be given with safe_gate=True and use_gate_in_kernel=True, got None")
    if return_intermediate_states and chunk_size != CHUNK:
        raise ValueError(f"chunk_size must be {CHUNK} with return_intermediate_states=True, got {chunk_size}")
    if return_intermediate_states and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, g, beta)):
        raise ValueError("return_intermediate_states=True is for inference: call it under torch.inference_mode()")
    cu_seqlens = _offsets(q, cu_seqlens, cu_seqlens_cpu)
    options = _options(
        q, g, use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval, A_log, dt_bias
    )
    state = initial_state if state_v_first or initial_state is None else _transposed(initial_state, q, v)
    out = kda(
        q, k, v, g, beta,
        initial_state=state, cu_seqlens=cu_seqlens, qk_l2norm=use_qk_l2norm_in_kernel, scale=scale,
        final_state=output_final_state, checkpoint_every=CHUNK if return_intermediate_states else 0,
        recompute=False if disable_recompute else "auto", backend=backend, **options,
    )  # fmt: skip
    final = out.final_state if state_v_first or out.final_state is None else out.final_state.mT.contiguous()
    if not return_intermediate_states:
        return out.o, final
    assert out.checkpoints is not None
    before = _states_before_chunks(out.checkpoints, state, q.shape[1], cu_seqlens)
    return out.o, final, before if state_v_first else before.mT.contiguous()


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
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Decoding with flash-linear-attention's arguments; see `kda_layers.kda_step`.

    Where a gradient is wanted (there it has none) and no state is written in place, `chunk_kda` computes the same.

    Args:
        as `chunk_kda`, and
        inplace_final_state: write the final state over initial_state (then required) and return it.
        ssm_state_indices: [N] or [N, T] slots of initial_state, a pool [slots, HV, K, V], as `state_indices` of
            `kda_layers.kda_step`; needs inplace_final_state=True. With state_v_first=False the pool is copied to the
            other layout and back.
        num_accepted_tokens: [N], with ssm_state_indices [N, T].

    Returns:
        (o [B, T, HV, V], final state in initial_state's layout or None).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    if inplace_final_state and initial_state is None:
        raise ValueError("initial_state must be given with inplace_final_state=True, got None")
    if ssm_state_indices is not None and not inplace_final_state:
        raise ValueError("inplace_final_state must be True with ssm_state_indices: slots of the pool are overwritten")
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    if not inplace_final_state and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        o, final, *_ = chunk_kda(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound=lower_bound, state_v_first=state_v_first,
            cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias, backend=backend,
        )  # fmt: skip
        return o, final
    options = _options(
        q, g, use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval, A_log, dt_bias
    )
    if initial_state is None:
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = q.new_zeros(N, v.shape[2], v.shape[3], q.shape[3], dtype=state_dtype(q.dtype))
    elif not state_v_first:
        state = _transposed(initial_state, q, v)
    else:
        state = initial_state if inplace_final_state else initial_state.clone()
    o = kda_step(
        q, k, v, g, beta, state,
        state_indices=ssm_state_indices, num_accepted=num_accepted_tokens, cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel, scale=scale, backend=backend, **options,
    )  # fmt: skip
    final = state if state_v_first else state.mT.contiguous()
    if inplace_final_state:
        assert initial_state is not None
        return o, initial_state if state_v_first else initial_state.copy_(final)
    return o, final if output_final_state else None


def _options(
    q: Tensor,
    g: Tensor,
    use_gate: bool,
    lower_bound: float | None,
    beta_logits: bool,
    allow_neg_eigval: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> dict[str, Any]:
    """The activations, in the words of `kda`."""
    if allow_neg_eigval and not beta_logits:
        raise ValueError("use_beta_sigmoid_in_kernel must be True with allow_neg_eigval=True, got False")
    beta = ("2sigmoid" if allow_neg_eigval else "sigmoid") if beta_logits else "given"
    if not use_gate:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise ValueError(f"{name} must be None with use_gate_in_kernel=False: g is then used as it is")
        return {"gate_activation": "log_decay", "beta_activation": beta}  # a lower_bound only describes such a g
    if A_log is None and lower_bound is None:
        raise ValueError("A_log must be given with use_gate_in_kernel=True and no lower_bound, got None")
    wide = state_dtype(q.dtype)
    return {
        "gate_activation": "softplus" if lower_bound is None else "lower_bound",
        "lower_bound": lower_bound,
        "beta_activation": beta,
        "A_log": None if A_log is None else A_log.to(wide),
        "dt_bias": None if dt_bias is None else _per_channel(dt_bias, g).to(wide),
    }


def _per_channel(dt_bias: Tensor, g: Tensor) -> Tensor:
    """[HV * K] or [HV, K] -> [HV, K]."""
    HV, K = g.shape[2:]
    if tuple(dt_bias.shape) not in ((HV * K,), (HV, K)):
        raise ValueError(f"dt_bias must have shape [{HV * K}] or [{HV}, {K}], got {list(dt_bias.shape)}")
    return dt_bias.reshape(HV, K)


def _offsets(q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Tensor | None:
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        return cu_seqlens_cpu.to(q.device)
    if cu_seqlens is not None and cu_seqlens_cpu is not None and cu_seqlens_cpu.shape != cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens_cpu must have the shape of cu_seqlens {list(cu_seqlens.shape)}, "
            f"got {list(cu_seqlens_cpu.shape)}"
        )
    return cu_seqlens


def _transposed(state: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """[N, HV, K, V] -> contiguous [N, HV, V, K]."""
    K, V = q.shape[3], v.shape[3]
    if state.ndim != 4 or tuple(state.shape[2:]) != (K, V):
        raise ValueError(
            f"initial_state must have shape [N, HV, K, V] = [.., {v.shape[2]}, {K}, {V}] with state_v_first=False, "
            f"got {list(state.shape)}"
        )
    return state.mT.contiguous()


def _states_before_chunks(checkpoints: Tensor, initial: Tensor | None, T: int, cu_seqlens: Tensor | None) -> Tensor:
    """From states after whole chunks [B, T // 64, HV, V, K] to the states before every chunk, whole or not."""
    B, _, HV, V, K = checkpoints.shape
    if cu_seqlens is None:
        first = checkpoints.new_zeros(B, 1, HV, V, K) if initial is None else initial[:, None]
        return torch.cat((first, checkpoints), 1)[:, : -(-T // CHUNK)]
    rows, offset = [], 0
    for n, length in enumerate(cu_seqlens.diff().tolist()):
        first = checkpoints.new_zeros(1, HV, V, K) if initial is None else initial[n : n + 1]
        states = torch.cat((first, checkpoints[0, offset : offset + length // CHUNK]))
        rows.append(states[: -(-length // CHUNK)])
        offset += length // CHUNK
    return torch.cat(rows)[None]
