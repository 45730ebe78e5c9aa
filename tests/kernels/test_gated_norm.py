"""The gated norm's Triton kernels, on a GPU or in Triton's interpreter, against the plain form."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kda_layers import KimiDeltaAttention
from kda_layers.kernels.checks import OUTPUT_ACTIVATIONS
from kda_layers.kernels.fused import rows
from kda_layers.kernels.fused.gated_norm import GATED_NORM, gated_rms_norm, gated_rms_norm_
from kda_layers.kernels.registry import use_backend
from tests.kernels.cases import BEST_DEVICE, BF16, FP16, FP32, FP64, any_length, budget, error, poisoned_memory

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
EPS = 1e-5


@pytest.fixture(autouse=True)
def _any_length() -> Iterator[None]:
    with any_length(GATED_NORM):
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def inputs(*shape: int, dtype: torch.dtype) -> list[Tensor]:
    """x, gate and weight."""
    tensors = normal(*shape), 3 * normal(*shape, seed=1), 1 + normal(shape[-1], seed=2)
    return [t.to(BEST_DEVICE, dtype) for t in tensors]


def run(backend: str, given: list[Tensor], eps: float = EPS, activation: str = "sigmoid") -> list[Tensor]:
    """The output, then the gradients of the inputs."""
    leaves = [t.detach().requires_grad_() for t in given]
    with poisoned_memory():
        y = gated_rms_norm(*leaves, eps, None, activation, backend=backend)
        return [y.detach(), *torch.autograd.grad(y, leaves, normal(*y.shape, seed=5).to(y))]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("activation", OUTPUT_ACTIVATIONS)
@pytest.mark.parametrize("D", [1, 64, 100, 128, 256])
def test_against_fp64(D: int, dtype: torch.dtype, activation: str) -> None:
    given = inputs(2, 5, 3, D, dtype=dtype)
    truth = run("eager", [t.double() for t in given], activation=activation)
    plain, got = (run(backend, given, activation=activation) for backend in ("eager", "triton"))
    for a, b, t in zip(got, plain, truth, strict=True):
        assert a.dtype == dtype
        assert error(a, t) <= budget(error(b, t), dtype)


@pytest.mark.parametrize("shape", [(2, 70), (1, 5, 2, 3, 8), (2, 3, 0, 8), (0, 3, 8)], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    given = inputs(*shape, dtype=FP32)
    for eps in (EPS, 0.0):
        for a, b in zip(run("triton", given, eps), run("eager", given, eps), strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("activation", OUTPUT_ACTIVATIONS)
def test_large_gates(activation: str) -> None:
    """The sigmoid ends in 0 and 1 and does not overflow on the way."""
    x, gate, weight = inputs(1, 1, 2, 5, dtype=FP32)
    gate = torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30]).to(gate).expand_as(x)
    got, want = (run(backend, [x, gate, weight], activation=activation) for backend in ("triton", "eager"))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_an_unknown_activation() -> None:
    x = torch.ones(1, 200, 8)  # as many tokens as the fused forms take
    with pytest.raises(ValueError, match="activation must be one of sigmoid, silu, got 'swish'"):
        gated_rms_norm(x, x, x[0, 0], 1e-6, None, "swish")


def test_strided() -> None:
    x, gate, weight = inputs(2, 5, 6, 16, dtype=FP32)
    given = [x[:, :, :3], gate[:, :, 3:], weight]
    want = run("triton", [t.contiguous() for t in given])
    assert all(torch.equal(a, b) for a, b in zip(run("triton", given), want, strict=True))


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("shape", [(5, 3, 16), (1, 70, 2, 100), (0, 2, 16)], ids=str)
def test_in_place(shape: tuple[int, ...], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, from a gate that is part of wider rows and is not copied."""
    *outer, H, D = shape
    x, wide, weight = inputs(*outer, 3 * H, D, dtype=BF16)
    x, gate = x[..., :H, :].contiguous(), wide[..., H : 2 * H, :]
    want = gated_rms_norm(x, gate.contiguous(), weight, EPS, backend=backend)
    monkeypatch.setattr(GATED_NORM, "choose", lambda *_: backend)
    launch, read = rows.RowTiles.launch, list[int]()

    def recorded(tiles: rows.RowTiles, kernel: Any, *args: Any) -> None:
        read.append(args[1].data_ptr())
        launch(tiles, kernel, *args)

    monkeypatch.setattr(rows.RowTiles, "launch", recorded)
    gated_rms_norm_(x, gate, weight.repeat_interleave(2)[::2], EPS)
    assert torch.equal(x, want)
    assert read == [gate.data_ptr()] * (backend == "triton")


