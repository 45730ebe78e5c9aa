"""Gradients against finite differences, and what a training loop relies on: determinism, untouched inputs, no waste."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kda_layers import KDAOutput, kda, kda_step
from kda_layers.kernels.kda.activations import GATES
from kda_layers.kernels.kda.backends.cuda import CudaBackend
from kda_layers.kernels.kda.contract import Gradients, Inputs, problem_of
from tests.kernels.cases import (
    BF16,
    FP32,
    FP64,
    Case,
    call,
    check,
    draws,
    for_device,
    for_training,
    ids,
    limits_of,
    make_inputs,
    on_every_backend,
    on_every_device,
    on_typical_shapes,
    options,
    output_gradients,
    poisoned_memory,
    run,
    run_draws,
    run_oracle,
    serve,
    to_fp64,
)


def tensors_of(x: Inputs) -> dict[str, Tensor]:
    return {n: getattr(x, n) for n in Gradients._fields if getattr(x, n) is not None}


GRADCHECKED = [
    Case(T=3, H=1, K=3, V=2, dtype=FP64, state=True),
    Case(T=2, H=1, K=2, V=2, group=2, dtype=FP64, A_log=False),
    *(Case(T=3, H=1, K=2, V=3, dtype=FP64, gate=gate, beta="2sigmoid", state=True) for gate in GATES),
    Case(T=3, H=1, K=2, V=2, dtype=FP64, gate="softplus", dt_bias=False, l2norm=False),
    Case(T=3, H=1, K=2, V=3, dtype=FP64, gate="log_decay", beta="given", state=True),
    Case(lengths=(2, 0, 1), H=1, K=2, V=2, dtype=FP64, state=True),
    *(Case(T=3, H=1, K=3, V=2, dtype=FP64, head_gates=True, gate=gate, state=True) for gate in (*GATES, "log_decay")),
    Case(lengths=(65, 0, 70, 1), H=1, group=2, K=3, V=2, dtype=FP64, head_gates=True, slow=True, state=True),
    Case(T=66, H=1, K=2, V=3, dtype=FP64, slow=True, state=True),  # with a checkpoint: in fast mode
    Case(lengths=(65, 0, 70, 1), H=1, group=2, K=3, V=2, dtype=FP64, slow=True, state=True),
    Case(T=130, B=2, H=1, K=2, V=2, dtype=FP64, gate="softplus", slow=True, beta="2sigmoid"),
]  # fmt: skip


@on_every_backend
@pytest.mark.parametrize("case", **ids(GRADCHECKED))
def test_gradcheck(case: Case, backend: str, required_backends: frozenset[str]) -> None:
    """Every output with respect to every tensor; also that two backward passes are identical."""
    x = make_inputs(case)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    tensors = {n: t.requires_grad_() for n, t in tensors_of(x).items()}

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        out = call(x._replace(**dict(zip(tensors, values, strict=True))), backend)
        return tuple(t for t in out if t.numel())

    assert torch.autograd.gradcheck(function, tuple(tensors.values()), fast_mode=case.tokens > 10)


TRAINING = [
    Case(T=130, B=2, H=2, group=2, dtype=FP32, K=32, V=64, state=True),
    Case(T=130, H=1, state=True),
    Case(lengths=(70, 0, 1, 64), K=32, V=64, slow=True, state=True),
]


@on_every_backend
@on_every_device
@pytest.mark.parametrize("case", **ids(TRAINING))
def test_two_runs_are_identical_and_leave_their_inputs_alone(
    case: Case, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    x = make_inputs(for_training(case, backend, device), device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    before = [t.clone() if isinstance(t, Tensor) else t for t in x]
    d_out = output_gradients(x)
    first = run(lambda x: call(x, backend), x, d_out)
    with poisoned_memory():
        second = run(lambda x: call(x, backend), x, d_out)
    assert [n for n in first if not torch.equal(first[n], second[n])] == []
    for name, old, new in zip(Inputs._fields, before, x, strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new, name


@on_every_backend
@on_every_device
@pytest.mark.parametrize("name", Gradients._fields)
def test_gradient_of_one_input_alone(name: str, device: str, backend: str, required_backends: frozenset[str]) -> None:
    x = make_inputs(for_training(Case(T=70, H=1, group=2, state=True), backend, device), device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    d_out = output_gradients(x)
    all_of_them = run(lambda x: call(x, backend), x, d_out)
    leaf = getattr(x, name).clone().requires_grad_()
    out = call(x._replace(**{name: leaf}), backend)
    returned = {n: t for n, t in out._asdict().items() if t is not None}
    (grad,) = torch.autograd.grad(list(returned.values()), [leaf], [d_out[n].to(device) for n in returned])
    assert torch.equal(grad, all_of_them[f"d_{name}"])


@on_every_backend
@on_every_device
@on_typical_shapes
@pytest.mark.parametrize("name", ["o", "final_state", "checkpoints"])
@pytest.mark.parametrize("lengths", [None, (70, 0, 65, 3)], ids=["fixed", "packed"])
def test_gradient_from_one_output_alone(
    lengths: tuple[int, ...] | None,
    name: str,
    shape: dict,
    device: str,
    backend: str,
    required_backends: frozenset[str],
) -> None:
    """With a gradient that arrives expanded from one number, as `.sum()` makes it."""
    given = dict(lengths=lengths, checkpoints=name == "checkpoints")
    case = Case(B=1 if lengths else 2, slow=True, state=True, **given, **shape)  # gradients reach the initial state
    drawn = draws(for_device(case, device, backend), backend, device)
    serve(backend, problem_of(drawn[0], needs_grad=True), required_backends)

    def ones(x: Inputs) -> dict[str, Tensor]:
        like = output_gradients(x)[name]
        return {name: torch.ones((), dtype=like.dtype, device=x.q.device).expand(like.shape)}

    truth = run_oracle([to_fp64(x) for x in drawn], ones)
    limits = limits_of(run_oracle(drawn, ones), truth, shape["dtype"])
    check(run_draws(lambda x: call(x, backend), drawn, ones), truth, limits)


@on_every_backend
@on_every_device
@pytest.mark.parametrize("name", ["o", "final_state", "checkpoints"])
@pytest.mark.parametrize("lengths", [None, (70, 0, 65, 3)], ids=["fixed", "packed"])
def test_gradients_arrive_in_any_layout(
    lengths: tuple[int, ...] | None, name: str, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """One whose dimensions are stored in reverse order makes no difference."""
    case = Case(B=1 if lengths else 2, lengths=lengths, slow=True, state=True, checkpoints=name == "checkpoints")
    x = make_inputs(case, device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    d_out = output_gradients(x)[name].to(device)
    reverse = range(d_out.ndim)[::-1]
    reversed_d_out = d_out.permute(*reverse).contiguous().permute(*reverse)
    want, got = (run(lambda x: call(x, backend), x, {name: d}) for d in (d_out, reversed_d_out))
    assert reversed_d_out.stride() != d_out.stride()
    assert [n for n in want if not torch.equal(got[n], want[n])] == []


@on_every_backend
@on_every_device
def test_initial_state_in_any_order_of_slots(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """[N, HV, V, K] stored as [HV, N, V, K]: its [V, K] matrices are contiguous, which is all that is asked."""
    x = make_inputs(for_training(Case(B=2, state=True), backend, device), device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    swapped = x._replace(initial_state=x.initial_state.transpose(0, 1).contiguous().transpose(0, 1))
    d_out = output_gradients(x)
    want, got = (run(lambda x: call(x, backend), each, d_out) for each in (x, swapped))
    assert [n for n in want if not torch.equal(got[n], want[n])] == []


@on_every_backend
@on_every_device
def test_recomputed_forward_gives_the_same_gradients(
    device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """Activation checkpointing, which runs the forward again inside the backward."""
    x = make_inputs(for_training(Case(T=70, H=1, dtype=BF16), backend, device), device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    serve(backend, problem_of(x, needs_grad=False), required_backends)
    grads = []
    for recompute in (False, True):
        leaves = {n: t.clone().requires_grad_() for n, t in tensors_of(x).items()}

        def forward(leaves: dict[str, Tensor] = leaves) -> Tensor:
            return call(x._replace(**leaves), backend).o

        o = checkpoint(forward, use_reentrant=False) if recompute else forward()
        o.square().sum().backward()
        grads.append({n: t.grad for n, t in leaves.items()})
    assert [n for n in grads[0] if not torch.equal(grads[0][n], grads[1][n])] == []


@on_every_backend
@on_every_device
@pytest.mark.parametrize("lengths", [None, (70, 0, 65, 3)], ids=["fixed", "packed"])
def test_recompute_changes_no_bit(
    lengths: tuple[int, ...] | None, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """Kept or worked out again: the same results. A backend that has both ways keeps less with one of them."""
    case = Case(B=1 if lengths else 2, T=200, lengths=lengths, group=2, slow=True, state=True)
    x = make_inputs(for_training(case, backend, device), device)
    chosen = serve(backend, problem_of(x, needs_grad=True), required_backends)
    d_out, results = output_gradients(x), []
    for recompute, share in (("never", None), ("always", None), ("auto", None), ("auto", 0.5)):

        def forward(x: Inputs, recompute: str = recompute, share: float | None = share) -> KDAOutput:
            return kda(
                *x[:5], **options(x), initial_state=x.initial_state, return_final_state=True, backend=backend,
                checkpoint_every=x.checkpoint_every, recompute=recompute, memory_share=share,
            )  # fmt: skip

        with poisoned_memory():
            results.append(run(forward, x, d_out))
    for other in results[1:]:
        assert [n for n in results[0] if not torch.equal(results[0][n], other[n])] == []
    always, never = (len(chosen.saved_like(x._replace(recompute_above=share))) for share in (0.0, 1.0))
    assert isinstance(chosen, CudaBackend) == (always < never)


@on_every_backend
@on_every_device
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_autocast_stays_outside(
    dtype: torch.dtype, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """Internal fp32 computations stay in fp32, forward, backward and decoding."""
    x = make_inputs(for_training(Case(T=70, H=1, state=True, dtype=dtype), backend, device), device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    d_out, results = output_gradients(x), []
    for enabled in (False, True):
        with torch.autocast(device, BF16, enabled=enabled):
            result = run(lambda x: call(x, backend), x, d_out)
            with torch.no_grad():
                state = x.initial_state.clone()
                o = kda_step(*(t[:, :1] for t in x[:5]), state, **options(x), backend=backend)
        results.append(result | {"step": o, "state": state})
    assert [n for n in results[0] if not torch.equal(results[0][n], results[1][n])] == []


@on_every_backend
@on_every_device
def test_nothing_is_saved_without_gradients(
    device: str, backend: str, required_backends: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = make_inputs(for_training(Case(H=1), backend, device), device)
    chosen = serve(backend, problem_of(x, needs_grad=True), required_backends)
    counts: list[tuple[bool, int]] = []
    forward = chosen.forward

    def spy(x: Inputs, save: bool) -> tuple:
        out = forward(x, save)
        counts.append((save, len(out[1])))
        return out

    monkeypatch.setattr(chosen, "forward", spy)
    call(x, backend)
    leaf = x._replace(v=x.v.clone().requires_grad_())
    with torch.no_grad():
        o = call(leaf, backend).o
    assert counts == [(False, 0), (False, 0)]
    assert not o.requires_grad
    assert call(leaf, backend).o.requires_grad
    assert counts[2][0]


@on_every_backend
@on_every_device
def test_saved_tensors_are_as_announced(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """`saved_like`, which torch.compile relies on, has the shapes and dtypes of what `forward` saves."""
    for lengths in (None, (70, 0, 65, 3), (1, 1)):
        x = make_inputs(for_training(Case(T=200, H=1, lengths=lengths), backend, device), device)
        chosen = serve(backend, problem_of(x, needs_grad=True), required_backends)
        announced, saved = chosen.saved_like(x), chosen.forward(x, save=True)[1]
        assert [(t.shape, t.dtype, t.stride()) for t in saved] == [(t.shape, t.dtype, t.stride()) for t in announced]


def test_second_derivatives_are_refused() -> None:
    """By name, and not by whatever a backend's own operations do when they are recorded."""
    x = make_inputs(Case(T=5, H=1, K=4, V=4, dtype=FP64))
    q = x.q.clone().requires_grad_()
    loss = call(x._replace(q=q)).o.square().sum()

    def twice() -> None:
        (grad,) = torch.autograd.grad(loss, q, create_graph=True)
        torch.autograd.grad(grad.square().sum(), q)

    with pytest.raises(RuntimeError, match="kda"):
        twice()


def test_changing_an_input_before_the_backward_is_noticed() -> None:
    x = make_inputs(Case(T=5, H=1, K=4, V=4, dtype=FP32))
    v = x.v.clone().requires_grad_()
    q = x.q.clone()
    out = kda(q, x.k, v, x.g, x.beta, A_log=x.A_log, dt_bias=x.dt_bias, lower_bound=-5.0)
    q.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.o.sum().backward()
