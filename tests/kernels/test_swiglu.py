"""SwiGLU: the Triton kernels, on a GPU or in Triton's interpreter, against the plain form."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kda_layers import KDAConfig
from kda_layers.kernels.fused.swiglu import SWIGLU, swiglu, swiglu_linear
from kda_layers.modeling.models.modeling_kda import KDAMLP
from tests.kernels.cases import BEST_DEVICE, BF16, FP16, FP32, FP64, budget, error, poisoned_memory

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def with_gradients(backend: str, gate: Tensor, up: Tensor, d_y: Tensor) -> list[Tensor]:
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    with poisoned_memory():
        y = swiglu(gate, up, backend=backend)
        return [y.detach(), *torch.autograd.grad(y, (gate, up), d_y.to(y))]


@needs_triton
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("D", [1, 24, 1500])
def test_against_fp64(D: int, dtype: torch.dtype) -> None:
    inputs = [(4 * normal(2, 3, D, seed=i)).to(BEST_DEVICE, dtype) for i in range(3)]
    truth = with_gradients("eager", *(t.double() for t in inputs))
    plain, got = with_gradients("eager", *inputs), with_gradients("triton", *inputs)
    for a, b, t in zip(got, plain, truth, strict=True):
        assert a.dtype == dtype
        assert error(a, t) <= budget(error(b, t), dtype)


@needs_triton
def test_large_values() -> None:
    """silu and its derivative end in 0 and in the identity, and neither overflows on the way."""
    gate = torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30], device=BEST_DEVICE).view(1, 1, 5)
    got = with_gradients("triton", gate, torch.ones_like(gate), torch.ones_like(gate))
    want = with_gradients("eager", gate, torch.ones_like(gate), torch.ones_like(gate))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@needs_triton
def test_strided_rows() -> None:
    """Halves of one product, and a gradient of another layout."""
    gate, up = normal(2, 3, 20).to(BEST_DEVICE, FP32).chunk(2, -1)
    d_y = normal(2, 10, 3, seed=1).to(BEST_DEVICE, FP32).mT
    got = with_gradients("triton", gate, up, d_y)
    want = with_gradients("triton", gate.contiguous(), up.contiguous(), d_y.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert swiglu(gate[:0], up[:0], backend="triton").shape == (0, 3, 10)
    gate, up = (t[:1].transpose(0, 1) for t in (gate.contiguous(), up.contiguous()))  # which torch calls contiguous
    got, want = with_gradients("triton", gate, up, up), with_gradients("eager", gate, up, up)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@needs_triton
def test_keeps_its_inputs_only() -> None:
    gate, up = (normal(1, 4, 6, seed=i).to(BEST_DEVICE, FP32).requires_grad_() for i in range(2))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(gate, up, backend="triton")
    assert [t.data_ptr() for t in kept] == [gate.data_ptr(), up.data_ptr()]


@pytest.mark.compiles
def test_mlp_is_plain_on_a_cpu_and_compiled() -> None:
    config = KDAConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=1, linear_num_heads=1, linear_head_dim=8)
    torch.manual_seed(0)
    mlp, x = KDAMLP(config), normal(1, 200, 8).float()
    want = mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert torch.equal(mlp(x), want)
    assert torch.equal(torch.compile(mlp, backend="aot_eager", fullgraph=True)(x), want)
    assert SWIGLU.choose(None, torch.device("cpu"), FP32) == "eager"


@needs_triton
def test_who_gets_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of another rank, of two dtypes, torch.func's and forward mode, compiled code, dispatch modes."""
    x, form = normal(1, 4, 6).to(BEST_DEVICE, FP32), SWIGLU.backend("triton")
    calls, run = [], form.run
    monkeypatch.setattr(form, "run", lambda *args: calls.append(args) or run(*args))

    def squared(t: Tensor) -> Tensor:
        return swiglu(t, t, backend="triton").sum()

    want = torch.autograd.functional.jacobian(lambda t: (nn.functional.silu(t) * t).sum(), x)
    torch.testing.assert_close(torch.func.grad(squared)(x), want)
    with torch.autograd.forward_ad.dual_level():
        assert torch.autograd.forward_ad.unpack_dual(squared(torch.autograd.forward_ad.make_dual(x, x))).tangent != 0
    torch.compile(squared, backend="eager", fullgraph=True)(x)
    with FlopCounterMode(display=False):
        squared(x)
    assert squared(x[0]).isfinite()
    assert squared(x[0, 0]).isfinite()
    assert swiglu(x, x.double(), backend="triton").dtype == FP64
    assert calls == []
    squared(x)
    assert len(calls) == 1
    (d,) = torch.autograd.grad(squared(x.requires_grad_()), x, create_graph=True)
    with pytest.raises(RuntimeError, match="swiglu has no second derivative"):
        d.sum().backward()


