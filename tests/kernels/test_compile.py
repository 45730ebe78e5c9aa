"""The three torch ops keep torch's rules, and torch.compile takes calls whole: one graph for every length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kda_layers import KDAOutput, kda, kda_step
from kda_layers.kernels.kda.contract import Inputs, problem_of
from kda_layers.states import quantize_state
from tests.kernels.cases import (
    BF16,
    FP32,
    FP64,
    Case,
    for_training,
    ids,
    make_inputs,
    on_every_backend,
    on_every_device,
    options,
    output_gradients,
    poisoned_memory,
    run,
    serve,
    step_inputs,
)

pytestmark = pytest.mark.compiles

BIG = Case(T=70, B=2, H=1, group=2, state=True)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.compiler.reset()


# ---------------------------------------------------------------- torch's own checks of the ops

CHECKED = [
    BIG,
    Case(T=5, H=1, K=4, V=6, dtype=FP64, gate="softplus", beta="2sigmoid", slow=True, checkpoints=False),
    Case(T=5, B=2, H=1, K=4, V=6, dtype=FP32, gate="log_decay", beta="given", final=False, layout="fused"),
    Case(lengths=(65, 0, 3), H=1, K=4, V=6, dtype=FP32, state=True),
    Case(lengths=(2, 1), H=1, K=4, V=6, dtype=BF16, A_log=False, dt_bias=False, layout="heads_first"),
]


@on_every_backend
@on_every_device
@pytest.mark.parametrize("needs_grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("case", **ids(CHECKED))
def test_chunk_op(case: Case, needs_grad: bool, device: str, backend: str, required_backends: frozenset[str]) -> None:
    x = make_inputs(for_training(case, backend, device) if needs_grad else case, device)
    chosen = serve(backend, problem_of(x, needs_grad), required_backends)
    if {"gate", "beta", "qk_l2norm"} - chosen.fused:
        pytest.skip(f"{backend} does not fuse every activation: what its op gets is not these inputs")
    if needs_grad:
        x = x._replace(**{n: getattr(x, n).requires_grad_() for n in ("q", "k", "v", "g", "beta")})
    with poisoned_memory():  # an op must not return what it has not written: two of its runs would differ
        torch.library.opcheck(torch.ops.kda_layers.kda.default, (*x, needs_grad, backend))


@on_every_backend
@on_every_device
@pytest.mark.parametrize("case", **ids(CHECKED))
def test_chunk_grad_op(case: Case, device: str, backend: str, required_backends: frozenset[str]) -> None:
    case = for_training(case, backend, device)
    x = make_inputs(case, device)
    chosen = serve(backend, problem_of(x, needs_grad=True), required_backends)
    if {"gate", "beta", "qk_l2norm"} - chosen.fused:
        pytest.skip(f"{backend} does not fuse every activation: what its op gets is not these inputs")
    saved = chosen.forward(x, save=True)[1]
    replaced = chosen.replaces(x)
    x, saved = x._replace(**dict(zip(replaced, saved, strict=False))), saved[len(replaced) :]
    d = {n: t.to(device) for n, t in output_gradients(x).items()}
    d_final, d_checkpoints = d["final_state"] if case.final else None, d["checkpoints"] if case.checkpoints else None
    arguments = (*x, backend, saved, d["o"], d_final, d_checkpoints)
    with poisoned_memory():
        torch.library.opcheck(torch.ops.kda_layers.kda_grad.default, arguments)


@on_every_backend
@on_every_device
@pytest.mark.parametrize("kind", ["plain", "pool", "drafts", "packed", "int8"])
def test_step_op(kind: str, device: str, backend: str, required_backends: frozenset[str]) -> None:
    lengths = (2, 0, 1) if kind == "packed" else None
    x = make_inputs(Case(T=2, B=1 if lengths else 2, lengths=lengths, H=1, group=2, state=True), device)
    more: dict[str, Tensor] = {}
    if kind in ("pool", "drafts"):
        more["state"] = x.initial_state.repeat(3, 1, 1, 1)
        more["state_indices"] = torch.tensor([4, 1] if kind == "pool" else [[4, 0], [1, 2]], device=device)
    if kind == "drafts":
        more["num_accepted"] = torch.tensor([1, 2], dtype=torch.int32, device=device)
    if kind == "int8":
        more["state"], more["state_scale"] = quantize_state(x.initial_state)
    inputs = step_inputs(x, **more)
    required = required_backends - {"fla"} if kind == "int8" else required_backends  # it refuses int8 states
    chosen = serve(backend, problem_of(inputs), required)
    if {"gate", "beta", "qk_l2norm"} - chosen.fused:
        pytest.skip(f"{backend} does not fuse every activation: what its op gets is not these inputs")
    with poisoned_memory():
        torch.library.opcheck(torch.ops.kda_layers.kda_step.default, (*inputs, backend))


# ---------------------------------------------------------------- torch.compile


# Options are literals in these functions: torch.compile(dynamic=True) makes symbols of numbers that it finds elsewhere,
# and traces twice where one is a float. It also gives sizes that are equal in the first call one symbol, and sizes of
# 0 and 1 graphs of their own: rows, sequences and checkpoints therefore differ from the numbers of heads and from 1.
LOWER_BOUND: Callable[..., KDAOutput] = lambda *x, **t: kda(*x, **t, lower_bound=-5.0, return_final_state=True)  # noqa: E731
TRAINED: dict[str, tuple[Callable[..., KDAOutput], list[Case]]] = {
    "lengths": (
        LOWER_BOUND,
        [Case(T=T, B=3, H=1, group=2, dtype=FP32, checkpoints=False, state=True) for T in (5, 64, 65, 130, 600)],
    ),
    "lengths and rows": (
        lambda *x, **t: kda(*x, **t, gate_activation="softplus", return_final_state=True),
        [Case(T=T, B=B, gate="softplus", checkpoints=False) for T, B in ((70, 3), (130, 4), (64, 5))],
    ),
    "checkpoints": (
        lambda *x, **t: kda(*x, **t, lower_bound=-5.0, return_final_state=True, checkpoint_every=64),
        [Case(T=T, B=3, H=1, state=True) for T in (130, 200, 400)],
    ),
    "narrow states": (
        lambda *x, initial_state, **t: kda(
            *x, **t, initial_state=initial_state.bfloat16(), lower_bound=-5.0, return_final_state=True
        ),
        [Case(T=T, B=3, H=1, checkpoints=False, state=True) for T in (130, 70)],
    ),
    "packed": (
        LOWER_BOUND,
        [Case(lengths=n, H=1, checkpoints=False) for n in ((3, 65, 60, 5), (64, 0, 1, 64, 70), (190, 1, 1))],
    ),
}


@on_every_backend
@on_every_device
@pytest.mark.parametrize("kind", TRAINED)
def test_training_compiles_once(kind: str, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Forward and backward: the same numbers as without torch.compile, and one graph."""
    function, cases = TRAINED[kind]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for case in cases:
        x = make_inputs(case, device)
        serve(backend, problem_of(x, needs_grad=True), required_backends)

        def forward(x: Inputs, function: Callable[..., KDAOutput]) -> KDAOutput:
            tensors = {n: getattr(x, n) for n in ("A_log", "dt_bias", "initial_state", "cu_seqlens")}
            return function(*x[:5], **tensors, backend=backend)

        d_out = output_gradients(x)
        want, got = (run(lambda x, f=f: forward(x, f), x, d_out) for f in (function, compiled))
        assert want.keys() == got.keys()
        assert [n for n in want if not torch.equal(want[n], got[n])] == []
    assert counter.frame_count == 1


