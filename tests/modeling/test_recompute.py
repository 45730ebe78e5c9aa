"""`recompute` from the user to the operator, and what "auto" decides for models of several KDA layers."""

from __future__ import annotations

import copy
import inspect
import io
import json
import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

import kda_layers
from kda_layers import (
    KDAConfig,
    KDAForCausalLM,
    KimiDeltaAttention,
    convert_attention,
    restore_attention,
    swap_attention,
)
from kda_layers.kernels.cuda.arch import ARCHS
from kda_layers.kernels.cuda.machine import Properties
from kda_layers.kernels.kda.backends.cuda import CudaBackend
from kda_layers.kernels.kda.contract import KDA, Inputs
from kda_layers.kernels.kda.cuda.spec import Saved
from tests.kernels.cases import BF16, FP32
from tests.kernels.emulated_backends import EMULATED, registered
from tests.modeling.models import STOCK, TINY, ids, stock
from tests.modeling.stock_models import build, every_family, swapped_layers_of

# recompute and memory_share, and what the operator gets for one layer.
GIVEN = {("always", None): 0.0, ("never", None): 1.0, ("auto", 0.25): 0.25, ("auto", None): 0.01}
OLD: dict[Any, tuple[str, float | None]] = {True: ("always", None), False: ("never", None), 0.25: ("auto", 0.25)}
every_setting = pytest.mark.parametrize("setting", GIVEN, ids=str)
every_old_value = pytest.mark.parametrize("old", OLD, ids=repr)
OLD_VALUE = r"^recompute=.* is deprecated: use (recompute='(always|never)'|memory_share=0.25)\."
old_value = partial(pytest.warns, DeprecationWarning, match=OLD_VALUE)


def fields(setting: tuple[str, float | None]) -> dict[str, Any]:
    return dict(linear_recompute=setting[0], linear_memory_share=setting[1])


def arguments(setting: tuple[str, float | None]) -> dict[str, Any]:
    return dict(recompute=setting[0], memory_share=setting[1])


every_softmax_family = pytest.mark.parametrize("family", [name for name in STOCK if name != "windows"])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Inputs]:
    """The inputs of the operator's calls that a backward follows."""
    eager, seen = KDA.backends()["eager"], []
    forward = eager.forward

    def recording(x: Inputs, save: bool) -> Any:
        if save:
            seen.append(x)
        return forward(x, save)

    monkeypatch.setattr(eager, "forward", recording)
    return seen


def shares(model: torch.nn.Module, calls: list[Inputs], tokens: int = 6) -> list[float]:
    """Return what the operator gets in a forward of a training step, a call for each KDA layer."""
    calls.clear()
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[0, 0] = 0
    model(ids(2, tokens), attention_mask=mask, use_cache=False)
    return [x.recompute_above for x in calls]


def kda_lm(**fields: Any) -> Any:
    return KDAForCausalLM(KDAConfig(**TINY | fields)).train()


