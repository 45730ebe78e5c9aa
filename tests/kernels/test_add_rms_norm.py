"""Addition and RMSNorm: the Triton kernels, on a GPU or in Triton's interpreter, against the plain form."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kda_layers.kernels.fused import rows
from kda_layers.kernels.fused.add_rms_norm import ADD_RMS_NORM, add_rms_norm
from tests.kernels.cases import BEST_DEVICE, BF16, FP16, FP32, FP64, any_length, budget, error, poisoned_memory

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
with_and_without_x = pytest.mark.parametrize("adds", [True, False], ids=["sum", "residual alone"])
EPS = 1e-5


@pytest.fixture(autouse=True)
def _any_length() -> Iterator[None]:
    with any_length(ADD_RMS_NORM):
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def inputs(B: int, T: int, D: int, dtype: torch.dtype, adds: bool = True) -> list[Tensor | None]:
    """residual, x and weight."""
    residual, x, weight = normal(B, T, D), 3 * normal(B, T, D, seed=1), 1 + normal(D, seed=2)
    tensors = residual, x if adds else None, weight
    return [None if t is None else t.to(BEST_DEVICE, dtype) for t in tensors]


def gradients_of(outputs: list[Tensor]) -> list[Tensor]:
    return [normal(*t.shape, seed=5 + i).to(t) for i, t in enumerate(outputs)]


def run(backend: str, given: list[Tensor | None], eps: float = EPS, used: tuple[int, ...] = (0, 1)) -> list[Tensor]:
    """The outputs, then the gradients of the inputs from the outputs `used`."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in given]
    with poisoned_memory():
        outputs = add_rms_norm(*leaves, eps, backend=backend)
        d_outputs = gradients_of([t.detach() for t in outputs])
        trained = [t for t in leaves if t is not None]
        grads = torch.autograd.grad(
            [outputs[i] for i in used], trained, [d_outputs[i] for i in used], allow_unused=True, materialize_grads=True
        )
        return [*(t.detach().clone() for t in outputs), *grads]


@needs_triton
@with_and_without_x
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("D", [1, 24, 100, 1500])
def test_against_fp64(D: int, dtype: torch.dtype, adds: bool) -> None:
    given = inputs(2, 5, D, dtype, adds)
    truth = run("eager", [None if t is None else t.double() for t in given])
    plain, got = run("eager", given), run("triton", given)
    for a, b, t in zip(got, plain, truth, strict=True):
        assert a.dtype == dtype
        assert error(a, t) <= budget(error(b, t), dtype)
    if BEST_DEVICE == "cuda" or dtype != BF16:  # Triton's interpreter truncates to bf16
        assert torch.equal(got[0], plain[0])


@needs_triton
@with_and_without_x
@pytest.mark.parametrize("used", [(0,), (1,)], ids=["sum", "y"])
def test_one_output_used(used: tuple[int, ...], adds: bool) -> None:
    given = inputs(2, 5, 24, FP32, adds)
    for a, b in zip(run("triton", given, used=used), run("eager", given, used=used), strict=True):
        torch.testing.assert_close(a, b)


@needs_triton
@with_and_without_x
def test_strided_rows(adds: bool) -> None:
    """Halves of one product, and tensors of another layout; all aligned alike, as loads decide the order of sums."""
    residual, x, weight = inputs(2, 5, 96, FP32, adds)
    views = [residual[..., :48], None if x is None else x[..., 48:], weight[::2]]
    transposed = [t if t is None or t.ndim == 1 else t.contiguous().mT.contiguous().mT for t in views]
    want = run("triton", [None if t is None else t.contiguous() for t in views])
    for given in (views, transposed):
        assert all(torch.equal(a, b) for a, b in zip(run("triton", given), want, strict=True))


@needs_triton
@with_and_without_x
def test_gradients_of_another_layout(adds: bool) -> None:
    leaves = [None if t is None else t.requires_grad_() for t in inputs(2, 5, 24, FP32, adds)]
    trained = [t for t in leaves if t is not None]
    results = []
    for backend in ("triton", "eager"):
        total, y = add_rms_norm(*leaves, EPS, backend=backend)
        d_total, d_y = normal(2, 24, 5).to(total).mT, normal(1, 1, 24).to(total).expand_as(y)
        results.append(torch.autograd.grad((total, y), trained, (d_total, d_y)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@needs_triton
@with_and_without_x
@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8)], ids=str)
def test_no_rows(shape: tuple[int, int, int], adds: bool) -> None:
    total, y, *grads = run("triton", inputs(*shape, FP32, adds))
    assert total.shape == y.shape == shape
    assert not grads[-1].any()


@needs_triton
def test_rows_beyond_the_last() -> None:
    """A tile of several rows is not full: with eps = 0 the deviation of rows that are not there is 0."""
    given = inputs(1, 5, 24, FP32)
    for a, b in zip(run("triton", given, eps=0.0), run("eager", given, eps=0.0), strict=True):
        torch.testing.assert_close(a, b)


