"""Needs of a training loop: gradients by finite differences, determinism, nothing read that nobody wrote,
autocast, checkpointing, torch.compile in one graph, and torch's own checks of the ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from kda_layers.kernels import biased_attention
from kda_layers.kernels.attention_bias.contract import Inputs, problem_of
from tests.kernels.attention.cases import (
    BiasedCase,
    call,
    make_inputs,
    on_every_backend,
    output_gradient,
    run,
    serve,
)
from tests.kernels.cases import BF16, FP16, FP32, FP64, ROUNDOFF, error, ids, poisoned_memory

GRADCHECKED = [
    BiasedCase(T=3, S=5, H_kv=1, group=2, B=2, D=2, bias="1H1S", dtype=FP64),
    BiasedCase(T=3, D=2, bias="B1TS", B=2, H_kv=2, dtype=FP64, causal=False),
    BiasedCase(lengths=(2, 0, 1), D=2, group=2, bias="111S", dtype=FP64),
    BiasedCase(T=3, D=2, bias="", dtype=FP64),
]


@pytest.mark.parametrize("case", **ids(GRADCHECKED))
def test_gradcheck(case: BiasedCase) -> None:
    x = make_inputs(case)
    leaves = [t.requires_grad_() for t in x[:4] if t is not None]

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return call(x._replace(q=q, k=k, v=v, bias=bias))

    assert torch.autograd.gradcheck(function, leaves)


TRAINED = [
    BiasedCase(T=70, B=2, group=2, bias="111S", dtype=FP16),
    BiasedCase(T=40, group=2, bias="11TS", dtype=FP32),
    BiasedCase(T=70, group=2, bias="1K1S"),
    BiasedCase(lengths=(33, 0, 1, 20), group=2, bias="1H1S", dtype=BF16),
    BiasedCase(lengths=(33, 0, 1, 20), group=2, bias="1HTS", dtype=FP16, causal=False),
]


@on_every_backend
@pytest.mark.parametrize("case", **ids(TRAINED))
def test_two_runs_are_identical_and_leave_their_inputs_alone(
    case: BiasedCase, backend: str, device: str, required_backends: frozenset[str]
) -> None:
    """With gradients that arrive in another layout, under autocast and with the forward run again, too."""
    x = make_inputs(case, device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    before, d_o = [t.clone() for t in x[:5] if t is not None], output_gradient(x)
    reverse = range(d_o.ndim)[::-1]
    ways: dict[str, Callable[[], dict[str, Tensor]]] = {
        "plain": lambda: run(lambda x: call(x, backend), x, d_o),
        "layout": lambda: run(lambda x: call(x, backend), x, d_o.permute(*reverse).contiguous().permute(*reverse)),
        "checkpoint": lambda: run(lambda x: checkpoint(lambda: call(x, backend), use_reentrant=False), x, d_o),
    }
    want = ways["plain"]()
    for way in ways.values():
        with torch.autocast(device, BF16), poisoned_memory():
            got = way()
        assert [n for n in want if not torch.equal(got[n], want[n])] == []
    assert all(torch.equal(a, b) for a, b in zip(before, (t for t in x[:5] if t is not None), strict=True))


@on_every_backend
@pytest.mark.parametrize("bias", ["1H1S", "11TS"])
def test_a_sick_sequence_stays_alone(bias: str, backend: str, device: str, required_backends: frozenset[str]) -> None:
    """A packed sequence that is all NaN changes no bit of the others."""
    x = make_inputs(BiasedCase(lengths=(20, 33, 18), group=2, bias=bias, dtype=FP16), device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    sick = x._replace(**{n: getattr(x, n).clone() for n in ("q", "k", "v")})
    for t in sick[:3]:
        t[:, 20:53] = torch.nan
    want, got = (run(lambda x: call(x, backend), y) for y in (x, sick))
    for name, t in want.items():
        if name == "d_bias":
            rest = [(..., slice(0, 20)), (..., slice(53, None))]
        else:
            rest = [(slice(None), slice(0, 20)), (slice(None), slice(53, None))]
        assert all(torch.equal(got[name][part], t[part]) for part in rest), name
    assert got["o"][0, 20:53].isnan().all()


@pytest.mark.parametrize("sizes", [(2, 0, 0), (2, 0, 7), (0, 5, 5), (2, 5, 0)], ids=str)
def test_empty_inputs(sizes: tuple[int, int, int]) -> None:
    """Without keys o is 0; gradients have the shapes of what they are of."""
    B, T, S = sizes
    q, k = torch.ones(B, T, 4, 8, requires_grad=True), torch.ones(B, S, 2, 8, requires_grad=True)
    bias = torch.ones(1, 4, 1, S, requires_grad=True)
    o = biased_attention(q, k, k, bias, causal=T <= S)
    assert torch.equal(o, torch.zeros(B, T, 4, 8))
    o.sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in (q, k, bias))


# ---------------------------------------------------------------- torch.compile and the ops

OPS = [
    BiasedCase(T=20, B=2, H_kv=2, group=2, bias="111S", dtype=FP32),
    BiasedCase(T=20, S=30, H_kv=2, bias="11TS", dtype=FP16, causal=False),
    BiasedCase(lengths=(12, 0, 5), bias="", dtype=FP16),
]


@pytest.mark.compiles
@on_every_backend
@pytest.mark.parametrize("needs_grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("case", **ids(OPS))
def test_op(case: BiasedCase, needs_grad: bool, backend: str, device: str, required_backends: frozenset[str]) -> None:
    x = make_inputs(case, device)
    serve(backend, problem_of(x, needs_grad), required_backends)
    if needs_grad:
        x = Inputs(*(t.requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in x))
        x = x._replace(bias_grad=x.bias is not None)
    with poisoned_memory():  # an op must not return what it has not written: two of its runs would differ
        torch.library.opcheck(torch.ops.kda_layers.biased_attention.default, (*x, needs_grad, backend))


@pytest.mark.compiles
@on_every_backend
@pytest.mark.parametrize("case", **ids(OPS))
def test_grad_op(case: BiasedCase, backend: str, device: str, required_backends: frozenset[str]) -> None:
    x = make_inputs(case, device)
    x = x._replace(bias_grad=x.bias is not None)
    chosen = serve(backend, problem_of(x, needs_grad=True), required_backends)
    o, lse = chosen.attend(x)
    with poisoned_memory():
        torch.library.opcheck(
            torch.ops.kda_layers.biased_attention_grad.default, (*x, backend, [lse, o], torch.ones_like(o))
        )


@pytest.mark.slow
@pytest.mark.compiles
@on_every_backend
@pytest.mark.parametrize("kind", ["per key", "expanded", "packed"])
def test_training_compiles_once(kind: str, backend: str, device: str, required_backends: frozenset[str]) -> None:
    """Forward and backward for every length: the same numbers as without torch.compile, and one graph."""
    torch.compiler.reset()

    def forward(x: Inputs) -> Tensor:
        bias = x.bias.expand(-1, -1, x.q.shape[1], -1) if kind == "expanded" else x.bias
        return biased_attention(x.q, x.k, x.v, bias, cu_seqlens=x.cu_seqlens, backend=backend)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(forward, backend=counter, fullgraph=True, dynamic=True)
    for T in (20, 33, 60):
        lengths = (T - 5, 0, 3, 2) if kind == "packed" else None
        x = make_inputs(BiasedCase(T=T, B=1 if lengths else 3, lengths=lengths, group=2, dtype=FP16), device)
        serve(backend, problem_of(x, needs_grad=True), required_backends)
        want, got = run(forward, x), run(compiled, x)
        if kind == "expanded":  # the compiler sums shares, see `op.compact`
            assert error(got["d_bias"], want.pop("d_bias")) <= 2 * ROUNDOFF[FP16]
        assert [n for n in want if not torch.equal(want[n], got[n])] == []
    assert counter.frame_count == 1


@pytest.mark.compiles
def test_a_bias_of_given_heads_compiles() -> None:
    """Sizes that the code names meet sizes that the compiler takes for variable."""
    torch.compiler.reset()
    x = make_inputs(BiasedCase(T=20, H_kv=2, group=2, bias="111S", dtype=FP32))

    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return biased_attention(q, k, v, bias.expand(1, 4, 1, k.shape[1]))

    want = forward(*x[:4])
    assert torch.equal(torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=True)(*x[:4]), want)


@pytest.mark.slow
@pytest.mark.compiles
def test_compiled_by_inductor() -> None:
    """With ordinary code around the call, a bias computed from the values among it."""
    torch.compiler.reset()
    x = make_inputs(BiasedCase(T=40, group=2, dtype=FP32))
    grads = []

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = torch.nn.functional.softplus(v.mean(-1)).transpose(1, 2)[:, :, None]  # [B, H_kv, 1, S]
        return biased_attention(q, k, v, bias.expand(-1, -1, q.shape[1], -1)).square().mean()

    for function in (layer, torch.compile(layer, fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in x[:3]]
        grads.append(torch.autograd.grad(function(*leaves), leaves))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)
