"""The reference: the eager backend in fp32 for some heads of a case, itself checked against the fp64 oracle.

Heads do not mix in the operator, so those that are looked at are computed alone, from the same 16-bit values. First
and last are looked at: what goes wrong with the size of a grid shows at its end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_layers.kernels.kda.contract import Gradients, Inputs
from kda_layers.kernels.kda.reference import recurrence
from kda_layers.testing.oracle import HEADS, call

Results = dict[str, Tensor]

ORACLE_TOKENS = 128
REFERENCE_LIMIT = 1e-4  # of the fp32 reference against fp64
OF_QK_HEADS = ("d_q", "d_k")


def error(got: Tensor, truth: Tensor) -> float:
    """Relative L2 error, absolute where the truth is zero; NaN where either has one, which no limit admits."""
    if got.shape != truth.shape:
        raise ValueError(f"result must have shape {list(truth.shape)}, got {list(got.shape)}")
    truth = truth.detach().double()
    return float((got.detach().double() - truth).norm() / (truth.norm() or 1.0))


class Heads(NamedTuple):
    """Heads that are looked at."""

    qk: list[int]
    v: list[int]

    @classmethod
    def first_and_last(cls, x: Inputs) -> Heads:
        H, HV = x.q.shape[2], x.v.shape[2]
        qk = sorted({0, H - 1})
        return cls(qk, [h * (HV // H) + i for h in qk for i in range(HV // H)])

    def inputs(self, x: Inputs) -> Inputs:
        """The inputs of these heads alone."""
        of_v = {n: getattr(x, n)[:, :, self.v] for n in ("v", "g", "beta")}
        of_v |= {n: _rows(getattr(x, n), self.v) for n in ("A_log", "dt_bias")}
        state = None if x.initial_state is None else x.initial_state[:, self.v].contiguous()
        return x._replace(q=x.q[:, :, self.qk], k=x.k[:, :, self.qk], initial_state=state, **of_v)

    def results(self, results: Results) -> Results:
        """Return what a contender computed for these heads."""
        at = {n: HEADS[n.removeprefix("d_")] for n in results}
        return {
            n: t.index_select(at[n], torch.tensor(self.qk if n in OF_QK_HEADS else self.v, device=t.device))
            for n, t in results.items()
        }


def _rows(t: Tensor | None, rows: list[int]) -> Tensor | None:
    return None if t is None else t[rows]


def upstream(x: Inputs) -> Tensor:
    """The gradient of the output from which every contender starts: bf16, the same for each of them."""
    generator = torch.Generator(x.v.device).manual_seed(1)
    return torch.randn(x.v.shape, generator=generator, device=x.v.device).bfloat16()


def differentiable(x: Inputs) -> tuple[list[str], Inputs]:
    """Names of the tensors that have gradients, and the inputs with leaves in their place."""
    names = [n for n in Gradients._fields if getattr(x, n) is not None]
    return names, x._replace(**{n: getattr(x, n).detach().clone().requires_grad_() for n in names})


def outputs(out: Any) -> Results:
    """Return the requested outputs of the operator, by name."""
    return {n: t for n, t in zip(("o", "final_state", "checkpoints"), out, strict=True) if t is not None}


def forward_truth(x: Inputs) -> Results:
    """Outputs in fp32 of the inputs as they are, after checking the reference on their first tokens."""
    _check_reference(x, training=False)
    with torch.no_grad():
        return outputs(call(_cast(x, torch.float32), "eager"))


def training_truth(x: Inputs, d_o: Tensor) -> Results:
    """The output and every gradient in fp32, after checking the reference on the first tokens."""
    _check_reference(x, training=True)
    names, x = differentiable(_cast(x, torch.float32))
    o = call(x, "eager").o
    grads = torch.autograd.grad(o, [getattr(x, n) for n in names], d_o.float())
    return {"o": o.detach()} | {f"d_{n}": t for n, t in zip(names, grads, strict=True)}


def oracle(x: Inputs) -> Results:
    """Output and final state by the fp64 recurrence."""
    with torch.no_grad():
        o, final, _ = recurrence(_cast(x, torch.float64))
    return {"o": o, "final_state": final}


def oracle_gradients(x: Inputs, d_o: Tensor) -> Results:
    """The output and every gradient by the fp64 recurrence."""
    names, x = differentiable(_cast(x, torch.float64))
    o = recurrence(x)[0]
    grads = torch.autograd.grad(o, [getattr(x, n) for n in names], d_o.double())
    return {"o": o.detach()} | {f"d_{n}": t for n, t in zip(names, grads, strict=True)}


def _cast(x: Inputs, dtype: torch.dtype) -> Inputs:
    fields: dict[str, Any] = x._asdict()
    floats = {n: t for n, t in fields.items() if isinstance(t, Tensor) and t.is_floating_point()}
    return Inputs(**fields | {n: t.to(dtype) for n, t in floats.items()})


def _check_reference(x: Inputs, training: bool) -> None:
    """Raises unless the fp32 reference agrees with the fp64 oracle on the first tokens of the first sequence."""
    T = min(ORACLE_TOKENS, x.q.shape[1])
    first = {n: getattr(x, n)[:1, :T] for n in ("q", "k", "v", "g", "beta")}
    x = x._replace(**first, initial_state=None, cu_seqlens=None, final_state=False, checkpoint_every=0)
    results = []
    for dtype in (torch.float32, torch.float64):
        names, leaves = differentiable(_cast(x, dtype))
        with torch.set_grad_enabled(training):
            o = call(leaves, "eager").o if dtype == torch.float32 else recurrence(leaves)[0]
            tensors = [o]
            if training:
                weight = torch.linspace(-1, 1, o.numel(), device=o.device, dtype=dtype).view_as(o)
                tensors += torch.autograd.grad((o * weight).sum(), [getattr(leaves, n) for n in names])
        results.append(dict(zip(("o", *(f"d_{n}" for n in names)), tensors, strict=False)))
    errors = {n: error(results[0][n], t) for n, t in results[1].items()}
    if not all(e <= REFERENCE_LIMIT for e in errors.values()):
        raise RuntimeError(f"the fp32 reference disagrees with the fp64 recurrence: {errors}; nothing can be judged")
