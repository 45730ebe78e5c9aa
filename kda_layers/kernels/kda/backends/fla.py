"""flash-linear-attention's KDA kernels in Triton, behind our contract.

Its stages are called one by one, without its autograd function and guards. Unlike its public functions, this backend
never rounds states to 16 bits, uses none of its caches by tensor identity, never runs another package's kernels
instead, and reads nothing on the host for packed sequences, so that a CUDA graph can capture them.

Source: flash-linear-attention 0.6 (fla-core), fla.ops.kda.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...declarations import AtLeast, OneOf
from ..activations import BETAS, GIVEN, LOG_DECAY, LOWER_BOUND, SOFTPLUS
from ..contract import (
    ALL_FEATURES,
    CHUNK,
    Backend,
    DecodeInputs,
    Gradients,
    Inputs,
    KDAOutput,
    Names,
    PrefillInputs,
    Problem,
)
from ..fla.package import chunk_table, operator_stages, problems, table_rows
from ..slots import clear_padding, prefill_by_forward, with_initial, with_padding

LOG2_E = 1 / math.log(2)
MIN_K, MAX_K = 9, 256  # its blocks of K are the next power of two, from 16 to 256
MAX_ROWS = 2**16 - 1  # of B * HV, the second dimension of its grids


class FLABackend(Backend):
    name = "fla"
    priority = 10
    serves = {  # noqa: RUF012
        "device": OneOf("cuda"),
        "arch": AtLeast(80, "sm_"),
        "dtype": OneOf(torch.bfloat16, torch.float16, torch.float32),
        "gate_activation": Names(LOWER_BOUND.name, SOFTPLUS.name, LOG_DECAY),
        "beta_activation": Names(*BETAS, GIVEN),
    }
    features = ALL_FEATURES - {"bf16_state", "int8_state", "segments", "verify"}
    fused = frozenset(("gate", "beta", "qk_l2norm"))

    def more_reasons(self, problem: Problem) -> list[str]:
        reasons = []
        if problem.dtype == torch.float32 and not problem.decode:
            reasons.append("dtype is float32, which it multiplies in tf32, needs bfloat16 or float16")
        if not problem.decode and not MIN_K <= problem.K <= MAX_K:
            reasons.append(f"K is {problem.K}, needs {MIN_K} to {MAX_K}")
        if problem.decode and problem.K > MAX_K:
            reasons.append(f"K is {problem.K}, needs at most {MAX_K}")
        if problem.needs_grad and problem.checkpoints:
            reasons.append("checkpoints with gradients, needs checkpoint_every=0 or torch.no_grad()")
        return reasons

    def problems(self) -> list[str]:
        return problems()

    def replaces(self, x: Inputs) -> tuple[str, ...]:
        return ("q", "k") if x.qk_l2norm else ()

    def saved_like(self, x: Inputs) -> list[Tensor]:
        B, T, H, _ = x.q.shape
        HV = x.v.shape[2]
        saved = []
        if x.qk_l2norm:
            saved += [x.q.new_empty(x.q.shape), x.k.new_empty(x.k.shape)]
            saved += [x.q.new_empty(B, T, H, dtype=torch.float32) for _ in range(2)]
        saved += [x.k.new_empty(B, T, HV, CHUNK) for _ in range(2)]
        if x.cu_seqlens is not None:
            N = x.cu_seqlens.shape[0] - 1
            saved += [x.cu_seqlens.new_empty(table_rows(T, N), 2), x.cu_seqlens.new_empty(N + 1)]
        return saved

    def forward(self, x: Inputs, save: bool) -> tuple[KDAOutput, list[Tensor]]:
        _check_rows(x)
        with torch.cuda.device(x.q.device):
            x = _contiguous(x)
            fla = operator_stages()
            norms = []
            if x.qk_l2norm:
                (q, q_rstd), (k, k_rstd) = fla.l2norm_fwd(x.q), fla.l2norm_fwd(x.k)
                x, norms = x._replace(q=q, k=k), [q, k, q_rstd, k_rstd]
            table = chunk_table(x.cu_seqlens, x.q.shape[1])
            beta, g = _beta(x), _cumulative_log2_decay(x, table)
            packed = _packed(x, table)
            w, u, _, kg, Aqk, Akk = fla.chunk_kda_fwd_intra(
                q=x.q, k=x.k, v=x.v, gk=g, beta=beta, scale=x.scale, chunk_size=CHUNK, safe_gate=_bounded(x), **packed
            )  # fmt: skip
            h, v_new, final = _scan(x, kg, w, u, g, table)
            o = fla.chunk_gla_fwd_o_gk(
                q=x.q, v=v_new, g=g, A=Aqk, h=h, scale=x.scale, state_v_first=True, chunk_size=CHUNK, **packed
            )  # fmt: skip
            checkpoints = _checkpoints(x, h, final, table) if x.checkpoint_every else None
        saved = [*norms, Aqk, Akk, *table] if save else []
        return KDAOutput(o, final if x.final_state else None, checkpoints), saved

    def backward(
        self, x: Inputs, saved: list[Tensor], d_o: Tensor, d_final: Tensor | None, d_checkpoints: Tensor | None
    ) -> Gradients:
        with torch.cuda.device(x.q.device):
            x = _contiguous(x)
            fla = operator_stages()
            if x.qk_l2norm:
                q_rstd, k_rstd, *saved = saved
            Aqk, Akk, *table = saved
            gated = x.gate_activation != LOG_DECAY
            dq, dk, dv, db, dg, d_state, dA, d_bias = fla.chunk_kda_bwd(
                q=x.q, k=x.k, v=x.v, beta=_beta(x), Aqk=Aqk, Akk=Akk, scale=x.scale,
                initial_state=_transposed(x.initial_state), do=d_o.contiguous(), dht=_transposed(d_final),
                g=None if gated else _cumulative_log2_decay(x, table), g_org=x.g if gated else None,
                use_gate_in_kernel=gated, lower_bound=_lower_bound(x), A_log=x.A_log, dt_bias=_flat(x.dt_bias),
                safe_gate=_bounded(x), state_v_first=False, chunk_size=CHUNK, chunk_offsets=table[1] if table else None,
                **_packed(x, table),
            )  # fmt: skip
            if x.qk_l2norm:
                dq, dk = fla.l2norm_bwd(x.q, q_rstd, dq), fla.l2norm_bwd(x.k, k_rstd, dk)
            if x.beta_activation != GIVEN:
                db = fla.fused_beta_sigmoid_bwd(x=x.beta, dy=db, scale=_beta_scale(x))
        return Gradients(
            dq.to(x.q.dtype), dk.to(x.k.dtype), dv.to(x.v.dtype), dg.to(x.g.dtype), db.to(x.beta.dtype), dA,
            None if d_bias is None else d_bias.view_as(x.dt_bias), _transposed(d_state),
        )  # fmt: skip

    def prefill(self, x: PrefillInputs) -> None:
        prefill_by_forward(self, x)

    def decode(self, x: DecodeInputs) -> Tensor:
        _check_rows(x)
        with torch.cuda.device(x.q.device):
            x = with_initial(x)
            matrices = x.state if x.state_indices is None else x.state[:1]  # slots may have any stride
            state = x.state if matrices.is_contiguous() else x.state.contiguous()
            inputs, padding = _contiguous(x._replace(state=state)), None
            if x.state_indices is not None:
                inputs, padding, _scratch = with_padding(inputs)
            o, _ = operator_stages().fused_recurrent_kda_fwd(
                q=inputs.q, k=inputs.k, v=inputs.v, g=inputs.g, beta=inputs.beta, A_log=inputs.A_log,
                dt_bias=_flat(inputs.dt_bias), scale=x.scale, initial_state=inputs.state, inplace_final_state=True,
                state_v_first=True, cu_seqlens=inputs.cu_seqlens, ssm_state_indices=inputs.state_indices,
                num_accepted_tokens=inputs.num_accepted, use_qk_l2norm_in_kernel=x.qk_l2norm,
                use_gate_in_kernel=x.gate_activation != LOG_DECAY, lower_bound=_lower_bound(x),
                use_beta_sigmoid_in_kernel=x.beta_activation != GIVEN,
                allow_neg_eigval=_beta_scale(x) == 2.0, out=torch.empty_like(inputs.v) if x.out is None else x.out,
            )  # fmt: skip
            if padding is not None:
                clear_padding(o, padding, inputs.cu_seqlens)
            if state is not x.state:
                x.state.copy_(state)
        return o


def _check_rows(x: Inputs | DecodeInputs) -> None:
    rows = x.v.shape[0] * x.v.shape[2]
    if rows > MAX_ROWS:
        raise ValueError(f"B * HV must be at most {MAX_ROWS} for backend 'fla', got {rows}: split the batch")


def _contiguous(x: Any) -> Any:
    """`x` with contiguous tensors, except the state of a decode step, which is written in place."""
    if all(t.is_contiguous() for t in x if isinstance(t, Tensor)):
        return x
    tensors = {n: t for n, t in zip(x._fields, x, strict=True) if isinstance(t, Tensor) and n != "state"}
    return x._replace(**{n: t.contiguous() for n, t in tensors.items()})


def _transposed(state: Tensor | None) -> Tensor | None:
    """[..., V, K] to [..., K, V] or back: its backward, unlike its forward, is faster with [K, V] states."""
    return None if state is None else state.mT.contiguous()


def _flat(dt_bias: Tensor | None) -> Tensor | None:
    return None if dt_bias is None else dt_bias.view(-1)


def _lower_bound(x: Inputs | DecodeInputs) -> float | None:
    return x.lower_bound if x.gate_activation == LOWER_BOUND.name else None


def _bounded(x: Inputs) -> bool:
    """True if its diagonal blocks may use MMA, which overflows where 16 tokens decay by more than e^-88."""
    return x.gate_activation == LOWER_BOUND.name


def _beta_scale(x: Inputs | DecodeInputs) -> float:
    return BETAS[x.beta_activation].scale if x.beta_activation in BETAS else 1.0


def _beta(x: Inputs) -> Tensor:
    """beta in fp32: with beta in 16 bits its kernels round beta k once more."""
    if x.beta_activation == GIVEN:
        return x.beta.float()
    return operator_stages().fused_beta_sigmoid_fwd(x.beta, _beta_scale(x))


def _cumulative_log2_decay(x: Inputs, table: list[Tensor]) -> Tensor:
    """Cumulative sum of the base-2 log-decay within each chunk, [B, T, HV, K] fp32."""
    fla, packed = operator_stages(), _packed(x, table)
    if x.gate_activation == LOG_DECAY:
        return fla.chunk_local_cumsum(x.g, chunk_size=CHUNK, scale=LOG2_E, **packed)
    return fla.kda_gate_chunk_cumsum(
        x.g, A_log=x.A_log, dt_bias=_flat(x.dt_bias), lower_bound=_lower_bound(x), chunk_size=CHUNK,
        scale=LOG2_E, **packed,
    )  # fmt: skip


def _packed(x: Inputs, table: list[Tensor]) -> dict[str, Tensor | None]:
    return {"cu_seqlens": x.cu_seqlens, "chunk_indices": table[0] if table else None}


def _scan(
    x: Inputs, kg: Tensor, w: Tensor, u: Tensor, g: Tensor, table: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(states before every chunk, errors, final state); chunk states are fp32 if checkpoints are returned."""
    fla, first = operator_stages(), table[1] if table else None
    wants_final = x.final_state or x.checkpoint_every > 0
    if not x.checkpoint_every:
        return fla.chunk_gated_delta_rule_fwd_h(
            k=kg, w=w, u=u, gk=g, initial_state=x.initial_state, output_final_state=wants_final, chunk_size=CHUNK,
            state_v_first=True, chunk_offsets=first, **_packed(x, table),
        )  # fmt: skip
    B, T, HV, K = kg.shape
    V, N = u.shape[3], B if first is None else first.shape[0] - 1
    chunks = -(-T // CHUNK) if not table else table[0].shape[0]
    h = u.new_empty(B, chunks, HV, V, K, dtype=torch.float32)
    v_new, final = torch.empty_like(u), u.new_empty(N, HV, V, K, dtype=torch.float32)
    fla.chunk_gated_delta_rule_fwd_kernel_h_blockdim64[lambda meta: (-(-V // meta["BV"]) * N * HV,)](
        k=kg, v=u, w=w, v_new=v_new, g=None, gk=g, h=h, h0=x.initial_state, ht=final, cu_seqlens=x.cu_seqlens,
        chunk_offsets=first, T=T, H=HV, HV=HV, K=K, V=V, BT=CHUNK, STATE_V_FIRST=True,
    )  # fmt: skip
    return h, v_new, final


def _checkpoints(x: Inputs, h: Tensor, final: Tensor | None, table: list[Tensor]) -> Tensor:
    """The states after full chunks [B, T // 64, HV, V, K], from those before every chunk and the final ones."""
    assert final is not None
    rows = x.checkpoint_count
    if x.cu_seqlens is None:
        return torch.cat((h[:, 1:], final[:, None]), 1)[:, :rows].contiguous()
    first, full_chunks = table[1].long(), x.cu_seqlens.diff().long() // CHUNK
    offsets = torch.nn.functional.pad(full_chunks.cumsum(0), (1, 0))
    row = torch.arange(rows, device=h.device)
    sequence = (torch.searchsorted(offsets, row, right=True) - 1).clamp(max=len(full_chunks) - 1)
    after = first[sequence] + row - offsets[sequence] + 1
    last = (after >= first[sequence + 1])[:, None, None, None]
    states = torch.where(last, final[sequence], h[0, after.clamp(max=h.shape[1] - 1)])
    return torch.where((row < offsets[-1])[:, None, None, None], states, 0.0)[None]


BACKEND = FLABackend()