def test_in_place_refuses() -> None:
    x, gate, weight = inputs(4, 2, 8, dtype=FP32)
    with pytest.raises(ValueError, match=r"x must be contiguous, got strides \(1, 4, 8\)"):
        gated_rms_norm_(torch.empty(8, 2, 4).to(x).permute(2, 1, 0), gate, weight, EPS)
    with pytest.raises(ValueError, match=r"gate \(4, 1, 8\), weight \(8,\)"):
        gated_rms_norm_(x, gate[:, :1], weight, EPS)
    with pytest.raises(ValueError, match=r"weight \(7,\)"):
        gated_rms_norm_(x, gate, weight[:7], EPS)


@pytest.mark.parametrize("programs", [1, 3])
def test_several_tiles_for_a_program(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SUMMING", programs)
    monkeypatch.setattr(rows, "TILE", 64)
    given = inputs(2, 5, 3, 24, dtype=FP32)
    got = run("triton", given)
    for a, b in zip(got, run("eager", given), strict=True):
        torch.testing.assert_close(a, b)
    assert all(torch.equal(a, b) for a, b in zip(got, run("triton", given), strict=True))


def test_dtypes_of_a_layer_under_autocast() -> None:
    """A weight in fp32 with 16-bit inputs: the result and each gradient have their tensor's dtype."""
    x, gate, weight = inputs(1, 5, 2, 16, dtype=FP16)
    y, *grads = run("triton", [x, gate, weight.float()])
    assert [t.dtype for t in (y, *grads)] == [FP16, FP16, FP16, FP32]


def test_keeps_its_inputs_only() -> None:
    given = [t.requires_grad_() for t in inputs(1, 4, 2, 8, dtype=FP32)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated_rms_norm(*given, EPS, backend="triton")
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in given]


def test_who_gets_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.func's and forward mode, compiled code, dispatch modes, tensors that broadcast; `plain` where given."""
    x, gate, weight = inputs(1, 4, 2, 8, dtype=FP32)
    calls: list[object] = []
    form = GATED_NORM.backend("triton")
    run = form.run
    monkeypatch.setattr(form, "run", lambda *args: calls.append(args) or run(*args))

    def loss(t: Tensor, backend: str = "triton") -> Tensor:
        return gated_rms_norm(t, gate, weight, EPS, backend=backend).square().sum()

    want = torch.func.grad(lambda t: loss(t, "eager"))(x)
    torch.testing.assert_close(torch.func.grad(loss)(x), want)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent != 0
    torch.testing.assert_close(torch.compile(loss, backend="aot_eager", fullgraph=True)(x), loss(x, "eager"))
    with FlopCounterMode(display=False):
        loss(x)
    assert gated_rms_norm(x, gate[:, :1], weight, EPS, backend="triton").shape == x.shape
    assert calls == []
    loss(x)
    assert len(calls) == 1
    (d,) = torch.autograd.grad(loss(x.requires_grad_()), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gated_rms_norm has no second derivative"):
        d.sum().backward()
    assert gated_rms_norm(x, gate[:, :1], weight, EPS, lambda x, gate: gate * 0, backend="triton").shape == (1, 1, 2, 8)


def test_layer() -> None:
    torch.manual_seed(0)
    layer, x = KimiDeltaAttention(16, 2, 8).to(BEST_DEVICE), normal(2, 9, 16).to(BEST_DEVICE, FP32)
    results = []
    for name in ("triton", "eager"):
        with use_backend(name):
            y = layer(x)
            results.append((y.detach(), *torch.autograd.grad(y.square().sum(), list(layer.parameters()))))
    assert all(error(got, want) < 1e-5 for got, want in zip(*results, strict=True))
