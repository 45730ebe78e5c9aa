"""A decode step of a decoder layer by five launches, on a CPU: the emulated kernel and plain linear layers."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from transformers import StaticCache

from kda_layers import KDAConfig, KDAForCausalLM, swap_attention, use_backend
from kda_layers.kernels.fused.linear_step import LINEAR_STEP
from kda_layers.modeling.layer import fast_paths, weights
from kda_layers.modeling.layer.remembered import Snapshot
from kda_layers.modeling.models import modeling_kda
from kda_layers.modeling.models.hybrid import KDAAttention
from kda_layers.modeling.models.modeling_kda import KDAMLP
from tests.kernels import emulated_layer_step as emulated
from tests.kernels.cases import BF16, budget, error
from tests.modeling import stock_models
from tests.modeling.stock_models import cast

pytestmark = pytest.mark.emulated

EAGER_LINEAR = LINEAR_STEP.backends()["eager"]


@pytest.fixture
def kernel() -> Iterator[emulated.EmulatedLayerStep]:
    with emulated.first_choice() as backend:
        yield backend


@pytest.fixture
def launched(kernel: emulated.EmulatedLayerStep, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Decoder layers decode by five launches on this CPU; the inputs of their `linear_step`s."""
    launched: list[Any] = []
    run = EAGER_LINEAR.run
    monkeypatch.setattr(modeling_kda, "DEVICES", ("cpu",))
    monkeypatch.setattr(EAGER_LINEAR, "run", lambda x: launched.append(x) or run(x))
    return launched


def model_logits(model: KDAForCausalLM, ids: Tensor) -> Tensor:
    """Logits of a prompt of all but three tokens, and of these one by one."""
    with torch.no_grad():
        past = model(ids[:, :-3], use_cache=True).past_key_values
        return torch.cat([model(ids[:, t : t + 1], past_key_values=past).logits for t in range(-3, -1)], 1)


def a_model(**fields: Any) -> KDAForCausalLM:
    torch.manual_seed(0)
    config = KDAConfig(
        vocab_size=80, hidden_size=32, num_hidden_layers=2, linear_num_heads=1, linear_head_dim=64, head_dim=16,
        num_attention_heads=2, **fields,
    )  # fmt: skip
    return cast(KDAForCausalLM(config).eval(), BF16)


IDS = torch.randint(3, 80, (2, 7), generator=torch.Generator().manual_seed(0))


def test_a_decoder_layer_decodes_by_five_launches(kernel: emulated.EmulatedLayerStep, launched: list[Any]) -> None:
    model = a_model()
    fused = model_logits(model, IDS)
    assert len(kernel.calls) == 2 * 2
    assert len(launched) == 2 * 2 * 4
    form = [(x.norm_weight is None, x.residual is None, x.swiglu, x.overlap) for x in launched[:4]]
    assert form == [
        (False, True, False, False), (True, False, False, True), (False, True, True, True), (True, False, False, True),
    ]  # fmt: skip
    with use_backend("eager"):
        plain, truth = model_logits(model, IDS), model_logits(copy.deepcopy(model).double(), IDS)
    assert len(launched) == 2 * 2 * 4
    assert error(fused, truth) <= budget(error(plain, truth), BF16)


def hook(module: Any, *_: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("hooked", "launches"),
    [
        ("input_layernorm", 1), ("post_attention_layernorm", 1), ("self_attn", 1), ("self_attn.o_proj", 1),
        ("self_attn.o_norm", 1), ("self_attn.conv1d", 1), ("self_attn.q_proj", 3), ("mlp", 2), ("mlp.up_proj", 2),
        ("mlp.down_proj", 2),
    ],
)  # fmt: skip
def test_a_hook_sees_its_layer(
    hooked: str, launches: int, kernel: emulated.EmulatedLayerStep, launched: list[Any]
) -> None:
    """In the decoder layer with the hook, what would pass it by is called as it is."""
    model = a_model()
    want = model_logits(model, IDS)
    launched.clear()
    seen: list[int] = []
    module = model.model.layers[0].get_submodule(hooked)
    handle = module.register_forward_hook(lambda *_: seen.append(1))
    got = model_logits(model, IDS)
    if hooked not in ("self_attn.conv1d", "self_attn.o_norm"):  # kernels read their weights
        assert len(seen) == 3
    assert len(launched) == 2 * (4 + launches)
    handle.remove()
    assert error(got, want) <= 2**-6
    if hooked.startswith("self_attn.") and "proj" in hooked:
        module.bias = torch.nn.Parameter(torch.ones(module.out_features, dtype=BF16))
        launched.clear()
        assert error(model_logits(model, IDS), want) > 2**-4


