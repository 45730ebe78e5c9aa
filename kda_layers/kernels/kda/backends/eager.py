"""Chunked KDA in plain PyTorch: any device, any shape, every gate; the backend of CPUs.

A segment of a few chunks of 64 tokens, or of 32 on a CPU with one gate a head, is processed at a time, so that
intermediates stay in cache and peak memory does not depend on T. A segment is batched over chunks and heads, except for
the update of the state from chunk to chunk. The forward saves the state at the start of each segment; the backward
recomputes the rest.

Per chunk and value head, with b = beta k (the key as written), p_i = product of the decays up to token i of the chunk
and s_j = product of the decays after token j:

    L_ij = <k_i e^{G_i-G_j}, b_j>  i > j     M_ij = <q_i e^{G_i-G_j}, b_j>  i >= j     R = (I + L)^-1
    E = R (v - (p k) S)                      o = (p q) S + M E                         S' = p_C S + (s b)^T E

beta is part of b, so that nothing is divided by it. The decay between two tokens of a chunk is split by binary
anchoring (docs/internals/binary_anchoring.md) into products of decays <= 1, which cannot overflow, without subtracting
cumulative sums. R is built from the same power-of-two blocks, doubled at each level. With one gate a head the decay
between two tokens is a number, and L and M are one matrix product for each key head (`eager/head_gates.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import (
    ALL_FEATURES,
    HEAD_GATES,
    Backend,
    CommitInputs,
    DecodeInputs,
    Gradients,
    Inputs,
    KDAOutput,
    PrefillInputs,
    state_dtype,
)
from ..eager.chunks import load
from ..eager.decode import check_indices, decode
from ..eager.drafts import commit, verify
from ..eager.gradients import empty_gradients, segment_grad
from ..eager.schedule import Plan, Sizes, with_flat_tokens
from ..slots import prefill_by_forward


class EagerBackend(Backend):
    name = "eager"
    features = ALL_FEATURES - {"segments"}
    fused = frozenset(("gate", "beta", "qk_l2norm", HEAD_GATES))

    def saved_like(self, x: Inputs) -> list[Tensor]:
        B, T, _, K = x.q.shape
        HV, V = x.v.shape[2:]
        tokens = Sizes.of(x).segment
        rows = B * ((T + tokens - 1) // tokens)
        if x.cu_seqlens is not None:  # sum over sequences of ceil(len / tokens), bounded without reading the lengths
            rows = T // tokens + x.cu_seqlens.shape[0] - 1
        return [x.q.new_empty(rows, HV, V, K, dtype=state_dtype(x.q.dtype))]

    def forward(self, x: Inputs, save: bool) -> tuple[KDAOutput, list[Tensor]]:
        x = with_flat_tokens(x)
        plan = Plan.of(x)
        B, _, _, K = x.q.shape
        HV, V = x.v.shape[2:]
        state = plan.initial_state(x)
        saved = self.saved_like(x) if save else []
        o = torch.empty_like(x.v, memory_format=torch.contiguous_format)
        checkpoints = state.new_zeros(B * x.checkpoint_count, HV, V, K) if x.checkpoint_every else None
        row = 0
        for segment in plan.segments():
            c = load(x, segment)
            if save:
                saved[0][row : row + segment.active[0]] = state[: segment.active[0]]
                row += segment.active[0]
            reads, errors = c.v.new_empty(*c.kq.shape[:2], V), torch.empty_like(c.v)
            chunks = segment.lanes(c.reads(out=c.kq), reads, c.v, c.R, errors, c.decay, c.writes)
            for i, (operands, read, v, R, E, decay, write) in enumerate(chunks):
                S = state[: segment.active[i]].view(-1, V, K)
                torch.bmm(operands, S.mT, out=read)
                torch.bmm(R, v.sub_(read[:, : v.shape[1]]), out=E)
                S.mul_(decay).baddbmm_(E.mT, write)
                if checkpoints is not None:
                    checkpoint_rows = plan.checkpoint_rows(segment.first + i)
                    checkpoints.index_copy_(0, checkpoint_rows, state[: len(checkpoint_rows)])
            segment.scatter(o, torch.baddbmm(reads[:, c.v.shape[1] :], c.M, errors))
        if save:
            saved[0][row:] = 0  # rows that packed sequences do not need
        if checkpoints is not None:
            checkpoints = checkpoints.view(B, x.checkpoint_count, HV, V, K)
        return KDAOutput(o, plan.unsort(state) if x.final_state else None, checkpoints), saved

    def backward(
        self, x: Inputs, saved: list[Tensor], d_o: Tensor, d_final: Tensor | None, d_checkpoints: Tensor | None
    ) -> Gradients:
        x, d_o = with_flat_tokens(x), d_o.contiguous()
        plan = Plan.of(x)
        HV, V, K = x.v.shape[2], x.v.shape[3], x.q.shape[3]
        d_state = plan.sort(d_final) if d_final is not None else torch.zeros_like(plan.initial_state(x))
        if d_checkpoints is not None:
            d_checkpoints = d_checkpoints.reshape(-1, HV, V, K)
        grads = empty_gradients(x)
        segments = list(plan.segments())
        row = sum(segment.active[0] for segment in segments)
        for segment in reversed(segments):
            row -= segment.active[0]
            state = saved[0][row : row + segment.active[0]].clone()
            segment_grad(x, plan, segment, state, d_o, d_state, d_checkpoints, grads)
        if x.initial_state is not None:
            grads = grads._replace(initial_state=plan.unsort(d_state))
        return grads

    def prefill(self, x: PrefillInputs) -> None:
        check_indices(x)
        prefill_by_forward(self, x)

    def decode(self, x: DecodeInputs) -> Tensor:
        return decode(x)

    def verify(self, x: DecodeInputs) -> Tensor:
        return verify(x)

    def commit(self, x: CommitInputs) -> None:
        commit(x)


BACKEND = EagerBackend()
