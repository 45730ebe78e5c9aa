"""Fused kernels around the operator: who is refused, how inputs are routed to them, and on a GPU their numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kda_layers import KDAConfig, KimiDeltaAttention
from kda_layers.kernels.fused import short_conv
from kda_layers.kernels.fused.gated_norm import GATED_NORM, gated_rms_norm
from kda_layers.kernels.fused.mechanism import MIN_TOKENS, few_tokens, for_graph
from kda_layers.kernels.fused.short_conv import SHORT_CONV
from kda_layers.kernels.kda.fla.package import problems
from kda_layers.kernels.registry import Registry, explain, use_backend
from kda_layers.modeling.layer.cache import with_kda_layers
from tests.kernels.cases import BF16, FP16, FP32, FP64, budget, error, poisoned_memory

needs_gpu = pytest.mark.gpu


@pytest.fixture
def installed(required_backends: frozenset[str]) -> None:
    """A skip, or a failure where the backend `fla` is required, unless flash-linear-attention can be used."""
    if problems():
        text = "; ".join(problems())
        (pytest.fail if "fla" in required_backends else pytest.skip)(text)


LENGTHS = (0, 100, 3, 0, 65, 1, 0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def offsets(lengths: tuple[int, ...] | None) -> Tensor | None:
    return None if lengths is None else torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32)


def test_a_cpu_and_fp64_are_refused() -> None:
    few = "there are too few tokens, needs B * T of at least 128"
    fp64 = dataclasses.replace(SHORT_CONV.problem.default("cpu"), dtype=FP64, few_tokens=True)
    assert SHORT_CONV.backends()["fla"].unsupported(SHORT_CONV.problem.default("cpu")) == ["device is cpu, needs cuda"]
    for registry, problem in (
        (SHORT_CONV, fp64),
        (GATED_NORM, dataclasses.replace(GATED_NORM.problem.default("cpu"), dtype=FP64)),
    ):
        reasons = registry.backends()["fla"].unsupported(problem)
        assert reasons[:2] == ["device is cpu, needs cuda", "dtype is float64, needs bfloat16, float16 or float32"]
        assert reasons[2:] == ([few] if problem.few_tokens else [])


def test_a_few_tokens_of_a_graph_are_not_few() -> None:
    x = torch.zeros(1, MIN_TOKENS - 1, 8)
    assert few_tokens(x)
    with for_graph():
        assert not few_tokens(x)
    assert few_tokens(x)
    assert not few_tokens(torch.zeros(1, MIN_TOKENS, 8))


@pytest.mark.parametrize("registry", [SHORT_CONV, GATED_NORM], ids=lambda r: r.operator)
def test_explained(registry: Registry) -> None:
    lines = explain(registry.problem.default("cpu")).splitlines()
    lines = [line for line in lines if not line.startswith("  triton")]  # can serve it where the interpreter runs
    assert lines[1:] == ["  fla      cannot: device is cpu, needs cuda", "  eager    can serve it", "chosen: eager"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """flash-linear-attention's kernels could serve any device; what was chosen before and after is forgotten."""
    for registry in (SHORT_CONV, GATED_NORM):
        backend = registry.backends()["fla"]
        monkeypatch.setattr(backend, "serves", {})
        monkeypatch.setattr(backend, "problems", list)
        registry.clear_caches()
    yield
    for registry in (SHORT_CONV, GATED_NORM):
        registry.clear_caches()


@pytest.mark.usefixtures("served")
def test_they_are_left_out_where_plain_pytorch_is_asked_for() -> None:
    """A name is followed where it can be: of a backend that only the operator next to it has, nothing follows."""
    problem = torch.device("cpu"), BF16, False, False
    assert SHORT_CONV.choose(None, *problem) == "fla"
    assert SHORT_CONV.choose("eager", *problem) == "eager"
    assert SHORT_CONV.choose("sm90", *problem) == "fla"
    assert SHORT_CONV.choose(None, *problem, 5) == "fla"
    assert SHORT_CONV.choose("fla", torch.device("cpu"), BF16, True, False) == "eager"
    with use_backend("eager"):
        assert SHORT_CONV.choose(None, *problem) == "eager"
    x, gate, weight = (torch.ones(1, 128, 2) for _ in range(3))
    for name in ("eager", None):
        with use_backend("eager") if name is None else contextlib.nullcontext():
            assert gated_rms_norm(x, gate, weight[0, 0], 1e-5, lambda x, gate: gate * 3, backend=name).unique() == 3