def test_decoder_layers_that_are_called_as_they_are(kernel: emulated.EmulatedLayerStep, launched: list[Any]) -> None:
    """Softmax layers, gradients, autocast, a norm in fp32, a decode step without a cache."""
    model = a_model(full_attention_interval=2)
    model_logits(model, IDS)
    assert len(launched) == 2 * 4
    launched.clear()
    with torch.no_grad():
        model(IDS[:, :1], use_cache=False)
        past = model(IDS, use_cache=True).past_key_values
        with torch.autocast("cpu", dtype=BF16):
            model(IDS[:, :1], past_key_values=past)
    model(IDS[:, :1], past_key_values=past)
    assert not launched
    for layer in model.model.layers:
        layer.input_layernorm.float()
    with torch.no_grad():
        model.model.layers[0](torch.zeros(2, 1, 32, dtype=BF16), past_key_values=past)
    assert [x.norm_weight for x in launched] == [None]  # the attention's projections alone


@pytest.mark.compiles
def test_a_compiled_model_decodes(kernel: emulated.EmulatedLayerStep, launched: list[Any]) -> None:
    """In one graph, by the same launches."""
    model = a_model()
    want = model_logits(model, IDS)
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    launched.clear()
    with torch.no_grad():
        past = type(model).forward(model, IDS[:, :-3], use_cache=True).past_key_values
        got = [model(IDS[:, t : t + 1], past_key_values=past).logits for t in range(-3, -1)]
    assert torch.equal(torch.cat(got, 1), want)
    assert [(x.swiglu, x.overlap) for x in launched[:4]] == [(False, False), (False, True), (True, True), (False, True)]


@pytest.mark.compiles
def test_compiled_steps_are_compiled_once(kernel: emulated.EmulatedLayerStep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever uncompiled steps have remembered in between."""
    monkeypatch.setattr(modeling_kda, "DEVICES", ("cpu",))
    model = a_model()
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True, dynamic=False)
    past = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(IDS[:, :-3], past_key_values=past)
        compiled(IDS[:, -3:-2], past_key_values=past)
        for layer in model.model.layers:
            layer.step.forget()
        want = model_logits(model, IDS)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(compiled(IDS[:, -2:-1], past_key_values=past).logits, want[:, 1:])


class OwnAttention(KDAAttention):
    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        OwnAttention.calls += 1
        return super().forward(*args, **kwargs)


class OwnMLP(KDAMLP):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        OwnMLP.calls += 1
        return super().forward(x)


def test_modules_of_other_classes_are_called(kernel: emulated.EmulatedLayerStep, launched: list[Any]) -> None:
    """Subclasses with a forward of their own, and something else in place of the MLP."""
    model = a_model()
    want = model_logits(model, IDS)
    first, second = model.model.layers
    first.self_attn.__class__, second.mlp.__class__ = OwnAttention, OwnMLP
    assert error(model_logits(model, IDS), want) <= 2**-6
    assert (OwnAttention.calls, OwnMLP.calls) == (3, 3)
    second.mlp = torch.nn.Identity()
    assert model_logits(model, IDS).isfinite().all()


@pytest.mark.parametrize("before", ["gradients", "replaced"])
def test_weights_are_laid_before_the_first_launch(
    before: str, kernel: emulated.EmulatedLayerStep, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that overlaps with the one before must not follow a copy of its weights."""
    model, order = a_model(), list[str]()
    lay, apply = weights.MergedWeights._lay, EAGER_LINEAR.run
    with torch.no_grad():
        past = model(IDS[:, :-2], use_cache=True).past_key_values
        if before == "replaced":
            model(IDS[:, -2:-1], past_key_values=past)
    for layer in model.model.layers:
        if before == "replaced":
            layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight.detach().clone())
        else:
            layer.mlp.merged_weights.forget()
    monkeypatch.setattr(weights.MergedWeights, "_lay", lambda *args: order.append("lay") or lay(*args))
    monkeypatch.setattr(EAGER_LINEAR, "run", lambda x: order.append("launch") or apply(x))
    with torch.no_grad():
        model(IDS[:, -1:], past_key_values=past)
    assert order == ["lay", *["launch"] * 4] * 2


