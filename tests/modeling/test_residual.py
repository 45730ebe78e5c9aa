"""Fused additions, norms and MLPs of a training step, against the modules called one by one."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from kda_layers import KDAConfig, KDAForCausalLM
from kda_layers.kernels.fused.add_rms_norm import ADD_RMS_NORM
from kda_layers.kernels.fused.gated_norm import GATED_NORM
from kda_layers.kernels.fused.swiglu import SWIGLU
from kda_layers.kernels.registry import use_backend
from kda_layers.modeling.layer import fused_sums
from kda_layers.modeling.models import modeling_kda
from tests.kernels.cases import BEST_DEVICE, FP32, any_length, error

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
LAYERS = 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Triton's kernels serve a small model; the names of the fused operators that it calls."""
    seen: list[str] = []

    def counted(f: Callable[..., object]) -> Callable[..., object]:
        return lambda *args: seen.append(f.__name__) or f(*args)  # type: ignore[func-returns-value]

    monkeypatch.setattr(fused_sums, "add_rms_norm", counted(fused_sums.add_rms_norm))
    monkeypatch.setattr(modeling_kda, "swiglu_linear", counted(modeling_kda.swiglu_linear))
    monkeypatch.setattr(fused_sums, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(fused_sums, "DTYPES", (FP32,))
    with any_length(ADD_RMS_NORM, GATED_NORM, SWIGLU), use_backend("triton"):
        yield seen


def made() -> KDAForCausalLM:
    torch.manual_seed(0)
    config = KDAConfig(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, linear_num_heads=2, linear_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )  # fmt: skip
    model = KDAForCausalLM(config).to(BEST_DEVICE)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(torch.randn_like(p) / 4)
    return model.train()


def step(model: KDAForCausalLM) -> tuple[Tensor, ...]:
    """Loss and gradients."""
    ids = torch.arange(18, device=BEST_DEVICE).view(2, 9) % 11
    loss = model(ids, labels=ids).loss
    trained = [p for p in model.parameters() if p.requires_grad]
    return loss.detach(), *torch.autograd.grad(loss, trained)


def plain_step(model: KDAForCausalLM) -> tuple[Tensor, ...]:
    with use_backend("eager"):
        return step(model)


def near(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(error(a, b) < 1e-5 for a, b in zip(got, want, strict=True))


@needs_triton
def test_model_trains_the_same(calls: list[str]) -> None:
    model = made()
    got = step(model)
    assert calls == [*["add_rms_norm", "add_rms_norm", "swiglu_linear"] * LAYERS, "add_rms_norm"]
    assert near(got, plain_step(model))
    assert all(torch.equal(a, b) for a, b in zip(got, step(model), strict=True))


@needs_triton
def test_norms_add_the_gradients_of_the_residual_stream(calls: list[str]) -> None:
    """Autograd adds nothing: one node reads a layer's input, and one the output of its attention."""
    layer = made().model.layers[0]
    x = torch.randn(2, 9, 16, device=BEST_DEVICE, requires_grad=True) * 1
    outputs: list[Tensor] = []
    layer.self_attn.register_forward_hook(lambda _, __, output: outputs.append(output[0]))
    nodes, read = [layer(x).grad_fn], {}
    while nodes:
        node = nodes.pop()
        if node is not None and node not in read:
            read[node] = [following for following, _ in node.next_functions]
            nodes += read[node]
    for made_by in (x.grad_fn, outputs[0].grad_fn):
        assert [node.name() for node, reads in read.items() if made_by in reads] == ["_AddRMSNormBackward"]


@needs_triton
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradient_checkpointing(use_reentrant: bool, calls: list[str]) -> None:
    model = made()
    want = plain_step(model)
    model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
    if use_reentrant:
        model.enable_input_require_grads()
    assert near(step_backward(model), want)
    assert calls


def step_backward(model: KDAForCausalLM) -> tuple[Tensor, ...]:
    """`step` with backward(), as reentrant checkpoints need."""
    ids = torch.arange(18, device=BEST_DEVICE).view(2, 9) % 11
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), *(p.grad for p in model.parameters())


@needs_triton
def test_copies_and_pickles(calls: list[str]) -> None:
    model = made()
    want = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(step(other), want, strict=True))


