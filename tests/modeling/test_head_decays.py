"""Our own layers and models with one decay a head: what differs from decays of channels.

The rest is tested with every layer and model: `head_decay` in `test_layer` and in `models`.
"""

from __future__ import annotations

import copy
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kda_layers import KDAConfig, KDAForCausalLM, KimiDeltaAttention, convert_attention, explain
from kda_layers.checkpoints import export_kda_weights, kda_layer_options, load_kda_weights
from kda_layers.kernels.kda.contract import KDA
from kda_layers.modeling.layer.cache import with_kda_layers
from kda_layers.training import parameter_groups
from tests.kernels.cases import BF16, FP32, FP64, budget, error
from tests.modeling import models
from tests.modeling.common import same
from tests.modeling.models import CACHES, TINY, generate, ids
from tests.modeling.test_layer import new_cache
from tests.modeling.test_state_dtypes import states_of, value

D, K = 20, 8
GATES: dict[str, dict[str, Any]] = {
    "lower_bound": dict(num_heads=2, num_value_heads=4, value_head_dim=12),
    "softplus": dict(num_heads=2, gate_activation="softplus", lower_bound=None, gate_rank=0, output_gate_bias=True),
    "fixed rate": dict(num_heads=1, num_value_heads=2, learned_rate=False, lower_bound=-2.0, allow_neg_eigval=True),
}
every_gate = pytest.mark.parametrize("gate", GATES)
REPEATED = ("f_proj.weight", "dt_bias")