def replace_weight(layer: Any) -> None:
    layer.mlp.down_proj.weight = torch.nn.Parameter(2 * layer.mlp.down_proj.weight.detach())


def move_weight(layer: Any) -> None:
    layer.self_attn.o_proj.weight.data = 2 * layer.self_attn.o_proj.weight.detach()


def change_option(layer: Any) -> None:
    layer.self_attn.kda_options["lower_bound"] = -1.0


def exchange_module(layer: Any) -> None:
    layer.self_attn.o_norm = torch.nn.RMSNorm(64, eps=0.5).to(BF16)


CHANGES: dict[str, Any] = {
    "a weight is replaced": replace_weight, "a weight moves": move_weight, "an option": change_option,
    "a module is exchanged": exchange_module,
    "an epsilon": lambda layer: setattr(layer.input_layernorm, "eps", 2.0),
    "the epsilon of the layer's norm": lambda layer: setattr(layer.self_attn.o_norm, "eps", 2.0),
    "a move of all": lambda layer: layer.double().to(BF16),
    "in place": lambda layer: layer.mlp.gate_proj.weight.data.mul_(2),
    "a hook": lambda layer: layer.mlp.register_forward_hook(lambda module, args, y: 2 * y),
    "another forward": lambda layer: setattr(layer.mlp, "forward", lambda x: 2 * x),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["ours", "swapped"])
def test_a_snapshot_compares_epsilons(kind: str) -> None:
    """Norms of stock models call theirs variance_epsilon."""
    model = a_model() if kind == "ours" else stock_models.build("kimi_linear")
    if kind == "swapped":
        swap_attention(model)
    layer = model.model.layers[0].self_attn
    snapshot = Snapshot(layer)
    assert snapshot.is_current(layer)
    setattr(layer.o_norm, "eps" if kind == "ours" else "variance_epsilon", 2.0)
    assert not snapshot.is_current(layer)