def test_old_keywords_compile() -> None:
    x = make_inputs(Case(T=70))
    old = torch.compile(lambda *x: kda(*x, final_state=True, recompute=True), backend="aot_eager", fullgraph=True)
    want = kda(*x[:5], return_final_state=True, recompute="always")
    assert all(torch.equal(a, b) for a, b in zip(old(*x[:5])[:2], want[:2], strict=True))


@on_every_backend
@on_every_device
@pytest.mark.parametrize("kind", ["fixed", "packed", "pool", "drafts"])
def test_decoding_compiles_once(kind: str, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """For changing numbers of sequences; the state is written in place there too."""
    counter = CompileCounterWithBackend("aot_eager")

    def decode(*x: Tensor, **t: Tensor | None) -> Tensor:
        return kda_step(*x, **t, lower_bound=-5.0, backend=backend)

    compiled = torch.compile(decode, backend=counter, fullgraph=True, dynamic=True)
    for n in (3, 5, 4):
        case = Case(lengths=(1, 0, *range(3, n + 2)), state=True) if kind == "packed" else Case(T=2, B=n, state=True)
        x = make_inputs(case, device)
        more: dict[str, Tensor | None] = {m: getattr(x, m) for m in ("A_log", "dt_bias", "cu_seqlens")}
        state = x.initial_state
        if kind in ("pool", "drafts"):
            state = state.repeat(2, 1, 1, 1)
            slots = torch.randperm(2 * n, generator=torch.Generator().manual_seed(n)).to(device)
            more["state_indices"] = slots[:n] if kind == "pool" else slots.view(n, 2)
        if kind == "drafts":
            more["num_accepted"] = torch.arange(n, device=device) % 2 + 1
        serve(backend, problem_of(step_inputs(x)), required_backends)
        states = [state.clone(), state.clone()]
        with torch.no_grad():
            want, got = (f(*x[:5], s, **more) for f, s in zip((decode, compiled), states, strict=True))
        assert torch.equal(got, want)
        assert torch.equal(*states)
        assert not torch.equal(states[1], state)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    """With ordinary code around the call, forward and backward."""

    def layer(x: Inputs) -> Tensor:
        out = kda(*x[:5], **options(x))
        return (out.o.float() * torch.sigmoid(x.v.float())).square().mean()

    x = make_inputs(Case(T=70, H=1, K=16, V=16, dtype=FP32))
    grads = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        leaves = {n: getattr(x, n).clone().requires_grad_() for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
        function(x._replace(**leaves)).backward()
        grads.append({n: t.grad for n, t in leaves.items()})
    for name, want in grads[0].items():
        torch.testing.assert_close(grads[1][name], want, msg=lambda text, name=name: f"{name}: {text}")
