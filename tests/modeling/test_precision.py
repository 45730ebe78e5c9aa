"""Narrow dtypes: padding that has no effect whatever the gate, and gates that stay in fp32 when a module is cast."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import DynamicCache

from kda_layers import KDAConfig, KDAForCausalLM, KimiDeltaAttention, swap_attention
from kda_layers.modeling.models.configuration_variants import KDALlamaConfig
from kda_layers.modeling.models.variant import KDALlamaForCausalLM
from tests.kernels.cases import budget, error
from tests.modeling.stock_models import build, every_family_in_place

D = 20
GATES = {"lower_bound": {}, "softplus": dict(gate_activation="softplus", lower_bound=None)}
every_gate = pytest.mark.parametrize("gate", GATES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


def layer_with_rate(A_log: float, gate: str, dtype: torch.dtype) -> KimiDeltaAttention:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(D, 2, 8, **GATES[gate], layer_idx=0)
    layer.A_log.data.fill_(A_log)
    for name, p in layer.named_parameters():
        if name not in layer.kept_in_fp32:
            p.data = p.data.to(dtype)
    return layer


# ---------------------------------------------------------------- padding


@every_gate
@every_dtype
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("A_log", [-80.0, -12.0, -9.0, -3.0, 0.0, 4.0])
def test_padding_leaves_the_states_as_they_are(A_log: float, T: int, dtype: torch.dtype, gate: str) -> None:
    """Bit for bit, for a row that is all padding; the other row's states change."""
    layer, cache = layer_with_rate(A_log, gate, dtype), DynamicCache(config=KDAConfig(num_hidden_layers=1))
    mask = torch.tensor([[0], [1]]).expand(2, T)
    with torch.no_grad():
        layer(torch.randn(2, 9, D).to(dtype), past_key_values=cache)
        before = [s[0].clone() for s in (cache.layers[0].conv_states, cache.layers[0].recurrent_states)]
        layer(torch.randn(2, T, D).to(dtype), mask, cache)
    after = cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]
    assert before[1][0].abs().max() > 0
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[0], old[0])
        assert not torch.equal(new[1], old[1])


@every_gate
@every_dtype
@pytest.mark.parametrize("A_log", [-12.0, 0.0, 4.0])
def test_gradients_of_padding_are_zero(A_log: float, dtype: torch.dtype, gate: str) -> None:
    """Gradients of padded tokens are exactly 0; the parameters' are those of the row without them."""
    layer = layer_with_rate(A_log, gate, dtype)
    exact = copy.deepcopy(layer).double()
    mask = torch.tensor([[1] * 4 + [0] * 5 + [1] * 3])
    real = mask[0] == 1
    errors: dict[str, list[float]] = {"padded": [], "alone": []}
    for _ in range(8):  # one draw's rounding is much luck
        x = torch.randn(1, 12, D).to(dtype)
        padded = gradients(layer, x, mask)
        assert torch.equal(padded[0][:, ~real], torch.zeros(1, 5, D, dtype=dtype))
        padded[0] = padded[0][:, real]
        truth = gradients(exact, x[:, real].double(), None)
        for name, grads in (("padded", padded), ("alone", gradients(layer, x[:, real], None))):
            errors[name] += [error(g, t) for g, t in zip(grads, truth, strict=True)]
    assert max(errors["padded"]) <= budget(max(errors["alone"]), dtype)