@pytest.mark.parametrize("name", CHANGES)
def test_later_steps_ask_only_after_a_change(
    name: str, kernel: emulated.EmulatedLayerStep, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of two layers asks for their fast paths; the next one does not, until something was changed."""
    model, asked = a_model(), list[str]()
    serves = fast_paths.FastPath.serves
    noted = ("decode step of a decoder layer by few launches", "decode step by one kernel")

    def note(path: Any, *args: Any, **more: Any) -> bool:
        asked.extend([path.name] if path.name in noted else [])
        return serves(path, *args, **more)

    monkeypatch.setattr(fast_paths.FastPath, "serves", note)
    with torch.no_grad():
        past = model(IDS[:, :-3], use_cache=True).past_key_values
        asked.clear()
        model(IDS[:, -3:-2], past_key_values=past)
        assert len(asked) == 4
        asked.clear()
        model(IDS[:, -2:-1], past_key_values=past)
        assert asked == []
        CHANGES[name](model.model.layers[0])
        states = copy.deepcopy(past)
        got = model(IDS[:, -1:], past_key_values=past).logits
        assert bool(asked) == (name != "in place")
        fresh = copy.deepcopy(model)  # which remembers nothing
        assert torch.equal(fresh(IDS[:, -1:], past_key_values=states).logits, got)


def test_steps_on_other_states(kernel: emulated.EmulatedLayerStep, launched: list[Any]) -> None:
    """Another batch, another cache, a record of the past: each gets its own plan."""
    model = a_model()
    want = [model_logits(model, IDS[i : i + 1]) for i in range(2)]
    for _ in range(2):
        torch.testing.assert_close(model_logits(model, IDS), torch.cat(want))
        for i in range(2):
            assert torch.equal(model_logits(model, IDS[i : i + 1]), want[i])
    with torch.no_grad():
        past = model(IDS, use_cache=True).past_key_values
        for layer in past.layers:
            layer.record_past = True
        calls = len(kernel.calls)
        model(IDS[:, :1], past_key_values=past)
    assert len(kernel.calls) == calls


def test_a_model_that_has_decoded_is_copied_and_saved(
    kernel: emulated.EmulatedLayerStep, launched: list[Any], tmp_path: Path
) -> None:
    model = a_model()
    want = model_logits(model, IDS)
    torch.save(model, tmp_path / "model.pt")
    for other in (torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)):
        assert torch.equal(model_logits(other, IDS), want)


class Coded(torch.nn.Module):
    """A linear layer as libraries of quantisation have them, without a `weight`."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.inner = [layer]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0](x)


@pytest.mark.parametrize("name", ["o_proj", "q_proj"])
def test_layers_without_a_weight_are_called(name: str, kernel: emulated.EmulatedLayerStep, launched: list[Any]) -> None:
    model = a_model()
    want = model_logits(model, IDS)
    attention = model.model.layers[0].self_attn
    setattr(attention, name, Coded(getattr(attention, name)))
    assert error(model_logits(model, IDS), want) <= 2**-6


def test_a_switch_of_adapters(kernel: emulated.EmulatedLayerStep, launched: list[Any]) -> None:
    """A trained copy of a convolution takes the place of the first one without a change of modules or parameters."""
    model = a_model(full_attention_interval=2)
    config = peft.LoraConfig(
        target_modules=r"model\.layers\.1\.self_attn\.q_proj", modules_to_save=["conv1d"], init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.conv1d.modules_to_save["default"].weight.mul_(-1)
    with_adapter = model_logits(model, IDS)
    with adapted.disable_adapter():
        without = model_logits(model, IDS)
        assert torch.equal(model_logits(copy.deepcopy(model), IDS), without)
    assert torch.equal(model_logits(model, IDS), with_adapter)
    assert error(with_adapter, without) > 2**-6


def test_what_was_replaced_is_released(kernel: emulated.EmulatedLayerStep, launched: list[Any]) -> None:
    model = a_model()
    model_logits(model, IDS)
    first = model.model.layers[0]
    old = weakref.ref(first.mlp.down_proj.weight)
    first.mlp = torch.nn.Identity()
    model_logits(model, IDS)
    launched.clear()
    gc.collect()
    assert old() is None


def test_dicts_that_are_replaced(kernel: emulated.EmulatedLayerStep, launched: list[Any]) -> None:
    model = a_model()
    model_logits(model, IDS)
    down = model.model.layers[0].mlp.down_proj
    down._parameters = {"weight": torch.nn.Parameter(2 * down.weight.detach()), "bias": None}
    assert torch.equal(model_logits(model, IDS), model_logits(copy.deepcopy(model), IDS))
    square = model.model.layers[1].mlp.down_proj
    square.weight.data = square.weight.data.T.contiguous().T  # at another address, and not contiguous
    assert torch.equal(model_logits(model, IDS), model_logits(copy.deepcopy(model), IDS))


def test_forward_mode_differentiation_is_refused(kernel: emulated.EmulatedLayerStep, launched: list[Any]) -> None:
    model = a_model()
    with torch.no_grad():
        past = model(IDS, use_cache=True).past_key_values
        x = torch.ones(2, 1, 32, dtype=BF16)
        for _ in range(2):
            model.model.layers[0](x, past_key_values=past)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode differentiation"):
            model.model.layers[0](forward_ad.make_dual(x, x), past_key_values=past)


def test_a_model_that_has_decoded_is_freed_at_once(kernel: emulated.EmulatedLayerStep, launched: list[Any]) -> None:
    """Its weights do not wait for Python's garbage collection."""
    model = a_model()
    model_logits(model, IDS)
    with torch.no_grad():  # the attention alone remembers a plan, too
        past = model(IDS, use_cache=True).past_key_values
        for _ in range(2):
            model.model.layers[0].self_attn(torch.ones(2, 1, 32, dtype=BF16), cache=past)
    launched.clear()
    kernel.calls.clear()
    weights = [weakref.ref(p) for p in model.model.layers.parameters()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [w() for w in weights] == [None] * len(weights)
    finally:
        gc.enable()
