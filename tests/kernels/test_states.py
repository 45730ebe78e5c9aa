"""The dtypes of states that `kda` takes and returns: it computes in fp32 whatever they are, and rounds once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kda_layers import KDAOutput, kda
from kda_layers.kernels.kda.contract import Inputs
from kda_layers.kernels.kda.dispatch import problem_of
from tests.kernels.cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    Case,
    for_training,
    make_inputs,
    on_every_backend,
    on_every_device,
    options,
    output_gradients,
    serve,
)

CASES = [Case(T=70, H=1, group=2, slow=True), Case(lengths=(3, 0, 65), H=1, slow=True, dtype=FP16)]
on_every_case = pytest.mark.parametrize("case", CASES, ids=["fixed", "packed"])


def call(x: Inputs, initial: Tensor | None, dtype: torch.dtype | None, backend: str | None = None) -> KDAOutput:
    """`kda` with these states."""
    return kda(
        *x[:5], **options(x), initial_state=initial, final_state=True, checkpoint_every=x.checkpoint_every,
        state_dtype=dtype, backend=backend,
    )  # fmt: skip


@on_every_backend
@on_every_device
@on_every_case
@pytest.mark.parametrize(
    ("initial", "asked", "returned"),
    [
        (None, None, FP32), (None, BF16, BF16), (FP32, None, FP32), (FP32, BF16, BF16), (BF16, None, BF16),
        (BF16, BF16, BF16), (BF16, FP32, FP32),
    ],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)  # fmt: skip
def test_dtypes(
    case: Case,
    initial: torch.dtype | None,
    asked: torch.dtype | None,
    returned: torch.dtype,
    device: str,
    backend: str,
    required_backends: frozenset[str],
) -> None:
    """Results are those of the same states in fp32, rounded."""
    x = make_inputs(case, device)
    serve(backend, problem_of(x), required_backends)
    N, (HV, V), K = x.q.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1, x.v.shape[2:], x.q.shape[3]
    state = None if initial is None else torch.randn(N, HV, V, K, device=device).to(initial)
    got, want = (call(x, s, d, backend) for s, d in ((state, asked), (None if state is None else state.float(), FP32)))
    assert (got.final_state.dtype, got.checkpoints.dtype) == (returned, returned)
    assert torch.equal(got.o, want.o)
    assert torch.equal(got.final_state, want.final_state.to(returned))
    assert torch.equal(got.checkpoints, want.checkpoints.to(returned))


def test_fp64_inputs_have_fp64_states() -> None:
    x = make_inputs(Case(T=3, H=1, K=4, V=4, dtype=FP64))
    assert call(x, None, None).final_state.dtype == FP64


@on_every_backend
@on_every_device
@on_every_case
def test_gradients(case: Case, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Gradients are those of the same states in fp32; the initial state's is rounded to its dtype."""
    x = make_inputs(for_training(case, backend, device), device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    d_out = {n: t.to(device) for n, t in output_gradients(x).items()}
    grads = {}
    for dtype in (BF16, FP32):
        initial = torch.ones_like(d_out["final_state"], dtype=dtype, requires_grad=True)
        k = x.k.clone().requires_grad_()
        out = call(x._replace(k=k), initial, None, backend)
        d_final = d_out["final_state"].bfloat16().to(dtype)
        grads[dtype] = torch.autograd.grad([out.o, out.final_state], [k, initial], [d_out["o"], d_final])
    assert torch.equal(grads[BF16][0], grads[FP32][0])
    assert torch.equal(grads[BF16][1], grads[FP32][1].bfloat16())