@pytest.fixture
def played_kernel(served: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention's two functions played by the plain form, so that what is around them runs on a CPU."""

    def forward(x: Tensor, weight: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, **_: Any) -> tuple:
        return short_conv.short_conv(x, weight, initial_state, cu_seqlens, backend="eager")[0].clone(), None

    def backward(x: Tensor, weight: Tensor, dy: Tensor, **more: Any) -> tuple:
        def recorded() -> tuple:
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
            return torch.autograd.grad(forward(*leaves, more["initial_state"], more["cu_seqlens"])[0], leaves, dy)

        with ThreadPoolExecutor(1) as other:  # this one may be inside of an op, where nothing is recorded
            return other.submit(recorded).result()

    functions = SimpleNamespace(causal_conv1d_fwd=forward, causal_conv1d_bwd=backward)
    monkeypatch.setattr(short_conv, "layer_functions", lambda: functions)
    monkeypatch.setattr(GATED_NORM.backends()["fla"], "problems", lambda: ["not here"])
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)  # a class still: torch asks isinstance of it


@pytest.mark.usefixtures("played_kernel")
def test_gradients_with_a_cache_that_moves_on() -> None:
    """The backward of a call reads the state that the call began with, which the cache has overwritten by then."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(16, 2, 8, layer_idx=0).double()
    config = KDAConfig(hidden_size=16, num_hidden_layers=1, linear_num_heads=2, linear_head_dim=8, vocab_size=3)
    x, grads = normal(2, 280, 16), []
    for fused in (True, False):
        cache = with_kda_layers(DynamicCache(config=config))
        if not fused:
            layer.kda_options["backend"] = "eager"
        layer(x[:, :140], past_key_values=cache)
        y = layer(x[:, 140:], past_key_values=cache)
        grads.append(torch.autograd.grad(y.square().sum(), list(layer.parameters())))
    assert all(error(got, want) < 1e-10 for got, want in zip(*grads, strict=True))


@pytest.mark.usefixtures("played_kernel")
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "packed"])
@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "state"])
def test_conv_op(with_state: bool, lengths: tuple[int, ...] | None) -> None:
    B, N, T = (1, len(LENGTHS), sum(LENGTHS)) if lengths else (2, 2, 169)
    x, weight = normal(B, T, 5).requires_grad_(), normal(5, 4, seed=1).requires_grad_()
    state = normal(N, 5, 4, seed=2) if with_state else None
    args = (x, weight, state, offsets(lengths))
    for save in (False, True):
        inputs = (x.detach(), None, None, weight.detach(), *args[2:], save, "fla")
        torch.library.opcheck(torch.ops.kda_layers.short_conv.default, inputs)
    compiled = torch.compile(short_conv.short_conv, backend="aot_eager", fullgraph=True)
    results = []
    for f in (short_conv.short_conv, compiled):
        y, _ = f(*args)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "packed"])
@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "state"])
@pytest.mark.parametrize("T", [2, 4, 169])
@pytest.mark.usefixtures("played_kernel")
def test_routing(T: int, with_state: bool, lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor goes its own way through the kernel, here played by the plain form; the states come out as there."""
    B, N = (1, len(LENGTHS)) if lengths else (2, 2)
    T = sum(LENGTHS) if lengths else T
    widths = (3, 3, 5)
    xs = [normal(B, T, w, seed=i) for i, w in enumerate(widths)]
    weight, state = normal(11, 4, seed=9), normal(N, 11, 4, seed=10) if with_state else None
    cu_seqlens = offsets(lengths)
    plain = short_conv.short_convs(xs, weight, state, cu_seqlens, backend="eager")
    calls, functions = [], short_conv.layer_functions()
    convolve = functions.causal_conv1d_fwd

    def counted(x: Tensor, **more: Any) -> Any:
        calls.append(x.shape[-1])
        return convolve(x, **more)

    monkeypatch.setattr(functions, "causal_conv1d_fwd", counted)
    monkeypatch.setattr(SHORT_CONV.backend("fla"), "features", frozenset(("few_tokens",)))
    fused = short_conv.short_convs(xs, weight, state, cu_seqlens)
    assert calls == list(widths)
    for got, want in zip((*fused[0], fused[1]), (*plain[0], plain[1]), strict=True):
        assert got.shape == want.shape
        assert error(got, want) < 1e-12
    assert short_conv.short_convs(xs, weight, state, cu_seqlens, keep_state=False)[1] is None


