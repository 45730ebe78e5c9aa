"""The peers: flash-linear-attention, FlashQLA, cuDNN and torch's softmax attention, each by its fastest call.

With gates of heads a peer's gated delta net is called. FlashQLA and cuDNN take applied gates alone there, and their
rows say so. Peers are imported where they are prepared; an import that fails is their reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import LOWER_BOUND, activated
from benchmarks.gpu.contenders import Contender, Prepared, Refusal, training
from benchmarks.gpu.truth import Results, differentiable
from kda_layers.kernels.kda.contract import Inputs

FLA, FLASH_QLA, CUDNN, SOFTMAX = "FLA", "FlashQLA", "cuDNN", "softmax attention"
CUDNN_PLAN_SM90 = "kda_hopper_cuda"
ACTIVATED = {"inputs": "activated"}  # in the row of a contender that gets them so


def forward_peers(x: Inputs) -> list[Contender]:
    """Who computes the forward pass of these inputs."""
    if x.g.ndim == 4:
        return [fla_forward(x), cudnn_forward(x)]
    applied = activated(x, norm=False)
    return [
        fla_forward(x),
        *(replace(c, fields=ACTIVATED) for c in (flash_qla_forward(applied), cudnn_forward(applied))),
    ]


# ---------------------------------------------------------------- flash-linear-attention


def _fla_options(x: Inputs) -> dict[str, Any]:
    """The activations and states in its words; states as [V, K], which is our layout."""
    gate = x.gate_activation != "log_decay"
    bounded = x.gate_activation == "lower_bound"
    if bounded and x.g.ndim == 3:
        raise Refusal("its gates of heads are softplus ones, not bounded")
    return ({} if x.g.ndim == 3 else {"lower_bound": x.lower_bound if bounded else None}) | dict(
        scale=x.scale, initial_state=x.initial_state, output_final_state=x.final_state, state_v_first=True,
        use_qk_l2norm_in_kernel=x.qk_l2norm, use_gate_in_kernel=gate,
        use_beta_sigmoid_in_kernel=x.beta_activation == "sigmoid", A_log=x.A_log,
        dt_bias=None if x.dt_bias is None else x.dt_bias.flatten(),
    )  # fmt: skip


def _fla_chunk(x: Inputs, **more: Any) -> Callable[[], Any]:
    offsets = None if x.cu_seqlens is None else x.cu_seqlens.long()
    options = _fla_options(x) | dict(cu_seqlens=offsets) | more
    if x.g.ndim == 3:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return lambda: chunk_gated_delta_rule(*x[:5], **options)
    from fla.ops.kda import chunk_kda

    # What it may take tensor cores for: gates that no token takes below the bound.
    safe = x.gate_activation == "lower_bound" or (
        x.gate_activation == "log_decay" and bool((x.g.detach() >= LOWER_BOUND - 1e-3).all())
    )
    return lambda: chunk_kda(*x[:5], safe_gate=safe, **options)


def fla_forward(x: Inputs) -> Contender:
    def prepare() -> Prepared:
        if x.checkpoint_every:  # it gives them in inference mode only, in bf16, each before its chunk
            run = torch.inference_mode()(_fla_chunk(x, return_intermediate_states=True, output_final_state=True))
            return Prepared(run, lambda out: {"o": out[0], "checkpoints": _after_chunks(out[2], out[1])})
        run = torch.no_grad()(_fla_chunk(x))
        names = ("o", "final_state") if x.final_state else ("o",)
        return Prepared(run, lambda out: dict(zip(names, out, strict=False)))

    return Contender(FLA, prepare)


def _after_chunks(before: Tensor, final: Tensor) -> Tensor:
    """[B, chunks, HV, V, K] states before each of a number of full chunks -> states after each."""
    return torch.cat((before[:, 1:].float(), final[:, None]), 1)


def fla_training(x: Inputs, d_o: Tensor, disable_recompute: bool = False, backward_alone: bool = False) -> Contender:
    def prepare() -> Prepared:
        names, leaves = differentiable(x)
        forward = _fla_chunk(leaves, **({"disable_recompute": True} if disable_recompute else {}))
        return training(lambda: forward()[0], names, leaves, d_o, backward_alone)

    return Contender(FLA + (" saving more" if disable_recompute else ""), prepare)


def fla_step(x: Inputs) -> Contender:
    """Its public function, which returns a new state."""

    def prepare() -> Prepared:
        options = _fla_options(x)
        if x.g.ndim == 3:
            from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as step
        else:
            from fla.ops.kda import fused_recurrent_kda as step

        q, k, v, g, beta = x[:5]
        run = torch.no_grad()(lambda: step(q, k, v, g=g, beta=beta, **options))
        return Prepared(run, lambda out: {"o": out[0], "final_state": out[1]})

    return Contender(FLA, prepare)


def fla_step_in_place(x: Inputs) -> Contender:
    """The function below its public one, which can write the state in place."""

    def prepare() -> Prepared:
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        before = x.initial_state
        assert before is not None
        state = before.clone()
        options = _fla_options(x) | dict(initial_state=state, inplace_final_state=True)
        run = torch.no_grad()(lambda: fused_recurrent_kda_fwd(*x[:5], **options))

        def restore() -> None:
            state.copy_(before)

        return Prepared(run, lambda out: {"o": out[0], "final_state": state}, restore)

    return Contender(FLA + " internal, in place", prepare)


# ---------------------------------------------------------------- FlashQLA


def _flash_qla(x: Inputs) -> Callable[[], Any]:
    """Its gated delta net, which takes applied gates and beta, in fp32 here; states as [V, K]."""
    from flash_qla import chunk_gated_delta_rule

    options = dict(
        scale=x.scale, initial_state=x.initial_state, output_final_state=x.final_state, state_v_first=True,
        use_qk_l2norm_in_kernel=x.qk_l2norm, cu_seqlens=x.cu_seqlens,
    )  # fmt: skip
    return lambda: chunk_gated_delta_rule(*x[:5], **options)


def flash_qla_forward(x: Inputs) -> Contender:
    def prepare() -> Prepared:
        names = ("o", "final_state") if x.final_state else ("o",)
        return Prepared(torch.no_grad()(_flash_qla(x)), lambda out: dict(zip(names, out, strict=False)))

    return Contender(FLASH_QLA, prepare)


def flash_qla_training(x: Inputs, d_o: Tensor) -> Contender:
    def prepare() -> Prepared:
        names, leaves = differentiable(x)
        forward = _flash_qla(leaves)
        return training(lambda: forward()[0], names, leaves, d_o)

    return Contender(FLASH_QLA, prepare)


# ---------------------------------------------------------------- cuDNN


def _cudnn_call(x: Inputs) -> Callable[[], Any]:
    """Its operator on packed [tokens, heads, D] views; gate and beta in fp32, which its Hopper kernel reads."""
    from cudnn.linear_attention import ops

    B, T = x.q.shape[:2]
    offsets = x.cu_seqlens
    if offsets is None:
        offsets = torch.arange(B + 1, dtype=torch.int32, device=x.q.device) * T
    options: dict[str, Any] = dict(
        scale=x.scale, initial_state=x.initial_state, output_final_state=x.final_state,
        use_qk_l2norm_in_kernel=x.qk_l2norm, use_beta_sigmoid_in_kernel=x.beta_activation == "sigmoid",
        a_log=x.A_log, dt_bias=x.dt_bias, checkpoint_every_n_tokens=x.checkpoint_every,
    )  # fmt: skip
    if x.g.ndim == 3:
        operator, options["safe_gate"] = ops.gated_delta_net, x.gate_activation == "softplus"
    elif x.gate_activation == "softplus":
        raise Refusal("its fused gate is the bounded one: no softplus")
    else:
        operator, fused = ops.kimi_delta_attention, x.gate_activation == "lower_bound"
        options |= dict(safe_gate=fused, gate_lower_bound=x.lower_bound if fused else None)
        options["plan_name"] = CUDNN_PLAN_SM90 if torch.cuda.get_device_capability() == (9, 0) else None
    q, k, v, g, beta = (t.flatten(0, 1) for t in x[:5])
    return lambda: operator(q, k, v, g, beta, offsets.int(), **options)


def _cudnn_run(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run`; where cuDNN has no kernel for a graph, it refuses, for the reason that its Hopper engine gives."""
    import cudnn

    def refusing() -> Any:
        try:
            return run()
        except cudnn.cudnnGraphNotSupportedError as problem:
            raise Refusal(str(problem).rpartition(f"{CUDNN_PLAN_SM90}: ")[2]) from problem

    return refusing


