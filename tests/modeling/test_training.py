"""Training of layers and models as trainers do it, on every backend that serves gradients, on the best device here.

On a GPU in bf16 with heads of 128 channels, which the fast backends are made for; on a CPU with small ones.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kda_layers import KDAConfig, KDAForCausalLM, KimiDeltaAttention
from kda_layers.kernels.kda.contract import default_problem
from kda_layers.modeling.models.loss import LazyLogitsOutput
from tests.kernels.cases import BEST_DEVICE, BF16, FP32, on_installed_backends, serve

pytestmark = pytest.mark.slow

VOCAB = 97
WIDTH = 128 if BEST_DEVICE == "cuda" else 16
CONFIG = dict(
    vocab_size=VOCAB, hidden_size=2 * WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=2, linear_num_heads=2,
    linear_head_dim=WIDTH, num_attention_heads=2, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
needs_cuda = pytest.mark.gpu


@pytest.fixture
def served(backend: str, required_backends: frozenset[str]) -> Iterator[str]:
    """The backend, which serves these models' gradients."""
    serve(backend, replace(default_problem(BEST_DEVICE), K=WIDTH, V=WIDTH), required_backends)
    yield backend
    gc.collect()  # graphs and models that refer to themselves


def build_layer(backend: str, dtype: torch.dtype = BF16) -> KimiDeltaAttention:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(2 * WIDTH, 2, WIDTH, backend=backend)
    return layer.to(BEST_DEVICE, dtype).train()


def build_model(backend: str, dtype: torch.dtype = BF16, device: str = BEST_DEVICE) -> Any:
    torch.manual_seed(0)
    model = KDAForCausalLM(KDAConfig(**CONFIG)).to(device, dtype).train()
    for layer in model.model.layers:
        layer.self_attn.kda_options["backend"] = backend
    return model


def batch(seed: int, rows: int = 2, length: int = 130, device: str = BEST_DEVICE) -> Tensor:
    """Tokens with something to learn in them: each row counts up from a random start in steps of its own."""
    generator = torch.Generator().manual_seed(seed)
    start, step = (torch.randint(1, high, (rows, 1), generator=generator) for high in (VOCAB, 4))
    return ((start + step * torch.arange(length)) % VOCAB).to(device)


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    assert found.keys() == dict(module.named_parameters()).keys()
    assert all(g.isfinite().all() and g.any() for g in found.values())
    module.zero_grad()
    return found


def differing(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    return [n for n in want if not torch.equal(got[n], want[n])]


# ---------------------------------------------------------------- gradient checkpointing


@on_installed_backends
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("length", [200, 130])  # 130: inference decodes the last two tokens
def test_a_checkpointed_layer_has_the_same_gradients(length: int, use_reentrant: bool, served: str) -> None:
    layer, x = build_layer(served), torch.randn(2, length, 2 * WIDTH).to(BEST_DEVICE, BF16)
    results = []
    for again in (False, True):
        leaf = x.clone().requires_grad_()
        y = checkpoint(layer, leaf, use_reentrant=use_reentrant) if again else layer(leaf)
        y.float().square().mean().backward()
        results.append(gradients(layer) | {"x": leaf.grad, "y": y.detach()})
    assert differing(results[1], results[0]) == []


@on_installed_backends
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_a_checkpointed_model_has_the_same_gradients(use_reentrant: bool, served: str) -> None:
    model, tokens = build_model(served), batch(0)
    calls: list[int] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    results = []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=use_reentrant))
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        results.append(gradients(model) | {"loss": loss.detach()})
    assert len(calls) == 2 + 4
    assert differing(results[1], results[0]) == []


# ---------------------------------------------------------------- autocast


@on_installed_backends
def test_autocast_trains_parameters_in_fp32(served: str) -> None:
    """The loss falls below what the frequencies of tokens give, and gradients have the parameters' dtype."""
    model = build_model(served, FP32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if BEST_DEVICE == "cpu" else 3e-3)
    losses = []
    for _ in range(12):
        tokens = batch(0)
        with torch.autocast(BEST_DEVICE, BF16):
            out = model(tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        losses.append(out.loss.item())
        assert isinstance(out, LazyLogitsOutput)
        assert {p.grad.dtype for p in model.parameters()} == {p.dtype for p in model.parameters()} == {FP32}
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0], losses
    assert all(p.isfinite().all() for p in model.parameters())
    with torch.autocast(BEST_DEVICE, BF16):
        assert model(batch(0), use_cache=False).logits.dtype == BF16


# ---------------------------------------------------------------- a whole step in a CUDA graph


def step_of(model: Any, tokens: Tensor) -> tuple[Callable[[], Tensor], torch.optim.Optimizer]:
    """A training step on what `tokens` holds, which returns its loss, and the optimizer; a graph can capture it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", BF16):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, optimizer


@needs_cuda
@on_installed_backends
def test_a_graph_of_a_training_step_replays_on_new_inputs(served: str) -> None:
    """Forward, backward and optimizer captured once: losses and parameters are those of the calls, bit for bit."""
    if served == "eager":
        pytest.skip("plain PyTorch copies the order of its chunks from the host, which a graph cannot capture")
    plain, tokens = build_model(served, FP32), batch(0)
    graphed = copy.deepcopy(plain)
    first = copy.deepcopy(plain.state_dict())

    step, optimizer = step_of(graphed, tokens)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, and makes the optimizer's state
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    with torch.no_grad():  # back to the start, in place
        for name, value in graphed.state_dict().items():
            value.copy_(first[name])
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()

    want_step, _ = step_of(plain, tokens)
    for seed in range(4):
        tokens.copy_(batch(seed + 1))
        want = want_step()
        graph.replay()
        assert torch.equal(loss, want), f"step {seed}"
        assert differing(graphed.state_dict(), plain.state_dict()) == [], f"step {seed}"
    assert differing(plain.state_dict(), first), "nothing was trained"