def gradients(layer: nn.Module, x: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return gradients of x [1, T, D] and of every parameter, for the sum of the squares of real tokens' outputs."""
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    o = layer(leaf, mask)
    (o if mask is None else o[:, mask[0] == 1]).to(leaf).square().sum().backward()
    return [leaf.grad, *(p.grad.clone() for p in layer.parameters())]


# ---------------------------------------------------------------- casting


def kda_model() -> nn.Module:
    sizes = dict(vocab_size=31, hidden_size=D, num_hidden_layers=2, full_attention_interval=2, num_attention_heads=2)
    return KDAForCausalLM(KDAConfig(**sizes, linear_num_heads=2, linear_head_dim=8, attention_bias="key"))


def variant_model() -> nn.Module:
    sizes = dict(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    return KDALlamaForCausalLM(KDALlamaConfig(**sizes, layer_types=["linear_attention", "full_attention"]))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: KimiDeltaAttention(D, 2, 8),
    "model": kda_model,
    "variant": variant_model,
}
CASTS: dict[str, Callable[[Any], Any]] = {
    "to": lambda m: m.to(torch.bfloat16),
    "to_device": lambda m: m.to(device="cpu", dtype=torch.bfloat16),  # Trainer's, with bf16_full_eval
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "type": lambda m: m.type(torch.float16),
}


def randomised(module: nn.Module) -> nn.Module:
    """With values that bf16 cannot hold, and gradients."""
    for p in module.parameters():
        p.data.copy_(torch.rand_like(p) + 0.1)
        p.grad = torch.rand_like(p) + 0.1
    return module


def is_kept(name: str) -> bool:
    return name.rpartition(".")[2] in ("A_log", "dt_bias", "A")


@pytest.mark.parametrize("made", MODULES)
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("swap", [False, True], ids=["set_data", "swap_tensors"])
def test_casts_keep_the_gates_in_fp32(made: str, cast: str, swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, gradients and Parameter objects; everything else is cast."""
    module = randomised(MODULES[made]())
    before = {n: (id(p), p.detach().clone(), p.grad.clone()) for n, p in module.named_parameters()}
    assert any(is_kept(n) for n in before)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        assert CASTS[cast](module) is module
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for name, p in module.named_parameters():
        identity, value, grad = before[name]
        assert id(p) == identity
        if is_kept(name):
            assert p.dtype == p.grad.dtype == torch.float32, name
            assert torch.equal(p, value)
            assert torch.equal(p.grad, grad)
        else:
            assert p.dtype == p.grad.dtype != torch.float32, name


@every_family_in_place
def test_casts_keep_the_gates_of_swapped_layers(family: str) -> None:
    model = build(family)
    swap_attention(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.to(torch.bfloat16)
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    gates = [n for n in before if n.endswith(("A_log", "dt_bias", "self_attn.A"))]
    assert gates
    assert {dtypes.pop(n) for n in gates} == {torch.float32}
    assert set(dtypes.values()) == {torch.bfloat16}
    assert all(torch.equal(model.get_parameter(n), before[n]) for n in gates)


def test_other_conversions_are_as_ever() -> None:
    """fp64 and back, devices, empty memory, a gate that is narrow already, a shared one, and the optimizers' mark."""
    layer = KimiDeltaAttention(D, 2, 8)
    assert {p.dtype for p in layer.double().parameters()} == {torch.float64}
    layer.A_log.data.fill_(math.pi)
    layer.bfloat16()
    assert layer.A_log.dtype == torch.float32  # from fp64
    assert_close(layer.A_log.data, torch.full((2,), math.pi), rtol=0, atol=0)
    layer.to("meta", torch.float16)
    assert layer.A_log.is_meta
    assert (layer.A_log.dtype, layer.o_norm.weight.dtype) == (torch.float32, torch.float16)
    layer.to_empty(device="cpu")
    assert layer.A_log.dtype == torch.float32
    assert layer.A_log._no_weight_decay
    layer.A_log.data = layer.A_log.data.bfloat16()
    layer.half()
    assert (layer.A_log.dtype, layer.dt_bias.dtype) == (torch.float16, torch.float32)
    layer.float()
    other = KimiDeltaAttention(D, 2, 8)
    other.A_log = layer.A_log
    both = nn.ModuleList((layer, other)).bfloat16()
    assert both[0].A_log is both[1].A_log
    assert both[0].A_log.dtype == torch.float32


def test_a_cast_layer_computes_as_one_loaded_in_bf16() -> None:
    layer = KimiDeltaAttention(D, 2, 8)
    loaded = copy.deepcopy(layer)
    for name, p in loaded.named_parameters():
        if not is_kept(name):
            p.data = p.data.bfloat16()
    x = torch.randn(1, 70, D).bfloat16()
    assert torch.equal(layer.bfloat16()(x), loaded(x))
