"""Affine maps of the state, which `kda` sends to other ranks, and the gradient of the initial state alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kda_layers.kernels.kda.contract import Inputs, problem_of, state_dtype
from kda_layers.kernels.kda.reference import activate, recurrence
from tests.kernels.cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    Case,
    check,
    for_device,
    ids,
    limits_of,
    make_inputs,
    on_every_backend,
    on_every_device,
    output_gradients,
    serve,
    to_fp64,
)

CASES = [
    Case(K=128, V=128, T=130, B=2, dtype=BF16, state=True, group=2, H=1, slow=True),
    Case(K=64, V=64, dtype=FP16, gate="softplus", state=True, slow=True, lengths=(65, 0, 1, 130, 64, 0)),
    Case(K=8, V=16, T=30, dtype=FP32, state=True, group=2, slow=True),
    Case(K=8, V=16, dtype=FP64, state=True, slow=True, lengths=(3, 0, 70)),
]


def truth_of(x: Inputs) -> dict[str, Tensor]:
    """P, C and the initial state's gradient from the recurrence, in x's precision or, of 16 bits, in fp32."""
    d_o = output_gradients(x)["o"].to(x.v.device)
    (B, T, HV, _), K, wide = x.v.shape, x.q.shape[3], state_dtype(x.q.dtype)
    N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    one = torch.eye(K, dtype=wide, device=x.q.device).expand(N, HV, K, K)
    P = recurrence(x._replace(v=x.v.new_zeros(B, T, HV, K), initial_state=one))[1]
    C = recurrence(x._replace(initial_state=None))[1]
    assert x.initial_state is not None
    initial = x.initial_state.detach().to(wide).requires_grad_()
    wide_v = x._replace(v=x.v.to(wide), initial_state=initial)  # outputs that are not rounded
    (d_initial,) = torch.autograd.grad(recurrence(wide_v)[0], initial, d_o.to(wide))
    return {"P": P, "C": C, "d_initial": d_initial}


@on_every_backend
@on_every_device
@pytest.mark.parametrize("case", **ids(CASES))
def test_against_fp64(case: Case, device: str, backend: str, required_backends: frozenset[str]) -> None:
    case = replace(for_device(case, device, backend), final=False, checkpoints=False)
    x = make_inputs(case, device)
    b = serve(backend, problem_of(x, needs_grad=True), required_backends)
    d_o, ready = output_gradients(x)["o"].to(device), activate(x, b.fused)
    P, C = b.affine_map(ready._replace(initial_state=None, final_state=True))
    _, saved = b.forward(ready, True)
    kept = ready._replace(**dict(zip(b.replaces(ready), saved, strict=False)))
    d_initial = b.initial_gradient(kept, saved[len(b.replaces(ready)) :], d_o.to(x.v.dtype))
    truth = truth_of(to_fp64(x))
    assert truth["P"].abs().max() > 0.1, "gates that forget everything would hide errors"
    check({"P": P, "C": C, "d_initial": d_initial}, truth, limits_of(truth_of(x), truth, x.q.dtype))