@needs_triton
@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_several_tiles_for_a_program(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SUMMING", programs)
    monkeypatch.setattr(rows, "TILE", 64)
    given = inputs(2, 5, 24, FP32)
    got = run("triton", given)
    for a, b in zip(got, run("eager", given), strict=True):
        torch.testing.assert_close(a, b)
    assert all(torch.equal(a, b) for a, b in zip(got, run("triton", given), strict=True))


@needs_triton
def test_residual_alone_is_not_copied() -> None:
    residual, _, weight = inputs(1, 4, 6, FP32, False)
    leaf = residual.requires_grad_()
    total, _ = add_rms_norm(leaf, None, weight, EPS, backend="triton")
    assert total.data_ptr() == leaf.data_ptr()
    assert total.grad_fn is not None
    with pytest.raises(RuntimeError, match="modified inplace"):
        total.add_(1)
    written = leaf * 1
    _, y = add_rms_norm(written, None, weight, EPS, backend="triton")
    with torch.no_grad():
        written.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@needs_triton
@with_and_without_x
def test_keeps_the_sum_only(adds: bool) -> None:
    residual, x, weight = (None if t is None else t.requires_grad_() for t in inputs(1, 4, 6, FP32, adds))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        total, y = add_rms_norm(residual, x, weight, EPS, backend="triton")
    assert [t.data_ptr() for t in kept] == [total.data_ptr(), weight.data_ptr()]
    first = torch.autograd.grad((total + y).sum(), weight, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad((total + y).sum(), weight)[0])


@needs_triton
@pytest.mark.parametrize("trained", [0, 1, 2], ids=["residual", "x", "weight"])
def test_frozen_inputs(trained: int) -> None:
    leaves = inputs(1, 4, 6, FP32)
    leaves[trained].requires_grad_()
    results = []
    for backend in ("triton", "eager"):
        total, y = add_rms_norm(*leaves, EPS, backend=backend)
        results.append(torch.autograd.grad((total * y).sum(), leaves[trained])[0])
    torch.testing.assert_close(*results)
    with torch.no_grad():
        assert not any(t.requires_grad for t in add_rms_norm(*leaves, EPS, backend="triton"))


@with_and_without_x
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
def test_eager_has_the_bits_of_the_module(dtype: torch.dtype, adds: bool) -> None:
    residual, x, weight = inputs(2, 5, 24, dtype, adds)
    norm = nn.RMSNorm(24, eps=EPS).to(BEST_DEVICE, dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
    want = residual if x is None else residual + x
    total, y = add_rms_norm(residual, x, weight, EPS, backend="eager")
    assert torch.equal(total, want)
    assert torch.equal(y, norm(want))


@needs_triton
def test_who_gets_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of another rank, of two dtypes, torch.func's and forward mode, compiled code, dispatch modes."""
    residual, x, weight = inputs(1, 4, 6, FP32)
    calls: list[object] = []
    form = ADD_RMS_NORM.backend("triton")
    run = form.run
    monkeypatch.setattr(form, "run", lambda *args: calls.append(args) or run(*args))

    def added(t: Tensor) -> Tensor:
        total, y = add_rms_norm(t, x.to(t.dtype), weight, EPS, backend="triton")
        return (total * y).sum()

    def plain(t: Tensor) -> Tensor:
        return ((t + x) * nn.functional.rms_norm(t + x, (6,), weight, EPS)).sum()

    want = torch.autograd.functional.jacobian(plain, residual)
    torch.testing.assert_close(torch.func.grad(added)(residual), want)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(residual, residual)
        assert torch.autograd.forward_ad.unpack_dual(added(dual)).tangent != 0
    torch.testing.assert_close(torch.compile(added, backend="aot_eager", fullgraph=True)(residual), plain(residual))
    with FlopCounterMode(display=False):
        added(residual)
    assert added(residual[0]).isfinite()
    assert add_rms_norm(residual, x[:, :1], weight, EPS, backend="triton")[0].shape == residual.shape
    assert add_rms_norm(residual.double(), x, weight.double(), EPS, backend="triton")[0].dtype == FP64
    assert calls == []
    added(residual)
    assert len(calls) == 1
    y = add_rms_norm(residual.requires_grad_(), x, weight, EPS, backend="triton")[1]
    (d,) = torch.autograd.grad(y.sum(), residual, create_graph=True)
    with pytest.raises(RuntimeError, match="add_rms_norm has no second derivative"):
        d.sum().backward()


def test_choice() -> None:
    assert ADD_RMS_NORM.choose(None, torch.device("cpu"), FP32, False) == "eager"
    assert ADD_RMS_NORM.choose("triton", torch.device("cpu"), FP64, False) == "eager"
    assert ADD_RMS_NORM.choose("sm90", torch.device("cpu"), FP32, False) == "eager"
