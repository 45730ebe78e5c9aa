"""The gradient of a bias is the whole sum over all that it is broadcast in, whoever broadcasts it, and takes no memory
for that."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kda_layers.kernels.attention_bias.backends import eager
from kda_layers.kernels.attention_bias.backends.triton import BACKEND, Launch
from kda_layers.kernels.attention_bias.contract import Inputs, problem_of
from tests.kernels.attention.cases import (
    BiasedCase,
    call,
    dense,
    make_inputs,
    on_every_backend,
    output_gradient,
    run,
    serve,
    to_fp64,
)
from tests.kernels.cases import BF16, FP16, FP32, ROUNDOFF


@pytest.mark.slow
@on_every_backend
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_every_element_of_1_1_1_4196(
    dtype: torch.dtype,
    causal: bool,
    backend: str,
    device: str,
    required_backends: frozenset[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The known failure is that the last one to write wins: the last batch row, head or tile of queries. All of these
    partial sums are far beyond what is allowed here."""
    x = make_inputs(BiasedCase(T=70, S=4196, B=2, H_kv=1, group=2, bias="111S", dtype=dtype, causal=causal), device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    if backend == "triton" and device == "cpu":  # wide tiles: the interpreter takes its time for each
        wide = dict.fromkeys(BACKEND.table(0, dtype, 16, False), Launch(32, 512, 4, 1))
        monkeypatch.setattr(BACKEND, "table", lambda *_: wide)
    exact = to_fp64(x)
    runs = (run(dense, exact), run(dense, x), run(lambda x: call(x, backend), x))
    truth, yardstick, got = (r["d_bias"].cpu().double() for r in runs)
    limit = 2 * ((yardstick - truth).abs().max() + ROUNDOFF[dtype] * truth.abs().max())
    assert (got - truth).abs().max() <= limit
    for part in (slice(1, None),), (slice(None), slice(64, None)), (slice(None), slice(None), slice(1, None)):
        d_o = torch.zeros_like(output_gradient(exact))
        d_o[part] = output_gradient(exact)[part]
        assert (run(dense, exact, d_o)["d_bias"] - truth).abs().max() > 5 * limit


@on_every_backend
@pytest.mark.parametrize("lengths", [None, (0, 30, 1, 9)], ids=["fixed", "packed"])
@pytest.mark.parametrize("bias", ["111S", "1H1S", "B1TS", "1K1S"])
def test_sum_rule(
    bias: str, lengths: tuple[int, ...] | None, backend: str, device: str, required_backends: frozenset[str]
) -> None:
    """It is the gradient of the bias written out in full, summed by hand, but for the rounding of either sum."""
    case = BiasedCase(T=40, B=1 if lengths else 2, H_kv=2, group=2, lengths=lengths, bias=bias, dtype=FP32)
    x = make_inputs(case, device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    B, T, H, _ = x.q.shape
    whole = x.bias if x.bias.shape[1] != 2 else x.bias.repeat_interleave(2, 1)
    full = run(lambda x: call(x, backend), x._replace(bias=whole.expand(B, H, T, T).contiguous()))["d_bias"]
    by_hand = full if bias[1] != "K" else full.unflatten(1, (2, 2)).sum(2)
    size = full.double().abs() if bias[1] != "K" else full.double().abs().unflatten(1, (2, 2)).sum(2)
    got = run(lambda x: call(x, backend), x)["d_bias"]
    assert got.abs().max() > 0
    by_hand, size = (t.sum_to_size(x.bias.shape) for t in (by_hand.double(), size))
    # An element of ds has a few roundings of its own, of the terms that cancel in it.
    assert bool(((got - by_hand).abs() <= 16 * ROUNDOFF[FP32] * (size + 1)).all())


@pytest.mark.parametrize(("rows", "exact"), [(32, True), (40, False)])
def test_equal_shares_of_an_expanded_bias_add_up(rows: int, exact: bool) -> None:
    """In 16 bits to the very number where as many share it as a power of two, else within two roundings."""
    x = make_inputs(BiasedCase(T=rows, B=2, group=2, bias="111S"))
    leaf = x.bias.clone().requires_grad_()
    expanded = leaf.expand(2, 2, rows, rows)
    d_o = output_gradient(x)
    want = run(call, x)["d_bias"]
    (got,) = torch.autograd.grad(call(x._replace(bias=expanded)), leaf, d_o)
    if exact:
        assert torch.equal(got, want)
    else:
        assert bool(((got - want).abs() <= 2 * ROUNDOFF[BF16] * want.abs()).all())
    whole = x.bias.expand(2, 2, rows, rows).detach().requires_grad_()  # a leaf that is itself expanded
    (shares,) = torch.autograd.grad(call(x._replace(bias=whole)), whole, d_o)
    assert shares.stride()[:3] == (0, 0, 0)
    torch.testing.assert_close(shares[:1, :1, :1].float() * 4 * rows, want.float(), rtol=2 * ROUNDOFF[BF16], atol=0)


class LargestTensor(TorchDispatchMode):
    """Notes the largest memory that any operation has made, but for the operators of kda_layers, which it cannot see
    into."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, Tensor):
                self.numbers = max(self.numbers, t.untyped_storage().nbytes() // max(t.element_size(), 1))
        return result


@pytest.mark.parametrize("bias", ["111S", "1H1S", "B11S"])
def test_nothing_has_a_number_for_each_query_and_key(bias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the operator, with an expanded bias, and inside of the eager backend."""
    monkeypatch.setattr(eager, "SCORES", 2**16)
    x = make_inputs(BiasedCase(T=512, B=2, group=2, bias=bias, dtype=FP32))
    leaf = x.bias.clone().requires_grad_()
    with LargestTensor() as around:
        o = call(x._replace(q=x.q.clone().requires_grad_(), bias=leaf.expand(2, 2, 512, 512)), "eager")
        o.backward(torch.ones_like(o))
    with LargestTensor() as inside:
        backend, y = eager.BACKEND, x._replace(bias_grad=True)
        o, lse = backend.attend(y)
        grads = backend.attend_backward(y, o, lse, torch.ones_like(o))
    assert torch.equal(grads.bias, run(call, x, torch.ones_like(o))["d_bias"])
    assert around.numbers <= math.prod(x.q.shape)
    assert inside.numbers <= 2**16  # of 2 * 2 * 512 * 512 scores


@on_every_backend
def test_only_the_bias_has_a_gradient(backend: str, device: str, required_backends: frozenset[str]) -> None:
    x = make_inputs(BiasedCase(T=33, group=2, dtype=FP32), device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    want, d_o = run(lambda x: call(x, backend), x), output_gradient(x).to(device)
    for name in ("q", "bias"):
        leaf = getattr(x, name).clone().requires_grad_()
        (got,) = torch.autograd.grad(call(x._replace(**{name: leaf}), backend), leaf, d_o)
        assert torch.equal(got, want[f"d_{name}"])


@on_every_backend
def test_a_bias_without_a_gradient_costs_none(backend: str, device: str, required_backends: frozenset[str]) -> None:
    """A mask of size T x T is read, and no gradient of its size is made."""
    x: Inputs = make_inputs(BiasedCase(T=33, group=2, bias="11TS", dtype=FP32), device)
    chosen = serve(backend, problem_of(x, needs_grad=True), required_backends)
    o, lse = chosen.attend(x)
    assert chosen.attend_backward(x, o, lse, torch.ones_like(o)).bias is None


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_an_expanded_bias_has_the_gradient_of_a_small_one(dtype: torch.dtype) -> None:
    """Bit for bit, also where an equal share of it is too small for fp16; and past nobody who looks at the view."""
    x = make_inputs(BiasedCase(T=64, group=2, bias="111S", dtype=dtype))
    d_o = output_gradient(x) * 1e-3

    def gradient(expand: Any) -> Tensor:
        leaf = x.bias.detach().clone().requires_grad_()
        call(x._replace(bias=expand(leaf)), "eager").backward(d_o)
        return leaf.grad

    shape = (1, x.q.shape[2], 64, 64)
    small = gradient(lambda b: b)
    assert small.abs().max() > 0
    for expand in (lambda b: b.expand(shape), lambda b: (b * 1)[:, :, :1].expand(shape)):
        assert torch.equal(gradient(expand), small)

    outer = x.bias.detach().clone().requires_grad_()
    inner = outer.detach().requires_grad_()
    view = inner.expand(shape)
    view.retain_grad()
    call(x._replace(bias=view), "eager").backward(d_o)
    assert outer.grad is None
    assert view.grad is not None
    assert inner.grad is not None


@on_every_backend
@pytest.mark.parametrize(("T", "S"), [(20, 20), (1, 300)])  # of one query, the splits have different numbers of keys
def test_the_least_finite_bias_hides_nothing_from_who_sees_nothing_else(
    T: int, S: int, backend: str, device: str, required_backends: frozenset[str]
) -> None:
    """As in torch's own attention: the mean of all values; -inf gives 0."""
    x = make_inputs(BiasedCase(T=T, S=S, causal=False, bias="111S", bias_wide=True, dtype=FP16), device)
    serve(backend, problem_of(x), required_backends)
    mean = x.v.float().mean(1, keepdim=True).expand(x.q.shape)
    for least, want in ((torch.finfo(FP32).min, mean), (-math.inf, 0 * mean)):
        o = call(x._replace(bias=torch.full_like(x.bias, least)), backend)
        assert (o.float() - want).abs().max() <= 2 * ROUNDOFF[FP16] * x.v.abs().max()
