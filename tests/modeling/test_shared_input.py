"""Linear layers with one gradient buffer for their input, against the layers called one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

from kda_layers import KDAConfig, KDAForCausalLM, KimiDeltaAttention
from kda_layers.modeling.layer import fused_sums, weights
from kda_layers.modeling.layer.fast_paths import Call
from tests.kernels.cases import BEST_DEVICE, BF16, FP64, error

ROWS = (6, 3, 1, 7)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors of every dtype go the way that CUDA tensors of 16 bits go."""
    monkeypatch.setattr(fused_sums, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(fused_sums, "DTYPES", (torch.bfloat16, torch.float16, torch.float32, torch.float64))


@pytest.mark.parametrize("narrow", [0, 4, 7, 100], ids=["none narrow", "two", "three", "all"])
@pytest.mark.parametrize("frozen", [(), (0,), (1, 2, 3, 4), (2, 4)], ids=str)
def test_gradients(frozen: tuple[int, ...], narrow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_sums, "NARROW", narrow)
    leaves = [normal(2, 3, 5), *(normal(n, 5, seed=n) for n in ROWS)]
    for i, t in enumerate(leaves):
        t.requires_grad_(i not in frozen)
    assert gradcheck(lambda x, *weights: fused_sums.multiplied(x, weights), leaves)
    assert gradgradcheck(lambda x, *weights: fused_sums.multiplied(x, weights), leaves)
    for got, weight in zip(fused_sums.multiplied(leaves[0], leaves[1:]), leaves[1:], strict=True):
        torch.testing.assert_close(got, leaves[0] @ weight.mT)


@pytest.mark.parametrize("used", [(1,), (0, 3), (2, 1, 3)], ids=str)
def test_outputs_that_are_not_used(used: tuple[int, ...]) -> None:
    x, weights = normal(4, 5).requires_grad_(), [normal(n, 5, seed=n).requires_grad_() for n in ROWS]
    outputs = fused_sums.multiplied(x, weights)
    sum(outputs[i].square().sum() for i in used).backward()
    grads = [t.grad for t in (x, *weights)]
    x2, *weights2 = [t.detach().requires_grad_() for t in (x, *weights)]
    sum((x2 @ weights2[i].mT).square().sum() for i in used).backward()
    for got, t in zip(grads, (x2, *weights2), strict=True):
        assert (got is None or not got.any()) if t.grad is None else torch.allclose(got, t.grad)


def test_error_is_no_larger() -> None:
    """One rounding for each product, none for its addition."""
    dtype = BF16
    x, weights = normal(64, 96).to(BEST_DEVICE, dtype), [normal(n, 96, seed=n) for n in (600, 520, 16, 8, 4, 530)]
    weights = [w.to(x) for w in weights]
    d_outputs = [normal(64, w.shape[0], seed=7).to(x) for w in weights]

    def grads(wide: torch.dtype, together: bool) -> tuple[Tensor, ...]:
        leaves = [t.to(wide).requires_grad_() for t in (x, *weights)]
        if together:
            outputs = fused_sums.multiplied(leaves[0], leaves[1:])
        else:
            outputs = tuple(nn.functional.linear(leaves[0], w) for w in leaves[1:])
        return torch.autograd.grad(outputs, leaves, [d.to(wide) for d in d_outputs])

    truth, plain, got = grads(FP64, False), grads(dtype, False), grads(dtype, True)
    assert error(got[0], truth[0]) <= error(plain[0], truth[0])
    for a, b, t in zip(got[1:], plain[1:], truth[1:], strict=True):
        assert error(a, t) <= 1.01 * error(b, t)


def layer() -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(16, 2, 8).double()


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    "ranks",
    [{}, dict(gate_rank=0), dict(gate_rank=0, decay_rank=5), dict(decay="head")],
    ids=["low rank", "full rank", "mixed ranks", "one decay a head"],
)
def test_layer(ranks: dict[str, int | str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made, calls = KimiDeltaAttention(16, 2, 8, **ranks).double(), []
    multiplied = fused_sums.multiplied
    monkeypatch.setattr(fused_sums, "multiplied", lambda *args: calls.append(args) or multiplied(*args))
    results = []
    for devices in (("cpu",), ()):
        monkeypatch.setattr(fused_sums, "DEVICES", devices)
        x = normal(2, 9, 16).requires_grad_()
        y = made(x, attention_mask=torch.tensor([[0] * 4 + [1] * 5, [1] * 9]))
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), [x, *made.parameters()])))
    assert len(calls) == 1
    assert all(error(got, want) < 1e-12 for got, want in zip(*results, strict=True))


