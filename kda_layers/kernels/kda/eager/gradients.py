"""One segment, backward: recompute, carry the state's gradient from end to start, then compute the other gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..activations import BETAS, GATES, GIVEN, LOG_DECAY, logits, rates, sigmoid_gradient
from ..contract import CHUNK, Gradients, Inputs, state_dtype
from . import head_gates
from .chunks import Chunks, decayed_reads, decayed_writes, inverse_norm, load
from .decays import halves, levels
from .schedule import Plan, Segment


def empty_gradients(x: Inputs) -> Gradients:
    """Allocate the gradients: zero for A_log and dt_bias, which are summed over segments, else unwritten."""
    inputs = (x.q, x.k, x.v, x.g, x.beta)
    q, k, v, g, beta = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs)
    A_log, dt_bias = (None if t is None else torch.zeros_like(t) for t in (x.A_log, x.dt_bias))
    return Gradients(q, k, v, g, beta, A_log, dt_bias, None)


def segment_grad(
    x: Inputs,
    plan: Plan,
    segment: Segment,
    state: Tensor,
    d_o: Tensor,
    d_state: Tensor,
    d_checkpoints: Tensor | None,
    grads: Gradients,
) -> None:
    """Add one segment's gradients to `grads` and carry `d_state` from the segment's end to its start."""
    V, K = x.v.shape[3], x.q.shape[3]
    c = load(x, segment)
    reads, C = c.reads(), c.v.shape[1]
    starts = c.v.new_empty(c.v.shape[0], V, K)
    d_ends, errors = torch.empty_like(starts), torch.empty_like(c.v)
    chunks = segment.lanes(starts, reads, c.v, c.R, errors, c.decay, c.writes)
    for i, (start, read, v, R, E, decay, write) in enumerate(chunks):
        S = state[: segment.active[i]].view(-1, V, K)
        start.copy_(S)
        torch.bmm(R, torch.baddbmm(v, read[:, :C], S.mT, alpha=-1), out=E)
        S.mul_(decay).baddbmm_(E.mT, write)

    d_o_rows = segment.by_head(segment.gather(d_o).to(c.v.dtype))
    d_errors = torch.bmm(c.M.mT, d_o_rows)
    d_reads = torch.cat((torch.empty_like(d_o_rows), d_o_rows), 1)  # of (p k) S, written below, and of (p q) S
    chunks = segment.lanes(d_ends, d_errors, d_reads, reads, c.R, c.decay, c.writes)
    for i, (d_end, d_error, d_read, read, R, decay, write) in reversed(list(enumerate(chunks))):
        dS = d_state[: segment.active[i]]
        if d_checkpoints is not None:
            checkpoint_rows = plan.checkpoint_rows(segment.first + i)
            dS[: len(checkpoint_rows)] += d_checkpoints[checkpoint_rows]
        dS = dS.view(-1, V, K)
        d_end.copy_(dS)
        torch.bmm(R.mT, d_error.baddbmm_(write, dS.mT), out=d_read[:, :C]).neg_()
        dS.mul_(decay).baddbmm_(d_read.mT, read)

    d_v = d_reads[:, :C].neg()
    d_corner = torch.bmm(d_reads, errors.mT)  # [R, 2C, C]: of L, then of M
    b = c.k * c.beta
    d_q, d_k, d_b, d_g = (_matrix_grad if c.D is None else head_gates.matrix_grad)(c, b, d_corner)
    d_rows = torch.bmm(d_reads, starts)
    d_decay = (starts * d_ends).sum(1, keepdim=True).mul_(c.decay)  # from the chunk's start to its end
    d_g += d_decay.sum_to_size(c.decay.shape)
    _add_reads(d_rows, c.q, c.k, c.p, d_q, d_k, d_g)
    _add_writes(torch.bmm(errors, d_ends), b, c.s, d_b, d_g)

    diagonal = d_corner[:, C:].diagonal(dim1=1, dim2=2)[..., None]
    d_q.addcmul_(diagonal, b)
    d_b.addcmul_(diagonal, c.q)
    d_beta = (c.k * d_b).sum(-1, keepdim=True)
    d_k.addcmul_(c.beta, d_b)
    _activation_grad(x, segment, d_q.mul_(x.scale), d_k, d_v, d_g, d_beta, grads)


def _matrix_grad(c: Chunks, b: Tensor, d_corner: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, b and the log-decay through L and M below their diagonals, with the anchors of the forward."""
    d_q, d_k, d_b, d_g = (torch.zeros_like(b) for _ in range(4))
    R, _, K = b.shape
    reads, writes = torch.empty_like(b), b.new_empty(R, CHUNK // 2, K)
    for h, p, s in levels(c.token_decay):
        if h == CHUNK:
            break
        n = CHUNK // (2 * h)
        # [R, 2 (L, M), n, 2, h, n, 2, h] -> second half of the rows, first half of the columns, same block
        corner = d_corner.view(R, 2, n, 2, h, n, 2, h)[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4)
        corner = corner.permute(0, 4, 1, 2, 3).reshape(R * n, 2 * h, h)
        d_reads = torch.bmm(corner, decayed_writes(b, s, h, writes)).view(R, n, 2 * h, K)
        d_writes = torch.bmm(corner.mT, decayed_reads(c.q, c.k, p, h, reads)).view(R, n, h, K)
        _add_reads(d_reads, *(halves(t, h)[1] for t in (c.q, c.k, p, d_q, d_k, d_g)))
        _add_writes(d_writes, *(halves(t, h)[0] for t in (b, s, d_b, d_g)))
    return d_q, d_k, d_b, d_g


def _add_reads(d_reads: Tensor, q: Tensor, k: Tensor, p: Tensor, d_q: Tensor, d_k: Tensor, d_g: Tensor) -> None:
    """Add the gradients of q, k and the log-decays from d_reads [..., 2h, K], the gradient of (p k, p q).

    A read by token i from before the block decays through every token t <= i of it. Summing exactly these terms,
    instead of subtracting two cumulative sums, loses no digits where gates are strong.
    """
    h = q.shape[-2]
    d_k_part, d_q_part = p * d_reads[..., :h, :], p * d_reads[..., h:, :]
    d_k += d_k_part
    d_q += d_q_part
    through = d_k_part.mul_(k).addcmul_(d_q_part, q)
    d_g += torch.matmul(torch.ones(h, h, dtype=q.dtype, device=q.device).triu_(), through.sum_to_size(d_g.shape))


def _add_writes(d_writes: Tensor, b: Tensor, s: Tensor, d_b: Tensor, d_g: Tensor) -> None:
    """Add the gradients of b and the log-decays (of tokens t > j) from d_writes [..., h, K], the gradient of s b."""
    h = b.shape[-2]
    part = s * d_writes
    d_b += part
    through = part.mul_(b).sum_to_size(d_g.shape)
    d_g += torch.matmul(torch.ones(h, h, dtype=b.dtype, device=b.device).tril_(-1), through)


def _activation_grad(
    x: Inputs, segment: Segment, d_q: Tensor, d_k: Tensor, d_v: Tensor, d_g: Tensor, d_beta: Tensor, grads: Gradients
) -> None:
    """Carry gradients through the activations into `grads`, for real tokens only."""
    HV, wide = x.v.shape[2], state_dtype(x.q.dtype)
    tokens = segment.real_tokens()

    def raw(t: Tensor) -> Tensor:
        return t.reshape(-1, *t.shape[2:]).index_select(0, tokens).to(wide)

    def put(out: Tensor, value: Tensor) -> None:
        out.view(-1, *out.shape[2:]).index_copy_(0, tokens, value.to(out.dtype))

    put(grads.v, segment.by_token(d_v, HV))
    for out, t, d in ((grads.q, x.q, d_q), (grads.k, x.k, d_k)):
        d = segment.by_token(d, HV).unflatten(1, (x.q.shape[2], -1)).sum(2)
        if x.qk_l2norm:
            t = raw(t)
            r = inverse_norm(t)
            y = t * r
            d = r * (d - y * (y * d).sum(-1, keepdim=True))
        put(out, d)

    d_beta = segment.by_token(d_beta, HV)[..., 0]
    if x.beta_activation != GIVEN:
        d_beta = d_beta * sigmoid_gradient(raw(x.beta)) * BETAS[x.beta_activation].scale
    put(grads.beta, d_beta)

    d_g = segment.by_token(d_g, HV)
    if x.gate_activation != LOG_DECAY:
        z, rate = logits(raw(x.g), x.dt_bias), rates(x.A_log)
        d_g, d_A = GATES[x.gate_activation].backward(d_g, z, rate, x.lower_bound)
        if grads.A_log is not None:
            grads.A_log.add_(d_A.sum((0, 2)))
        if grads.dt_bias is not None:
            grads.dt_bias.add_(d_g.sum(0))
    put(grads.g, d_g)