def pickled(module: torch.nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved_whole(module: torch.nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[torch.nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "torch.save": saved_whole,
}

# ---------------------------------------------------------------- the argument reaches the operator


@every_setting
def test_a_layer(setting: tuple[str, float | None], calls: list[Inputs]) -> None:
    layer = KimiDeltaAttention(16, 2, 8, **arguments(setting))
    for each in (layer, *(make(layer) for make in COPIES.values())):
        calls.clear()
        each(torch.randn(1, 5, 16))
        assert [x.recompute_above for x in calls] == [GIVEN[setting]]
    assert f"recompute={setting[0]}, memory_share={setting[1]}" in repr(layer)


@every_setting
def test_a_configuration(setting: tuple[str, float | None], calls: list[Inputs], tmp_path: Path) -> None:
    """Also of a copy, a saved and a loaded one; the hybrid has a softmax layer."""
    model = kda_lm(**fields(setting), full_attention_interval=2)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.config.linear_recompute, loaded.config.linear_memory_share) == setting
    for each in (model, loaded, *(make(model) for make in COPIES.values())):
        assert shares(each, calls) == [GIVEN[setting]]
    other = AutoModelForCausalLM.from_pretrained(tmp_path, linear_recompute="always", linear_memory_share=None)
    assert shares(other, calls) == [0.0]


@every_setting
@every_softmax_family
def test_a_converted_model(family: str, setting: tuple[str, float | None], calls: list[Inputs], tmp_path: Path) -> None:
    model = convert_attention(stock(family, FP32), [0], **fields(setting))
    model.save_pretrained(tmp_path)
    for each in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert (each.config.linear_recompute, each.config.linear_memory_share) == setting
        assert shares(each, calls) == [GIVEN[setting]]


@every_setting
@every_family
def test_a_model_changed_in_place(family: str, setting: tuple[str, float | None], calls: list[Inputs]) -> None:
    model = build(family, dense=True)
    paths = swap_attention(model, **arguments(setting))
    assert shares(model, calls) == [GIVEN[setting]] * len(paths)
    for make in COPIES.values():
        assert shares(make(model), calls) == [GIVEN[setting]] * len(paths)
    restore_attention(model)
    swap_attention(model, recompute="always")
    assert shares(model, calls) == [0.0] * len(paths)


@every_setting
def test_a_loaded_stock_model(setting: tuple[str, float | None], calls: list[Inputs], tmp_path: Path) -> None:
    build("kimi_linear", dense=True).save_pretrained(tmp_path)
    model = kda_layers.load_pretrained(tmp_path, **arguments(setting))
    assert shares(model, calls) == [GIVEN[setting]] * 2


def test_each_layer_of_a_model_changed_in_place_has_its_own(calls: list[Inputs]) -> None:
    model = build("kimi_linear", dense=True)
    swap_attention(model, [0], recompute="always")
    swap_attention(model, [2], memory_share=0.5)
    assert shares(model, calls) == [0.0, 0.5]


# ---------------------------------------------------------------- values of version 0.1


@every_old_value
def test_old_values_that_a_user_types_warn(old: Any, calls: list[Inputs]) -> None:
    want = GIVEN[OLD[old]]
    with old_value():
        layer = KimiDeltaAttention(16, 2, 8, recompute=old)
    layer(torch.randn(1, 5, 16))
    x = [torch.randn(1, 3, 2, 16).requires_grad_() for _ in range(4)]
    with old_value():
        kda_layers.kda(*x, torch.randn(1, 3, 2), recompute=old)
    assert [x.recompute_above for x in calls] == [want, want]
    with old_value():
        model = kda_lm(linear_recompute=old)
    assert (model.config.linear_recompute, model.config.linear_memory_share) == OLD[old]
    swapped = build("kimi_linear", dense=True)
    with old_value():
        swap_attention(swapped, recompute=old)
    for each in (model, swapped):
        assert set(shares(each, calls)) == {want}


@every_old_value
def test_old_values_of_a_saved_configuration_are_read_silently_and_not_written(
    old: Any, calls: list[Inputs], tmp_path: Path
) -> None:
    kda_lm().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    del saved["linear_memory_share"]
    path.write_text(json.dumps(saved | {"linear_recompute": old}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert set(shares(model, calls)) == {GIVEN[OLD[old]]}
    with old_value():
        by_keyword = AutoModelForCausalLM.from_pretrained(tmp_path, linear_recompute=old, linear_memory_share=None)
    for each in (model, by_keyword):
        each.save_pretrained(tmp_path / "again")
        written = json.loads((tmp_path / "again" / "config.json").read_text())
        assert (written["linear_recompute"], written["linear_memory_share"]) == OLD[old]


def test_refused_settings() -> None:
    message = "recompute must be 'auto', 'always' or 'never', got"
    for bad in ("yes", 1, None):
        with pytest.raises(ValueError, match=f"^{message} {bad!r}"):
            KimiDeltaAttention(16, 2, 8, recompute=bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"^{message} {bad!r}"):
            swap_attention(build("kimi_linear"), [0], recompute=bad)  # type: ignore[arg-type]
    with pytest.raises(StrictDataclassError, match=f"linear_{message} 'yes'"):
        KDAConfig(linear_recompute="yes")
    with pytest.raises(StrictDataclassError, match="linear_recompute"):
        KDAConfig(linear_recompute=1)  # type: ignore[arg-type]
    for bad in (2.0, 0.0):
        with pytest.raises(StrictDataclassError, match=f"linear_memory_share must be a float between 0 and 1.*{bad}"):
            KDAConfig(linear_memory_share=bad)
    with pytest.raises(ValueError, match=r"memory_share must be None with recompute='never', got 0\.5"):
        KimiDeltaAttention(16, 2, 8, recompute="never", memory_share=0.5)
    with pytest.raises(TypeError, match=r"no field recompute \(use linear_recompute\)"):
        KDAConfig(recompute="always")
    for given in (dict(recompute="always"), dict(memory_share=0.5)):
        with pytest.raises(ValueError, match=r"recompute must be 'auto' and memory_share None for a DogeForCausalLM"):
            swap_attention(build("doge"), **given)  # type: ignore[arg-type]


# ---------------------------------------------------------------- "auto" of several layers


class Memory:
    """A `machine.Machine` with so many bytes of memory, and no kernels."""

    def __init__(self, memory_bytes: int):
        self.memory_bytes = memory_bytes

    def properties(self, device: torch.device) -> Properties:
        return Properties(132, 90, self.memory_bytes)


def kept(calls: list[Inputs], memory_bytes: int) -> list[bool]:
    """For each call, True if a GPU with so much memory keeps what the backward reads."""
    backend = CudaBackend("sm90", (ARCHS[90],), Memory(memory_bytes))  # type: ignore[arg-type]
    return [bool(backend.saved_like(x)) for x in calls]


@pytest.mark.parametrize(("layers", "of_memory"), [(1, 0.01), (10, 0.01), (12, 0.1 / 12), (48, 0.1 / 48)])
def test_auto_keeps_a_tenth_of_the_memory_in_all_layers_together(
    layers: int, of_memory: float, calls: list[Inputs]
) -> None:
    """And, as a layer alone does, a hundredth in one of them."""
    model = kda_lm(num_hidden_layers=layers)
    assert shares(model, calls, 70) == pytest.approx([of_memory] * layers, rel=1e-12)
    (nbytes,) = {Saved.nbytes(x) for x in calls}
    enough = math.ceil(nbytes / of_memory * (1 + 1e-9))
    assert kept(calls, enough) == [True] * layers
    assert kept(calls, int(enough * 0.999)) == [False] * layers
    assert nbytes * layers <= 0.1 * enough


def test_softmax_layers_do_not_count(calls: list[Inputs]) -> None:
    model = kda_lm(num_hidden_layers=40, full_attention_interval=2)
    assert shares(model, calls) == [0.1 / 20] * 20


def test_layers_left_stock_count(calls: list[Inputs]) -> None:
    """They keep tensors for the backward as well."""
    types = ["linear_attention"] * 16
    model = build("kimi_linear", dense=True, num_hidden_layers=16, layer_types=types, mlp_layer_types=["dense"] * 16)
    assert len(swap_attention(model, [0, 1])) == 2
    assert shares(model, calls) == [0.1 / 16] * 2
    swap_attention(model, range(2, 16))
    assert shares(model, calls) == [0.1 / 16] * 16


@pytest.mark.parametrize("first", ["swap", "checkpointing"])
def test_checkpointed_layers_share_with_none(first: str, calls: list[Inputs]) -> None:
    """In a model changed in place; a layer outside of training is not checkpointed."""
    types = ["linear_attention"] * 16
    model = build("kimi_linear", dense=True, num_hidden_layers=16, layer_types=types, mlp_layer_types=["dense"] * 16)
    attributes = {path: set(vars(m)) for path, m in swapped_layers_of(model).items()}
    if first == "swap":
        swap_attention(model)
    model.train().gradient_checkpointing_enable()
    if first == "checkpointing":
        swap_attention(model)
    assert shares(model, calls) == [0.01] * 16
    assert shares(model.eval(), calls) == [0.1 / 16] * 16
    model.train().gradient_checkpointing_disable()
    assert shares(model, calls) == [0.1 / 16] * 16
    restore_attention(model)
    assert {path: set(vars(m)) for path, m in swapped_layers_of(model).items()} == attributes


def test_checkpointed_layers_of_our_models_share_with_none(calls: list[Inputs]) -> None:
    model = kda_lm(num_hidden_layers=20)
    model.gradient_checkpointing_enable()
    assert shares(model, calls) == [0.01] * 20
    assert shares(model.eval(), calls) == [0.1 / 20] * 20
    model.train().gradient_checkpointing_disable()
    assert shares(model, calls) == [0.1 / 20] * 20
    set_by_user = kda_lm(num_hidden_layers=20, linear_recompute="always")
    set_by_user.gradient_checkpointing_enable()
    assert shares(set_by_user, calls) == [0.0] * 20


def test_layers_left_out_of_checkpointing_share(calls: list[Inputs]) -> None:
    """transformers may checkpoint every second decoder layer."""
    if "every_n_layers" not in inspect.signature(PreTrainedModel._set_gradient_checkpointing).parameters:
        pytest.skip("this transformers checkpoints all layers or none")
    model = kda_lm(num_hidden_layers=20)
    model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False), every_n_layers=2)
    assert shares(model, calls) == [0.01, 0.1 / 20] * 10


# ---------------------------------------------------------------- results


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("share", [0.25, None])
def test_compiled_models_see_a_constant(share: float | None, counter: CompileCounterWithBackend) -> None:
    model = kda_lm(num_hidden_layers=1, linear_memory_share=share)
    model.model.layers[0].self_attn.layers_in_model = 48  # one of them is traced sooner
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (70, 33):
        compiled(ids(2, tokens), labels=ids(2, tokens), use_cache=False).loss.backward()
    assert counter.frame_count == 1


@pytest.mark.emulated
def test_gradients_have_the_same_bits() -> None:
    """Compare gradients of a layer on our kernels, which keep more or less for the backward."""
    backend = EMULATED["sm80@emulator"]
    torch.manual_seed(0)
    layer = KimiDeltaAttention(64, 1, 64, backend=backend.name).to(BF16)
    x, d_y = torch.randn(2, 1, 70, 64).to(BF16)
    results: list[dict[str, Tensor]] = []
    held: list[int] = []
    with registered(backend):
        for recompute in ("never", "always"):
            layer.recompute = recompute
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            sizes: list[int] = []

            def pack(t: Tensor, sizes: list[int] = sizes) -> Tensor:
                sizes.append(t.nbytes)
                return t

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                y = layer(leaf)
            y.backward(d_y)
            results.append({n: p.grad for n, p in layer.named_parameters()} | {"x": leaf.grad, "y": y.detach()})
            held.append(sum(sizes))
    saving, recomputing = results
    assert [n for n in saving if not torch.equal(saving[n], recomputing[n])] == []
    assert held[1] < held[0]