# ---------------------------------------------------------------- on a GPU


def check_against_fp64(f: Callable[..., Tensor], tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Output and gradients of the kernel within twice the plain form's error in the same dtype plus a rounding."""
    d_out = None
    results = []
    for cast, device, fused in ((FP64, "cpu", False), (dtype, "cuda", False), (dtype, "cuda", True)):
        leaves = {
            n: t.to(dtype).to(device, cast).requires_grad_() if n != "state" else t.to(dtype).to(device, cast)
            for n, t in tensors.items()
        }
        with poisoned_memory():
            y = f(fused, **leaves)
            d_out = normal(*y.shape, seed=5) if d_out is None else d_out
            trained = {n: t for n, t in leaves.items() if t.requires_grad}
            grads = torch.autograd.grad(y, list(trained.values()), d_out.to(y))
        results.append({"y": y.detach()} | dict(zip(trained, grads, strict=True)))
    truth, plain, got = results
    for n, t in truth.items():
        assert got[n].dtype == dtype
        assert error(got[n], t) <= budget(error(plain[n], t), dtype), n


@needs_gpu
@pytest.mark.compiles
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "packed"])
@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "state"])
@pytest.mark.parametrize("W", [1, 2, 4, 5])
@pytest.mark.parametrize("backend", [None, "fla"], ids=["default", "fla"])
def test_short_conv(
    backend: str | None, W: int, with_state: bool, lengths: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    B, N, T, D = (1, len(LENGTHS), sum(LENGTHS), 48) if lengths else (2, 2, 169, 48)
    tensors = {"x": normal(B, T, D), "weight": normal(D, W, seed=1)}
    if with_state:
        tensors["state"] = normal(N, D, W, seed=2)

    def run(fused: bool, x: Tensor, weight: Tensor, state: Tensor | None = None) -> Tensor:
        cu_seqlens = None if lengths is None else offsets(lengths).to(x.device)
        if not fused:
            with use_backend("eager"):
                return short_conv.short_conv(x, weight, state, cu_seqlens)[0]
        chosen = "triton" if backend is None and 2 <= W <= 4 else "fla"
        assert SHORT_CONV.choose(backend, x.device, x.dtype, False, False, W) == chosen
        return short_conv.short_conv(x, weight, state, cu_seqlens, backend=backend)[0]

    check_against_fp64(run, tensors, dtype)


@needs_gpu
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("D", [16, 100, 128])
@pytest.mark.parametrize("backend", [None, "fla"], ids=["default", "fla"])
def test_gated_norm(backend: str | None, D: int, dtype: torch.dtype) -> None:
    tensors = {"x": normal(2, 70, 3, D), "gate": normal(2, 70, 3, D, seed=1), "weight": normal(D, seed=2)}

    def run(fused: bool, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        if fused:
            assert GATED_NORM.choose(backend, x.device, x.dtype, False) == (backend or "triton")
            return gated_rms_norm(x, gate, weight, 1e-5, backend=backend)
        return torch.nn.functional.rms_norm(x, (D,), weight, 1e-5) * torch.sigmoid(gate)

    check_against_fp64(run, tensors, dtype)
