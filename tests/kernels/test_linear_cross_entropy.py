"""Linear cross entropy by chunks of tokens: against fp64 and the loss on logits, its chunks, and its memory."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kda_layers.kernels.fused import linear_cross_entropy as op
from kda_layers.kernels.fused.linear_cross_entropy import linear_cross_entropy
from tests.kernels.cases import BEST_DEVICE, BF16, FP16, FP32, FP64, budget, error

VOCAB, D = 97, 32
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
precisions = pytest.mark.parametrize("dtype", [FP64, FP32, BF16, FP16], ids=str)

Results = dict[str, Tensor]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of 64 tokens in 16 bits, fewer in others, whose softmax takes 10 rows at a time."""
    monkeypatch.setattr(op, "CHUNK_BYTES", 64 * VOCAB * 2)
    monkeypatch.setattr(op, "SOFTMAX_BYTES", 10 * VOCAB * 4)
    return 64


def problem(tokens: int = 500, device: str = BEST_DEVICE) -> tuple[Tensor, Tensor, Tensor]:
    """x, W and targets with some to ignore; a few tokens are predicted with certainty."""
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, D, dtype=FP64), 0.5 * torch.randn(VOCAB, D, dtype=FP64)
    target = torch.randint(VOCAB, (tokens,))
    x[::5] += 4 * weight[target[::5]]
    target[::7] = -100
    return x.to(device), weight.to(device), target.to(device)


def plain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The sum of losses as transformers computes it: logits in the dtype of x, then fp32; fp64 stays."""
    logits = x @ weight.t()
    logits = logits if logits.dtype == FP64 else logits.float()
    return cross_entropy(logits, target, reduction="sum")


def results(f: Callable[..., Tensor], x: Tensor, weight: Tensor, target: Tensor, scale: float = 1.0) -> Results:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = f(x, weight, target)
    (loss * scale / (target != -100).sum()).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return dict(loss=loss.detach(), x=x.grad, weight=weight.grad)


def check_results(got: Results, yardstick: Results, truth: Results, dtype: torch.dtype) -> None:
    """Fails unless each is within twice the plain loss's error plus a rounding."""
    assert got.keys() == truth.keys()
    for name, t in truth.items():
        limit = budget(error(yardstick[name], t), FP32 if name == "loss" and dtype != FP64 else dtype)
        assert error(got[name], t) <= limit, name


# ---------------------------------------------------------------- the operator


@precisions
@pytest.mark.parametrize("tokens", [1, 64, 500])
def test_loss_and_gradients(dtype: torch.dtype, tokens: int, small_chunks: int) -> None:
    x, weight, target = problem(tokens + 1)
    x, target = x[1:], target[1:]
    truth = results(plain, x, weight, target)
    inputs = x.to(dtype), weight.to(dtype), target
    got = results(linear_cross_entropy, *inputs)
    assert {n: g.dtype for n, g in got.items()} == dict(loss=FP64 if dtype == FP64 else FP32, x=dtype, weight=dtype)
    check_results(got, results(plain, *inputs), truth, dtype)


def test_the_chunks(small_chunks: int) -> None:
    x, weight, _ = problem(500, "cpu")
    assert op.chunk_rows(x[:64].bfloat16(), weight.bfloat16()) == 64
    assert op.chunk_rows(x.bfloat16(), weight.bfloat16()) == 64
    assert op.chunk_rows(x.float(), weight.float()) == 32
    assert op.chunk_rows(x[:0], weight) == 1