# ---------------------------------------------------------------- with the linear layer that follows


def linear_with_gradients(function: Callable[..., Tensor], *inputs: Tensor, d_out: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    with poisoned_memory():
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out))]


def separate(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(swiglu(gate, up, backend="triton"), weight)


def together(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return swiglu_linear(gate, up, weight, backend="triton")


@needs_triton
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("D", [1, 24, 600])
def test_linear_has_the_bits_of_the_two_calls(D: int, dtype: torch.dtype) -> None:
    """The activation that the backward computes again is the forward's."""
    gate, up = (4 * normal(2, 3, 2 * D)).to(BEST_DEVICE, dtype).chunk(2, -1)
    weight, d_out = normal(7, D, seed=1).to(gate), normal(2, 7, 3, seed=2).to(gate).mT
    got = linear_with_gradients(together, gate, up, weight, d_out=d_out)
    want = linear_with_gradients(separate, gate, up, weight, d_out=d_out)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert swiglu_linear(gate[:0], up[:0], weight, backend="triton").shape == (0, 3, 7)


@needs_triton
def test_linear_keeps_no_activation() -> None:
    gate, up = (normal(1, 4, 6, seed=i).to(BEST_DEVICE, FP32).requires_grad_() for i in range(2))
    weight = normal(5, 6).to(gate).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = swiglu_linear(gate, up, weight, backend="triton")
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in (gate, up, weight)]
    first = torch.autograd.grad(out.sum(), (gate, up, weight), retain_graph=True)
    assert all(
        torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out.sum(), (gate, up, weight)), strict=True)
    )


@needs_triton
@pytest.mark.parametrize("trained", [0, 1, 2])
def test_linear_with_frozen_inputs(trained: int) -> None:
    leaves = [normal(*shape).to(BEST_DEVICE, FP32) for shape in ((1, 4, 6), (1, 4, 6), (5, 6))]
    leaves[trained].requires_grad_()
    got, want = (torch.autograd.grad(f(*leaves).square().sum(), leaves[trained])[0] for f in (together, separate))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@needs_triton
def test_linear_in_the_plain_form() -> None:
    """Autocast, compiled code, torch.func, dispatch modes; the eager backend keeps no hand-written function."""
    gate, weight = normal(1, 4, 6).to(BEST_DEVICE, FP32), normal(5, 6).to(BEST_DEVICE, FP32).requires_grad_()
    assert "Swiglu" in type(together(gate, gate, weight).grad_fn).__name__
    with torch.autocast(BEST_DEVICE, BF16):
        assert together(gate, gate, weight).dtype == BF16
    with FlopCounterMode(display=False):
        assert "Swiglu" not in type(together(gate, gate, weight).grad_fn).__name__
    assert "Swiglu" not in type(swiglu_linear(gate, gate, weight, backend="eager").grad_fn).__name__
    compiled = torch.compile(together, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(gate, gate, weight), together(gate, gate, weight))
    got = torch.func.grad(lambda t: together(t, t, weight).sum())(gate)
    torch.testing.assert_close(got, torch.func.grad(lambda t: swiglu_linear(t, t, weight, backend="eager").sum())(gate))
    (d,) = torch.autograd.grad(together(gate, gate.requires_grad_(), weight).sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="swiglu_linear has no second derivative"):
        d.sum().backward()
