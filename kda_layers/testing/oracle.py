"""The truth of a case, and running a backend beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_layers.kernels.checks import accumulator_dtype
from kda_layers.kernels.kda.activations import BOUNDED_GATES
from kda_layers.kernels.kda.contract import Gradients, Inputs, KDAOutput
from kda_layers.kernels.kda.op import kda
from kda_layers.kernels.kda.reference import recurrence
from kda_layers.testing.budgets import budget, check, error, limits_of
from kda_layers.testing.cases import Case, make_inputs, to_fp64

# The dimension of heads of each input and output; of value heads but for q and k.
HEADS = {
    "q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "A_log": 0, "dt_bias": 0, "initial_state": 1, "o": 2, "final_state": 1,
    "checkpoints": 2,
}  # fmt: skip
MOST_STATES = 2**26  # elements of the states of all tokens in one pass; autograd keeps about five times as many


def options(x: Inputs) -> dict:
    """The keyword arguments that `kda` and `kda_step` share."""
    return {
        "A_log": x.A_log, "dt_bias": x.dt_bias, "cu_seqlens": x.cu_seqlens, "gate_activation": x.gate_activation,
        "lower_bound": x.lower_bound if x.gate_activation in BOUNDED_GATES else None,
        "beta_activation": x.beta_activation, "qk_l2norm": x.qk_l2norm, "scale": x.scale,
    }  # fmt: skip


def call(x: Inputs, backend: str | None = None) -> KDAOutput:
    """`kda` on the fields of Inputs."""
    recompute = {0.0: "always", 1.0: "never"}.get(x.recompute_above, "auto")
    return kda(
        *x[:5], **options(x), initial_state=x.initial_state, return_final_state=x.final_state,
        checkpoint_every=x.checkpoint_every, recompute=recompute,
        memory_share=x.recompute_above if recompute == "auto" else None, segments=x.segments, backend=backend,
    )  # fmt: skip


def oracle(x: Inputs) -> KDAOutput:
    o, final, checkpoints = recurrence(x)
    return KDAOutput(o, final if x.final_state else None, checkpoints if x.checkpoint_every else None)


def outputs(out: KDAOutput) -> dict[str, Tensor]:
    """Return the requested outputs, by name."""
    return {n: t.detach() for n, t in out._asdict().items() if t is not None and t.numel()}


def output_gradients(x: Inputs) -> dict[str, Tensor]:
    """A random gradient of each output, rounded to the output's dtype."""
    generator = torch.Generator().manual_seed(1)
    B, T, HV, V = x.v.shape
    N, K = B if x.cu_seqlens is None else len(x.cu_seqlens) - 1, x.q.shape[3]
    shapes = {"o": x.v.shape, "final_state": (N, HV, V, K), "checkpoints": (B, T // 64, HV, V, K)}
    dtypes = {"o": x.v.dtype}
    return {
        n: torch.randn(shape, generator=generator).to(dtypes.get(n, accumulator_dtype(x.v.dtype)))
        for n, shape in shapes.items()
    }


def run(fn: Callable[[Inputs], KDAOutput], x: Inputs, d_out: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of `fn` on `x`, by name, and where gradients are enabled those of every tensor for `d_out`.

    `d_out` holds the gradients of some or all outputs.
    """
    names = [n for n in Gradients._fields if getattr(x, n) is not None]
    x = x._replace(**{n: getattr(x, n).detach().requires_grad_() for n in names})
    out = fn(x)
    if not torch.is_grad_enabled():
        return outputs(out)
    used = {n: t for n, t in out._asdict().items() if n in d_out and t is not None and t.requires_grad}
    grads = torch.autograd.grad(
        list(used.values()),
        [getattr(x, n) for n in names],
        [d_out[n].to(t) for n, t in used.items()],
        materialize_grads=True,  # for the recurrence, where nothing leads from the state to q
    )
    return outputs(out) | {f"d_{n}": d for n, d in zip(names, grads, strict=True)}


def run_draws(
    fn: Callable[[Inputs], KDAOutput],
    draws: list[Inputs],
    d_out: Callable[[Inputs], dict[str, Tensor]] = output_gradients,
) -> dict[str, Tensor]:
    """`run` for gradients of the outputs (random by default), every draw stacked into one tensor [draws, ...]."""
    results = [run(fn, x, d_out(x)) for x in draws]
    return {n: torch.stack([r[n].cpu() for r in results]) for n in results[0]}


def run_oracle(
    draws: list[Inputs], d_out: Callable[[Inputs], dict[str, Tensor]] = output_gradients
) -> dict[str, Tensor]:
    """Return `run_draws(oracle, draws, d_out)` of draws of one case.

    Heads are independent, so one pass over the tokens serves the heads of all draws, as many as MOST_STATES allows.
    """
    x, group = draws[0], draws[0].v.shape[2] // draws[0].q.shape[2]
    heads = max(1, MOST_STATES // (x.q[:, :, 0].numel() * group * x.v.shape[3]))

    def split(of_draws: list[dict[str, Tensor]]) -> dict[str, tuple[Tensor, ...]]:
        return {
            n: torch.cat([tensors[n] for tensors in of_draws], HEADS[n]).split(
                heads if n in ("q", "k") else heads * group, HEADS[n]
            )
            for n in of_draws[0]
        }

    names = [n for n in Gradients._fields if getattr(x, n) is not None]
    inputs: dict[str, Any] = split([{n: getattr(y, n) for n in names} for y in draws])
    d_outputs = split([d_out(y) for y in draws])
    parts = [
        run(oracle, x._replace(**{n: t[i] for n, t in inputs.items()}), {n: t[i] for n, t in d_outputs.items()})
        for i in range(len(inputs["q"]))
    ]
    dims = {n: HEADS[n.removeprefix("d_")] for n in parts[0]}
    return {n: torch.stack(torch.cat([p[n].cpu() for p in parts], at).chunk(len(draws), at)) for n, at in dims.items()}


def check_near(got: Tensor, compute: Callable[[Callable[[Inputs], Inputs]], Tensor], dtype: torch.dtype) -> None:
    """Fails unless `got` is within budget of what `compute` makes of the inputs that it casts."""
    truth, yardstick = compute(to_fp64), compute(lambda x: x)
    assert error(got, truth) <= budget(error(yardstick, truth), dtype)


def check_backend(case: Case, backend: str, device: str) -> None:
    """Fail unless outputs and gradients of a backend on `case` are within budget, every draw of its inputs together."""
    draws = [make_inputs(case, device, n) for n in range(case.draws)]
    truth, yardstick = (run_oracle([cast(x) for x in draws]) for cast in (to_fp64, lambda x: x))
    check(run_draws(lambda x: call(x, backend), draws), truth, limits_of(yardstick, truth, case.dtype))