def _wide_gates(x: Inputs) -> Inputs:
    return x._replace(g=x.g.float(), beta=x.beta.float())


def cudnn_forward(x: Inputs) -> Contender:
    def prepare() -> Prepared:
        run = _cudnn_run(torch.no_grad()(_cudnn_call(_wide_gates(x))))
        names = ("o", "final_state") if x.final_state else ("o",)

        def results(out: Any) -> Results:
            named = dict(zip(names, out, strict=False))
            return named | {"o": named["o"].view_as(x.v)}

        return Prepared(run, results)

    return Contender(CUDNN, prepare)


def cudnn_training(x: Inputs, d_o: Tensor, backward_alone: bool = False) -> Contender:
    def prepare() -> Prepared:
        names, leaves = differentiable(_wide_gates(x))
        forward = _cudnn_run(_cudnn_call(leaves))
        prepared = training(lambda: forward()[0].view_as(x.v), names, leaves, d_o, backward_alone)
        return prepared._replace(run=_cudnn_run(prepared.run))

    return Contender(CUDNN, prepare)


# ---------------------------------------------------------------- softmax attention

LAST = 64  # queries whose outputs are looked at: those that see every key


def softmax_forward(x: Inputs, heads: list[int]) -> Contender:
    """torch's causal attention on the same q, k and v, which are a model's projections: [B, T, H, D]."""

    def prepare() -> Prepared:
        q, k, v = (t.transpose(1, 2) for t in x[:3])
        attend = torch.nn.functional.scaled_dot_product_attention
        run = torch.no_grad()(lambda: attend(q, k, v, is_causal=True))
        return Prepared(run, lambda o: {"o": o[:, heads, -LAST:]})

    return Contender(SOFTMAX, prepare)