def normal(*shape: int, seed: int, dtype: torch.dtype = FP64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


def pair(gate: str, dtype: torch.dtype = FP64) -> tuple[KimiDeltaAttention, KimiDeltaAttention]:
    """A layer with one decay a head, and one with that decay for every channel."""
    torch.manual_seed(0)
    by_head = KimiDeltaAttention(D, head_dim=K, layer_idx=0, decay="head", **GATES[gate])
    by_channel = KimiDeltaAttention(D, head_dim=K, layer_idx=0, decay_rank=0, **GATES[gate])
    with torch.no_grad():
        for p in by_head.parameters():
            p.mul_(2.0)
    repeated = {n: t.repeat_interleave(K, 0) if n in REPEATED else t for n, t in by_head.state_dict().items()}
    by_channel.load_state_dict(repeated)
    return by_head.to(dtype), by_channel.to(dtype)


def gradients(layer: KimiDeltaAttention, x: Tensor, **call: Any) -> dict[str, Tensor]:
    """Output and gradients, those of decays summed over the channels of a head."""
    x = x.clone().requires_grad_()
    o = layer(x, **call)
    inputs = {"x": x, **dict(layer.named_parameters())}
    found = torch.autograd.grad((o * normal(*o.shape, seed=2, dtype=o.dtype)).sum(), list(inputs.values()))
    result = {"o": o.detach(), **dict(zip(inputs, found, strict=True))}
    if layer.decay == "channel":
        result |= {n: result[n].unflatten(0, (-1, K)).sum(1) for n in REPEATED}
    return result


# ---------------------------------------------------------------- the layer


@every_gate
@pytest.mark.parametrize("call", ["plain", "packed", "padded"])
def test_equals_the_decay_of_every_channel(gate: str, call: str) -> None:
    """Output and every gradient."""
    by_head, by_channel = pair(gate)
    x = normal(1 if call == "packed" else 2, 70, D, seed=1)
    arguments: dict[str, Any] = {
        "plain": {},
        "packed": dict(cu_seqlens=torch.tensor([0, 3, 3, 68, 70])),
        "padded": dict(attention_mask=(torch.arange(70) >= torch.tensor([[0], [7]])).long()),
    }[call]
    got, want = (gradients(layer, x, **arguments) for layer in (by_head, by_channel))
    assert got.keys() == want.keys()
    same(got.values(), want.values())
    by_value_head = (by_head.num_value_heads, D), (by_head.num_value_heads,)
    assert (tuple(got["f_proj.weight"].shape), tuple(got["dt_bias"].shape)) == by_value_head


@every_gate
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_rounding(gate: str, dtype: torch.dtype) -> None:
    """Output and every gradient are as far from fp64 as with the decay of every channel, in the mean of four inputs."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(4):
        by_head, by_channel = pair(gate, dtype)
        x = normal(2, 70, D, seed=seed, dtype=dtype)
        got, reference = (gradients(layer, x) for layer in (by_head, by_channel))
        for n, t in gradients(by_head.double(), x.double()).items():
            errors.setdefault(n, []).append((error(got[n], t), error(reference[n], t)))
    for n, of_inputs in errors.items():
        mine, theirs = map(statistics.mean, zip(*of_inputs, strict=True))
        assert mine <= budget(theirs, dtype), n


@every_gate
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
@torch.no_grad()
def test_caches(gate: str, state_dtype: str) -> None:
    """A prompt and steps, states in every dtype: outputs and states are as exact as with the decay of every channel."""
    by_head, by_channel = pair(gate, FP32)
    x, results = normal(2, 74, D, seed=1, dtype=FP32), []
    for layer, name in (
        (by_head, state_dtype),
        (by_channel, state_dtype),
        (copy.deepcopy(by_head).double(), "float32"),
    ):
        layer.state_dtype = name
        cache = with_kda_layers(new_cache())
        parts = x.to(layer.dt_bias.dtype).split((70, 1, 1, 2), 1)
        o = torch.cat([layer(part, past_key_values=cache) for part in parts], 1)
        kept = states_of(cache)[0]
        assert kept[0].dtype == (FP64 if layer.dt_bias.dtype == FP64 else getattr(torch, state_dtype))
        results.append((o, value(kept)))
    for got, reference, truth in zip(*results, strict=True):
        assert error(got, truth) <= budget(error(reference, truth), FP32)


@every_gate
def test_a_fresh_layer(gate: str) -> None:
    """Shapes, and the initialisation of decays of channels, drawn for each head."""
    torch.manual_seed(0)
    options = GATES[gate] | dict(num_heads=64, num_value_heads=1024, value_head_dim=2)
    layer = KimiDeltaAttention(D, head_dim=2, decay="head", **options)
    assert (layer.decay, layer.decay_rank, "decay=head" in repr(layer)) == ("head", 0, True)
    assert not any(n.startswith("f_") for n, _ in layer.named_parameters() if n != "f_proj.weight")
    assert layer.f_proj.weight.shape == (1024, D)
    assert layer.dt_bias.shape == (1024,)
    dt = nn.functional.softplus(layer.dt_bias.double())
    assert 0.999e-3 < dt.min() < 1.1e-3 < 0.9e-1 < dt.max() < 1.001e-1
    assert abs(dt.log10().mean() + 2) < 3 * 2 / (12 * 1024) ** 0.5  # of a uniform variable in [-3, -1]


def test_which_backends() -> None:
    """The operator gets gates of heads."""
    layer, _ = pair("lower_bound", FP32)
    assert layer.problem(torch.device("cpu"), FP32).head_gates
    assert not pair("lower_bound")[1].problem(torch.device("cpu"), FP32).head_gates
    report = explain(layer)
    assert f"kda runs on {KDA.select(layer.problem(torch.device('cpu'), FP32)).name}" in report


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (dict(decay="heads"), "decay must be 'channel' or 'head', got 'heads'"),
        (dict(decay=None), "decay must be 'channel' or 'head', got None"),
        (
            dict(decay="head", decay_rank=4),
            "decay_rank must be None or 0 with decay='head', got 4: the projection has one row for each value head",
        ),
    ],
    ids=str,
)
def test_refused_options(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}"):
        KimiDeltaAttention(D, 2, K, **options)
    fields = {f"linear_{n}": option for n, option in options.items()}
    with pytest.raises(Exception, match="linear_decay") as caught:
        KDAConfig(**(TINY | fields))
    assert options["decay"] is None or problem.replace("decay", "linear_decay") in str(caught.value.__cause__)


def test_a_field_under_the_name_of_the_layer() -> None:
    with pytest.raises(TypeError, match=r"decay \(use linear_decay\)"):
        KDAConfig(**TINY, decay="head")
    assert KimiDeltaAttention(D, 2, K, decay="head", decay_rank=0, gate_rank=3).decay_rank == 0


# ---------------------------------------------------------------- weights


def test_options_of_weights() -> None:
    """All but the numbers that shapes do not tell apart: two heads of 8 have the shapes of four of 4."""
    layer, other = pair("softplus")
    options = kda_layer_options(export_kda_weights(layer, "kda_layers"))
    assert (options["decay"], options["decay_rank"]) == ("head", 0)
    assert not {"num_heads", "head_dim"} & options.keys()
    assert kda_layer_options(export_kda_weights(other, "kda_layers"))["decay"] == "channel"
    for heads in (2, 1):
        again = KimiDeltaAttention(num_heads=heads, head_dim=16 // heads, **options)
        load_kda_weights(export_kda_weights(layer, "kda_layers"), again)


def test_weights_of_the_other_kind() -> None:
    """Refused with the option that fits."""
    by_head, by_channel = pair("softplus")
    for layer, source in ((by_head, by_channel), (by_channel, by_head)):
        fits = rf"dt_bias \(expected.*fit.* with decay='{source.decay}' \(got '{layer.decay}'\)"
        with pytest.raises(ValueError, match=fits):
            load_kda_weights(export_kda_weights(source, "kda_layers"), layer)
    wider = KimiDeltaAttention(D, 3, K, num_value_heads=3, decay="head")
    with pytest.raises(ValueError, match=r"q_proj.weight \(expected \[24, 20\], got \[16, 20\]"):
        load_kda_weights(export_kda_weights(by_head, "kda_layers"), wider)


@pytest.mark.parametrize("family", ["kimi_linear", "glm5_next", "bailing_hybrid", "kimi_k3", "alice_ai", "fla"])
def test_families_without_it(family: str) -> None:
    with pytest.raises(ValueError, match=rf"layer must have what every layer of {family} has: .*decay='channel' \(got"):
        export_kda_weights(KimiDeltaAttention(D, 2, K, decay="head"), family)


def test_no_weight_decay() -> None:
    model = models.model("head_decay")
    decayed, others = (set(map(id, group["params"])) for group in parameter_groups(model))
    layer = model.model.layers[0].self_attn
    assert id(layer.f_proj.weight) in decayed
    assert {id(layer.dt_bias), id(layer.A_log)} <= others


# ---------------------------------------------------------------- models


def with_heads(family: str) -> Any:
    """A converted model, every second layer of it."""
    return convert_attention(models.stock(family), "1:1", linear_decay="head", linear_num_heads=2)


FAMILIES: dict[str, Any] = {
    "kda_lm": lambda: models.build("head_decay"),
    **{family: lambda family=family: with_heads(family) for family in ("llama", "qwen3", "qwen2", "mistral")},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
@torch.no_grad()
def test_save_and_load(family: str, tmp_path: Path) -> None:
    """The same logits, from a file of the same configuration."""
    model = FAMILIES[family]()
    layer = model.model.layers[0].self_attn
    assert layer.f_proj.weight.shape == (4, 32)
    assert layer.dt_bias.shape == (4,)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=FP64).double()
    assert again.config.linear_decay == "head"
    same((again(ids(2, 9)).logits,), (model(ids(2, 9)).logits,))
    assert "layers.*.self_attn.f_proj" in again.config.base_model_tp_plan


@every_family
def test_generate(family: str) -> None:
    """Every way to hold the past, and padding."""
    model, tokens = FAMILIES[family](), ids(2, 9)
    want = generate(model, tokens)
    for how, options in CACHES.items():
        assert torch.equal(generate(model, tokens, **options), want), how
    padded, mask = models.left_padded([tokens[0], tokens[1, 4:]])
    rows = generate(model, padded, attention_mask=mask)
    assert torch.equal(rows[0], want[0])
    assert torch.equal(rows[1, 4:], generate(model, tokens[1:, 4:])[0])


@torch.no_grad()
def test_conversion_starts_as_other_new_layers() -> None:
    """Projections are carried over; f_proj is drawn as linear layers are, decays as in a new layer."""
    stock = models.stock("llama", FP32)
    torch.manual_seed(0)
    layer = convert_attention(stock, [1], linear_decay="head").model.layers[1].self_attn
    assert torch.equal(layer.o_proj.weight, stock.model.layers[1].self_attn.o_proj.weight)
    assert torch.equal(layer.q_proj.weight, stock.model.layers[1].self_attn.q_proj.weight)
    assert 0.3 < layer.f_proj.weight.std() < 0.5  # initializer_range 0.4
    assert torch.equal(layer.A_log, torch.zeros(4))
    assert nn.functional.softplus(layer.dt_bias).log10().add(2).abs().max() <= 1.001
    with pytest.raises(ValueError, match="linear_decay_rank must be None or 0 with linear_decay='head', got 3"):
        convert_attention(stock, [1], linear_decay="head", linear_decay_rank=3)


def test_a_configuration_without_the_field(tmp_path: Path) -> None:
    """One of an earlier version: decays of channels."""
    KDAConfig(**TINY).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    assert fields.pop("linear_decay") == "channel"
    path.write_text(json.dumps(fields))
    assert KDAForCausalLM(KDAConfig.from_pretrained(tmp_path)).model.layers[0].self_attn.decay == "channel"