@pytest.mark.usefixtures("served")
def test_model_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    config = KDAConfig(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2, linear_num_heads=2, linear_head_dim=8
    )
    torch.manual_seed(0)
    model, ids = KDAForCausalLM(config).double(), torch.arange(18).view(2, 9) % 11
    grads = []
    for devices in (("cpu",), ()):
        monkeypatch.setattr(fused_sums, "DEVICES", devices)
        loss = model(ids, labels=ids).loss
        grads.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    assert all(error(got, want) < 1e-12 for got, want in zip(*grads, strict=True))


def serves(x: Tensor, layers: list[nn.Module]) -> bool:
    return fused_sums.SHARED_INPUT.serves(Call(x), layers)


@pytest.mark.usefixtures("served")
def test_who_is_called_itself() -> None:
    """Whatever sees a layer's call, or reads something else than a weight of the input's dtype."""
    x = normal(1, 2, 5).requires_grad_()
    plain = [nn.Linear(5, 3, bias=False).double(), nn.Linear(5, 2, bias=False).double()]
    assert serves(x, plain)
    hooked = [nn.Linear(5, 3, bias=False).double() for _ in range(4)]
    hooked[0].register_forward_hook(lambda *_: None)
    hooked[1].register_forward_pre_hook(lambda *_: None)
    hooked[2].register_full_backward_hook(lambda *_: None)
    hooked[3].register_full_backward_pre_hook(lambda *_: None)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3, bias=False).double())
    others = [*hooked, normed, nn.Linear(5, 3).double(), nn.Linear(5, 3, bias=False), nn.Identity()]
    for other in others:
        assert not serves(x, [*plain, other])
    assert not serves(x.detach(), plain)
    for context in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False)):
        with context:
            assert not serves(x, plain)

    def differentiated(t: Tensor) -> Tensor:
        assert not serves(t, plain)
        return t.sum()

    torch.func.grad(differentiated)(x.detach())


@pytest.mark.compiles
@pytest.mark.usefixtures("served")
def test_compiled_and_checkpointed() -> None:
    made, x = layer(), normal(2, 9, 16).requires_grad_()
    want = torch.autograd.grad(made(x).square().sum(), [x, *made.parameters()])
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    checkpointed = torch.utils.checkpoint.checkpoint(made, x, use_reentrant=False)
    for y in (compiled(x), checkpointed):
        got = torch.autograd.grad(y.square().sum(), [x, *made.parameters()])
        assert all(error(a, b) < 1e-12 for a, b in zip(got, want, strict=True))


@pytest.mark.usefixtures("served")
def test_both_passes_of_a_reentrant_checkpoint_multiply_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, which records no gradients, lays no weights side by side as inference does: its product is another."""
    config = KDAConfig(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2, linear_num_heads=2, linear_head_dim=8
    )
    torch.manual_seed(0)
    model, ids, calls = KDAForCausalLM(config).double().train(), torch.arange(18).view(2, 9) % 11, []
    multiplied = fused_sums.multiplied
    monkeypatch.setattr(fused_sums, "multiplied", lambda *args: calls.append(args) or multiplied(*args))
    monkeypatch.setattr(weights, "DEVICES", ("cpu",))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert len(calls) == 2 * 2 * 2  # passes, layers, attention and MLP
    assert all(layer.mlp.merged_weights.whole is None for layer in model.model.layers)