@needs_triton
@pytest.mark.parametrize("frozen", ["embed_tokens", "norm", "down_proj", "gate_proj"])
def test_frozen_parameters(frozen: str, calls: list[str]) -> None:
    model = made()
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name)
    assert near(step(model), plain_step(model))


class OtherNorm(nn.RMSNorm):
    """A class of its own may compute something else."""


def hooked(norm: nn.RMSNorm, register: str) -> nn.RMSNorm:
    getattr(norm, register)(lambda *_: None)
    return norm


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "forward hook": lambda: hooked(nn.RMSNorm(16, eps=1e-6), "register_forward_hook"),
    "forward pre-hook": lambda: hooked(nn.RMSNorm(16, eps=1e-6), "register_forward_pre_hook"),
    "backward hook": lambda: hooked(nn.RMSNorm(16, eps=1e-6), "register_full_backward_hook"),
    "backward pre-hook": lambda: hooked(nn.RMSNorm(16, eps=1e-6), "register_full_backward_pre_hook"),
    "subclass": lambda: OtherNorm(16, eps=1e-6),
    "default eps": lambda: nn.RMSNorm(16),
    "no weight": lambda: nn.RMSNorm(16, eps=1e-6, elementwise_affine=False),
    "another class": lambda: nn.LayerNorm(16),
    "fp64": lambda: nn.RMSNorm(16, eps=1e-6).double(),
}


@pytest.mark.parametrize("other", OTHERS)
def test_which_norms_are_called(other: str, calls: list[str]) -> None:
    norm, x = OTHERS[other]().to(BEST_DEVICE), torch.randn(1, 3, 16, device=BEST_DEVICE, requires_grad=True)
    total, y = fused_sums.add_and_normalise(x, x, norm)
    assert torch.equal(total, x + x)
    assert torch.equal(y, norm(x + x))
    assert calls == []


def test_when_norms_are_called(calls: list[str]) -> None:
    """Global hooks, autocast."""
    norm, x = nn.RMSNorm(16, eps=1e-6).to(BEST_DEVICE), torch.randn(1, 3, 16, device=BEST_DEVICE, requires_grad=True)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    fused_sums.add_and_normalise(x, x, norm)
    handle.remove()
    with torch.autocast(BEST_DEVICE, torch.bfloat16):
        fused_sums.add_and_normalise(x, x, norm)
    assert calls == []
    fused_sums.add_and_normalise(x, x, norm)
    assert calls == ["add_rms_norm"]


@needs_triton
def test_inference_has_the_bits_of_training(calls: list[str]) -> None:
    """The norms', in a model whose MLPs round alike."""
    model = made()
    x = torch.randn(2, 9, 16, device=BEST_DEVICE)
    results = []
    for context in (contextlib.nullcontext(), torch.no_grad(), torch.inference_mode()):
        with context:
            total, y = fused_sums.add_and_normalise(x, 2 * x, model.model.norm)
            _, alone = fused_sums.add_and_normalise(x, None, model.model.norm)
            results.append((total, y, alone))
    assert len(calls) == 6
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))


def test_a_cpu_that_chooses_by_itself_calls_the_modules() -> None:
    norm, x = made().model.norm, torch.randn(2, 9, 16, device=BEST_DEVICE)
    with use_backend("eager"):
        total, y = fused_sums.add_and_normalise(x, 2 * x, norm)
    assert torch.equal(total, x + 2 * x)
    assert torch.equal(y, norm(x + 2 * x))


@pytest.mark.compiles
@needs_triton
def test_compiled(calls: list[str]) -> None:
    model = made()
    want = plain_step(model)
    layer = model.model.layers[1]
    layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    calls.clear()
    assert near(step(model), want)
    assert len(calls) == 3 * (LAYERS - 1) + 1
