"""The dtypes and layouts of states that operators take and return; they compute in fp32 whatever they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kda_layers import KDAOutput, kda, kda_prefill, kda_step
from kda_layers.kernels.kda.contract import Inputs, problem_of
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
        *x[:5], **options(x), initial_state=initial, return_final_state=True, checkpoint_every=x.checkpoint_every,
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


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_states_in_the_other_layout(dtype: torch.dtype) -> None:
    """With K = V no shape tells them apart: values, gradients and memory do."""
    x = make_inputs(Case(T=130, H=1, group=2, K=32, V=32, dtype=dtype, state=True))
    more = dict(options(x), return_final_state=True, checkpoint_every=64)
    results = []
    for layout in ("vk", "kv"):
        turn = (lambda t: t.mT) if layout == "kv" else (lambda t: t)
        initial = turn(x.initial_state.detach().clone()).contiguous().requires_grad_()
        out = kda(*x[:5], **more, initial_state=initial, state_layout=layout)
        loss = out.o.float().sum() + (turn(out.final_state)[..., 0] ** 2).sum() + turn(out.checkpoints)[..., 1].sum()
        loss.backward()
        results.append([out.o, *map(turn, (out.final_state, out.checkpoints, initial.grad))])
    for want, got in zip(*results, strict=True):
        assert torch.equal(got, want)
    assert not torch.equal(out.final_state, results[0][1])


def test_states_in_the_other_layout_are_updated_in_place() -> None:
    """States are written if their memory is [V, K], as of those that `kda` returns; otherwise nothing is."""
    x = make_inputs(Case(T=70, B=2, H=1, K=16, V=16, dtype=FP32, state=True))
    token, slots = [t[:, :1] for t in x[:5]], torch.tensor([2, 0])
    for run, given in ((kda_prefill, x[:5]), (kda_step, token)):
        for more in ({}, {"state_indices": slots}):
            want = x.initial_state.clone() if not more else torch.stack([x.initial_state[1], *x.initial_state.flip(0)])
            state = want.clone().mT
            address, extra = state.data_ptr(), {} if run is kda_step else {"checkpoint_at": torch.tensor([0, 0])}
            with torch.no_grad():
                o = run(*given, want, **options(x), **more, **extra)
                got = run(*given, state, **options(x), **more, **extra, state_layout="kv")
            if run is kda_prefill:
                assert torch.equal(got.checkpoints.mT, o.checkpoints)
                o, got = o.o, got.o
            assert torch.equal(got, o)
            assert torch.equal(state.mT, want)
            assert state.data_ptr() == address
        other = x.initial_state.mT.contiguous()
        before = other.clone()
        with torch.no_grad(), pytest.raises(ValueError, match=r"state must be a view .* in place .*mT\.contiguous"):
            run(*given, other, **options(x), state_layout="kv")
        assert torch.equal(other, before)


def test_state_layouts_are_named() -> None:
    x = make_inputs(Case(T=5, H=1, K=16, V=32, dtype=FP32, state=True))
    for run, more in ((kda, {}), (kda_prefill, {"state": x.initial_state}), (kda_step, {"state": x.initial_state})):
        with torch.no_grad(), pytest.raises(ValueError, match="state_layout must be 'vk' or 'kv', got 'VK'"):
            run(*x[:5], **options(x), **more, state_layout="VK")
    with pytest.raises(ValueError, match=r"initial_state must have shape .* \[K, V\] layout, pass state_layout='kv'"):
        kda(*x[:5], **options(x), initial_state=x.initial_state.mT.contiguous())


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_a_step_rounds_a_bf16_state_once(dtype: torch.dtype) -> None:
    """Outputs are those of the same state in fp32, and the state is what that becomes, rounded at the end of a call."""
    x = make_inputs(Case(T=3, B=3, H=1, group=2, K=8, V=16, dtype=dtype, state=True))
    narrow, slots = x.initial_state.bfloat16(), torch.tensor([[3, -1, 4], [-1, -1, -1], [0, 1, 2]])
    for indices, rows in (
        ({}, [0, 1, 2]),
        ({"state_indices": slots[:, 0]}, [3, 0]),
        ({"state_indices": slots}, slice(5)),
    ):
        state = narrow.repeat(2, 1, 1, 1)[: 5 if indices else 3]
        want, before = state.float(), state.clone()
        with torch.no_grad():
            o = kda_step(*x[:5], state, **options(x), **indices, backend="eager")
            assert torch.equal(o, kda_step(*x[:5], want, **options(x), **indices, backend="eager"))
        assert state.dtype == BF16
        assert torch.equal(state, want.bfloat16())
        assert not torch.equal(state[rows], before[rows])