@precisions
def test_chunks_change_rounding_alone(dtype: torch.dtype, small_chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight chunks round the gradient of the weight no more often than one chunk does: sums are in fp32."""
    x, weight, target = problem()
    truth = results(plain, x, weight, target)
    inputs = x.to(dtype), weight.to(dtype), target
    chunked = results(linear_cross_entropy, *inputs)
    monkeypatch.setattr(op, "CHUNK_BYTES", 1 << 30)
    whole = results(linear_cross_entropy, *inputs)
    assert torch.equal(chunked["loss"], whole["loss"])
    assert error(chunked["weight"], truth["weight"]) <= 1.2 * error(whole["weight"], truth["weight"]) + 1e-15


@pytest.mark.parametrize("scale", [1.0, 2.0**7])
def test_float16(scale: float, small_chunks: int) -> None:
    """Sums over tokens exceed float16, gradients do not."""
    x, weight, target = problem()
    target[target != -100] = 3
    x, weight = x.abs() * 400, weight / 400
    truth = results(plain, x, weight, target, scale)
    assert truth["weight"].abs().max() < 65504 < truth["weight"].abs().max() * (target == 3).sum() / scale
    inputs = x.half(), weight.half(), target
    check_results(results(linear_cross_entropy, *inputs, scale), results(plain, *inputs, scale), truth, FP16)


def test_float16_does_not_underflow() -> None:
    """1 / tokens and small probabilities together do; the plain loss is saved by loss scaling, which comes later."""
    x, weight, target = problem()
    x, weight = x / 2**8, weight / 2**8
    scale = 2.0**14
    truth = results(plain, x, weight, target, scale)
    inputs = x.half(), weight.half(), target
    check_results(results(linear_cross_entropy, *inputs, scale), results(plain, *inputs, scale), truth, FP16)


@pytest.mark.parametrize("frozen", ["x", "weight", "both"])
def test_a_frozen_input_costs_no_product(frozen: str, small_chunks: int) -> None:
    x, weight, target = (t.cpu() for t in problem())
    want = results(linear_cross_entropy, x, weight, target)
    x.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "x")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss = linear_cross_entropy(x, weight, target)
    products = sum(e.count for e in profile.key_averages() if e.key in ("aten::mm", "aten::addmm_"))
    chunks = math.ceil(500 / op.chunk_rows(x, weight))
    assert chunks > 4
    assert products == chunks * (1 if frozen == "both" else 2)
    assert torch.equal(loss, want["loss"])
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        (loss / (target != -100).sum()).backward()
        assert torch.equal(x.grad if frozen == "weight" else weight.grad, want["x" if frozen == "weight" else "weight"])
        assert (weight.grad if frozen == "weight" else x.grad) is None


def test_a_second_backward_is_refused() -> None:
    x, weight, target = problem()
    loss = linear_cross_entropy(x, weight.requires_grad_(), target)
    loss.backward(retain_graph=True)
    first = weight.grad.clone()
    with pytest.raises(RuntimeError, match=r"taken once, got a second one.*skip_logits=False"):
        loss.backward()
    assert torch.equal(weight.grad, first)
    loss = linear_cross_entropy(x, weight, target)
    (gradient,) = torch.autograd.grad(loss.square(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        gradient.sum().backward()


def test_a_penalty_on_the_gradient_is_refused() -> None:
    """It would be a constant: its derivative would be left out."""
    x, weight, target = problem(5, "cpu")
    x.requires_grad_()
    loss = linear_cross_entropy(x, weight, target)
    (d_x,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        (x.square().sum() + d_x.square().sum()).backward()


@pytest.mark.skipif(BEST_DEVICE != "cpu", reason="on a GPU the loss is NaN: see the next test")
@pytest.mark.parametrize("label", [VOCAB, -1])
def test_a_label_outside_of_the_vocabulary_raises(label: int) -> None:
    x, weight, target = problem()
    target[3] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(x, weight, target)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU raises")
@pytest.mark.parametrize("label", [VOCAB, -1])
def test_a_label_outside_of_the_vocabulary_is_nan_on_a_gpu(label: int) -> None:
    x, weight, target = (t.detach().to("cuda", FP32) if t.is_floating_point() else t.cuda() for t in problem())
    target[3] = label
    assert linear_cross_entropy(x, weight, target).isnan()


@needs_triton
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("vocab", [VOCAB, 9000])
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_the_triton_kernel(dtype: torch.dtype, vocab: int, gradient: bool) -> None:
    """Rows with masked logits, certain ones and ignored ones, as plain PyTorch computes them."""
    from kda_layers.kernels.fused.triton.cross_entropy import loss_rows

    torch.manual_seed(0)
    logits = (4 * torch.randn(41, vocab + 3)).to(BEST_DEVICE, dtype)[:, :vocab]
    target = torch.randint(50, VOCAB, (41,), device=BEST_DEVICE)
    target[::7] = -100
    logits[1, :50] = -math.inf
    logits[2, target[2]] = 40
    want, got = logits.clone(), logits.clone()
    want_losses, losses = torch.empty(2, 41, device=BEST_DEVICE)
    op._softmax(want, target, want_losses, -100, gradient)
    loss_rows(got, target, losses, -100, gradient)
    torch.testing.assert_close(losses, want_losses, rtol=2**-20, atol=2**-20)
    if not gradient:
        assert torch.equal(got, logits)
        return
    assert not got[::7].any()
    truth = logits.double()
    op._softmax(truth, target, torch.empty(41, device=BEST_DEVICE, dtype=FP64), -100, True)
    assert error(got, truth) <= budget(error(want, truth), dtype)
    target[3] = vocab
    loss_rows(got, target, losses, -100, True)
    assert losses.isnan().tolist() == [i == 3 for i in range(41)]


# ---------------------------------------------------------------- memory


def peak_bytes(f: Callable[[], Any]) -> int:
    """The most that `f` allocates on the CPU at a time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        f()
    held, peak = 0, 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its gradients a step takes the logits of some chunks, where the loss on logits takes all of them."""
    tokens, vocab = 4096, 4000
    monkeypatch.setattr(op, "CHUNK_BYTES", 4 << 20)
    monkeypatch.setattr(op, "SOFTMAX_BYTES", 1 << 20)
    x, weight = torch.randn(tokens, D, requires_grad=True), torch.randn(vocab, D, requires_grad=True)
    target = torch.randint(vocab, (tokens,))

    def run(f: Callable[..., Tensor]) -> None:
        x.grad = weight.grad = None
        f(x, weight, target).backward()

    logits, gradients = 4 * tokens * vocab, 4 * D * (tokens + vocab)
    assert peak_bytes(lambda: run(plain)) >= 2 * logits
    assert peak_bytes(lambda: run(linear_cross_entropy)) <= 2 * gradients + (10 << 20)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (3, 1500)], ids=str)
def test_the_triton_kernel_that_scales(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """As PyTorch does by a factor in fp32, which is not rounded to the dtype of the gradient."""
    from kda_layers.kernels.fused.triton.cross_entropy import scale

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(BEST_DEVICE, dtype)
    factor = torch.tensor(1 / 8191, device=BEST_DEVICE)
    want = (x.float() * factor).to(dtype)
    scale(x, factor)
    if BEST_DEVICE == "cuda":
        assert torch.equal(x, want)
    torch.testing.assert_close(x, want, rtol=2**-7, atol=0)  # the interpreter truncates to bfloat16