def softmax_training(x: Inputs, d_o: Tensor, heads: list[int]) -> Contender:
    def prepare() -> Prepared:
        leaves = [t.detach().clone().requires_grad_() for t in x[:3]]
        d = d_o.transpose(1, 2)

        def run() -> Any:
            q, k, v = (t.transpose(1, 2) for t in leaves)
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return o, torch.autograd.grad(o, leaves, d)

        def results(out: Any) -> Results:
            o, (d_q, _, _) = out
            return {"o": o.detach()[:, heads, -LAST:], "d_q": d_q.transpose(1, 2)[:, heads, -LAST:]}

        return Prepared(run, results)

    return Contender(SOFTMAX, prepare)


def softmax_truth(x: Inputs, heads: list[int], d_o: Tensor | None = None) -> Results:
    """The last queries' outputs, and with d_o the gradients of those queries, in fp64 from the definition."""
    T = x.q.shape[1]
    q, k, v = (t[:, :, heads].transpose(1, 2).double() for t in x[:3])
    q = q[:, :, -LAST:].detach().requires_grad_(d_o is not None)
    rows = torch.arange(T, device=q.device)[-LAST:, None]
    future = torch.arange(T, device=q.device)[None] > rows
    scores = (q @ k.mT * x.q.shape[-1] ** -0.5).masked_fill(future, float("-inf"))
    o = scores.softmax(-1) @ v
    if d_o is None:
        return {"o": o}
    (d_q,) = torch.autograd.grad(o, q, d_o[:, :, heads].transpose(1, 2)[:, :, -LAST:].double())
    return {"o": o.detach(), "d_q": d_q}
