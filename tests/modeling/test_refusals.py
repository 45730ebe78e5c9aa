"""Errors of layers, of their weights and of swapping that name the argument and the way out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from kda_layers import (
    KDAConfig,
    KDAForCausalLM,
    KimiDeltaAttention,
    convert_attention,
    kda,
    restore_attention,
    swap_attention,
)
from kda_layers.checkpoints import export_kda_weights, load_kda_weights
from kda_layers.kernels import biased_attention
from kda_layers.modeling.swap.convert import chosen_layers
from kda_layers.serving import enable_speculative_decoding
from tests.modeling.stock_models import FAMILIES, IN_PLACE, KDA_FAMILIES, build, every_family, swapped_layers_of

D = 16


def llama(layers: int = 4) -> Any:
    sizes = dict(vocab_size=31, hidden_size=D, intermediate_size=24, num_attention_heads=2, head_dim=8)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=layers, **sizes)).eval()


def tiny() -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=31, hidden_size=D, num_hidden_layers=2, linear_num_heads=2, linear_head_dim=8)
    return KDAForCausalLM(KDAConfig(**sizes, full_attention_interval=0))


# ---------------------------------------------------------------- the layer


@pytest.mark.parametrize("shape", [(5, D), (1, 2, 5, D), (2, 5, D + 1), (D,)], ids=str)
def test_hidden_states_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"hidden_states must have shape \[B, T, D = {D}\], got \[{shape[0]}"):
        KimiDeltaAttention(D, 2, 8)(torch.zeros(shape))


@every_family
def test_hidden_states_of_a_swapped_layer(family: str) -> None:
    model = build(family)
    swap_attention(model)
    layer = next(iter(swapped_layers_of(model).values()))
    with pytest.raises(ValueError, match=r"hidden_states must have shape \[B, T, D = 32\], got \[5, 32\]"):
        layer(torch.zeros(5, 32))


SIZES = (
    "hidden_size",
    "num_heads",
    "head_dim",
    "num_value_heads",
    "value_head_dim",
    "conv_kernel_dim",
    "gate_rank",
    "decay_rank",
    "layer_idx",
)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_integers(name: str) -> None:
    """NumPy's too, which become Python's; floats, bools and text are refused by name."""
    options: dict[str, Any] = dict(hidden_size=D, num_heads=2, head_dim=8)
    for wrong in (2.0, True, np.True_, "2"):
        with pytest.raises(TypeError, match=f"{name} must be an integer, got "):
            KimiDeltaAttention(**options | {name: wrong})
    layer = KimiDeltaAttention(**options | {name: np.int64(2)})
    assert type(layer.layer_idx if name == "layer_idx" else layer.num_heads * layer.hidden_size) is int
    x = torch.zeros(1, 3, layer.hidden_size)
    assert layer(x).shape == x.shape


@pytest.mark.parametrize("value", [-1e-6, float("nan"), float("inf"), "1e-6", True, None], ids=str)
def test_norm_eps(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="rms_norm_eps must be "):
        KimiDeltaAttention(D, 2, 8, rms_norm_eps=value)


# ---------------------------------------------------------------- adapters


def adapted(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(**dict(r=2) | options))


@pytest.mark.parametrize("made", [tiny, lambda: build("kimi_linear")], ids=["ours", "swapped"])
def test_lora_on_the_convolution_is_refused(made: Callable[[], Any]) -> None:
    """It would train nothing: its forward never runs."""
    model = made()
    if type(model).__name__.startswith("Kimi"):
        swap_attention(model)
    tokens = torch.arange(8)[None]
    want = model.eval()(tokens).logits
    model = adapted(model, target_modules=["conv1d"], r=96)  # PEFT wants a multiple of the channels
    with pytest.raises(ValueError, match=r"conv1d must have no adapter, got Conv1d.*modules_to_save=\['conv1d'\]"):
        model(tokens)
    assert torch.equal(model.unload()(tokens).logits, want)


def test_norm_tuning_of_the_output_norm_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny(), peft.LNTuningConfig(target_modules=["o_norm"]))
    with pytest.raises(ValueError, match="o_norm must have no adapter, got LNTuningLayer"):
        model(torch.arange(8)[None])


def test_modules_to_save_train_the_convolution_and_the_norm() -> None:
    """The way out that the errors name."""
    model = adapted(tiny(), target_modules=["q_proj"], modules_to_save=["conv1d", "o_norm"])
    tokens = torch.arange(8)[None]
    names = [n for n, p in model.named_parameters() if p.requires_grad and ("conv1d" in n or "o_norm" in n)]
    assert len(names) == 4
    optimizer = torch.optim.SGD([model.get_parameter(n) for n in names], lr=1.0)
    before = model(tokens, labels=tokens, skip_logits=False)
    before.loss.backward()
    assert all(model.get_parameter(n).grad.abs().max() > 0 for n in names)
    optimizer.step()
    after = model(tokens).logits
    assert not torch.equal(after, before.logits)
    torch.testing.assert_close(model.merge_and_unload()(tokens).logits, after)


# ---------------------------------------------------------------- quantised weights

CODES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8]
WAY_OUT = "quantised weights mean nothing without their scales: dequantise the model first"


def coded(module: Any, dtype: torch.dtype) -> Any:
    """The module with its matrices as bare codes."""
    for p in module.parameters():
        p.requires_grad_(False)
        if p.ndim == 2:
            p.data = p.data.to(dtype)
    return module


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_bare_codes_are_not_taken_for_numbers(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"model must have weights that are numbers, got {dtype} at .*: {WAY_OUT}"):
        convert_attention(coded(llama(), dtype), [0])
    for family in IN_PLACE:
        model = coded(build(family), dtype)
        before = {p: type(m) for p, m in model.named_modules()}
        with pytest.raises(ValueError, match=f"attn must have weights in .*, got {dtype} at .*proj.*: {WAY_OUT}"):
            swap_attention(model)
        assert {p: type(m) for p, m in model.named_modules()} == before
    layer = KimiDeltaAttention(D, 2, 8)
    weights = export_kda_weights(layer, "kda_layers")
    with pytest.raises(TypeError, match=f"must be a tensor of .*, got {dtype} on cpu: {WAY_OUT}"):
        load_kda_weights(weights | {"q_proj.weight": weights["q_proj.weight"].to(dtype)}, layer)
    with pytest.raises(TypeError, match=f"must be a tensor of .*, got {dtype} on cpu: {WAY_OUT}"):
        export_kda_weights(coded(layer, dtype), "kda_layers")


def test_inputs_of_other_dtypes_say_how_to_go_on() -> None:
    q, beta = torch.zeros(1, 3, 2, 8, dtype=torch.float8_e4m3fn), torch.zeros(1, 3, 2)
    with pytest.raises(TypeError, match=r"q must be one of .*, got torch.float8_e4m3fn: pass q.to\(torch.bfloat16\)"):
        kda(q, q, q, q, beta, lower_bound=-5.0)
    with pytest.raises(TypeError, match=r"q must be one of .*, got torch.float8_e4m3fn: pass q.to\(torch.bfloat16\)"):
        biased_attention(q, q, q, torch.zeros(1, 2, 1, 3))


def test_quantised_by_torchao() -> None:
    """A model is swapped in place and runs; one to be converted, and a layer's weights, have to be numbers."""
    quantization = pytest.importorskip("torchao.quantization")
    config = quantization.Int8WeightOnlyConfig()
    model = build("kimi_linear").bfloat16()
    quantization.quantize_(model, config)
    swap_attention(model)
    assert model(torch.arange(8)[None]).logits.isfinite().all()
    original = llama().bfloat16()
    quantization.quantize_(original, config)
    with pytest.raises(ValueError, match=f"model must have weights that are numbers.*: {WAY_OUT}"):
        convert_attention(original, [0])
    layer = KimiDeltaAttention(D, 2, 8)
    quantization.quantize_(layer, config)
    with pytest.raises(TypeError, match=WAY_OUT):
        export_kda_weights(layer, "kda_layers")


@pytest.mark.skipif("bailing_hybrid" not in FAMILIES, reason="transformers before 5.20 has no Ling")
def test_multi_token_prediction_is_refused() -> None:
    model, tokens = build("bailing_hybrid", num_mtp_layers=1), torch.arange(8)[None]
    swap_attention(model)
    enable_speculative_decoding(model)
    with pytest.raises(ValueError, match=r"use_mtp must be unset for a BailingHybridForCausalLM, got True: .*Draft by"):
        model.generate(tokens, max_new_tokens=2, use_mtp=True)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert copied.generate(tokens, max_new_tokens=2, prompt_lookup_num_tokens=2).shape == (1, 10)
    restore_attention(model)
    assert "_get_candidate_generator" not in vars(model)


# ---------------------------------------------------------------- wrapped models and layers

WRAPPERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "compiled": (torch.compile, r"got OptimizedModule: pass the module that it wraps, \._orig_mod"),
    "data parallel": (nn.DataParallel, r"got DataParallel: pass the module that it wraps, \.module"),
    "adapted": (
        lambda m: adapted(m, target_modules=["q_proj"]),
        r"got PeftModel: pass the module that it wraps, \.get_base_model\(\)",
    ),
}


@pytest.mark.parametrize("family", ["llama", "kimi_linear"])
@pytest.mark.parametrize("call", [swap_attention, convert_attention, restore_attention, enable_speculative_decoding])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models(wrapper: str, call: Callable[..., Any], family: str) -> None:
    wrap, message = WRAPPERS[wrapper]
    model = llama() if family == "llama" else build(family)
    if family != "llama" and call in (restore_attention, enable_speculative_decoding):
        swap_attention(model)
    wrapped = wrap(model)
    before = {p: type(m) for p, m in model.named_modules()}
    layers = ([0],) if call is convert_attention else ()
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, " + message):
        call(wrapped, *layers)
    assert {p: type(m) for p, m in model.named_modules()} == before


def test_the_way_into_a_wrapper() -> None:
    """A Kimi-Linear is swapped under its adapters and its compiled wrapper."""
    model = adapted(build("kimi_linear"), target_modules=["q_proj"])
    paths = swap_attention(torch.compile(model)._orig_mod.get_base_model())
    assert len(paths) == 2
    assert all(type(model.get_base_model().get_submodule(p)).__name__.startswith("Fast") for p in paths)


def test_wrapped_and_adapted_layers_have_no_weights_to_copy() -> None:
    layer = KimiDeltaAttention(D, 2, 8)
    weights = export_kda_weights(layer, "kda_layers")
    message = r"layer must be a KimiDeltaAttention, got OptimizedModule: pass the module that it wraps, \._orig_mod"
    with pytest.raises(TypeError, match=message):
        export_kda_weights(torch.compile(layer), "kda_layers")
    with pytest.raises(TypeError, match=message):
        load_kda_weights(weights, torch.compile(layer))
    layer = adapted(tiny(), target_modules=["q_proj"]).get_base_model().model.layers[0].self_attn
    message = r"parameters of a plain KimiDeltaAttention, got .*q_proj\.base_layer\.weight.*: merge adapters first"
    with pytest.raises(ValueError, match=message):
        export_kda_weights(layer, "kda_layers")
    with pytest.raises(ValueError, match=message):
        load_kda_weights(weights, layer)


# ---------------------------------------------------------------- which layers


@pytest.mark.parametrize("family", ["llama", *IN_PLACE])
@pytest.mark.parametrize("layers", [7, 0.5, True], ids=str)
def test_layers_that_are_no_list(family: str, layers: Any) -> None:
    call: Any = convert_attention if family == "llama" else swap_attention
    model = llama() if family == "llama" else build(family)
    with pytest.raises(TypeError, match=f"layers must be .*indices.*, got {layers}"):
        call(model, layers)


@pytest.mark.parametrize("layers", [np.array([0, -2]), [np.int64(0), np.int32(-2)], torch.tensor([0, -2])], ids=type)
def test_indices_of_numpy(layers: Any) -> None:
    assert convert_attention(llama(), layers).config.layer_types[:3] == [
        "linear_attention", "full_attention", "linear_attention",
    ]  # fmt: skip
    for family in KDA_FAMILIES:
        model = build(family, linear_only=True)
        assert len(swap_attention(model, layers)) == 2


@pytest.mark.parametrize("layers", ["10:1", "4:1", "4:9"])
def test_a_pattern_that_leaves_no_softmax_layer(layers: str) -> None:
    message = f'layers must leave a softmax layer .*got "{layers}" for a model of 4 layers: write "all"'
    with pytest.raises(ValueError, match=message):
        convert_attention(llama(4), layers)


@pytest.mark.parametrize(("layers", "total", "kda"), [("3:1", 4, 3), ("3:1", 6, 5), ("1:9", 4, 1), ("all", 4, 4)])
def test_patterns(layers: str, total: int, kda: int) -> None:
    assert len(chosen_layers(layers, total)) == kda


# ---------------------------------------------------------------- two results


def test_what_is_swapped_in_place_returns_no_model() -> None:
    """The paths are a list like any other, which says what it is where it is taken for the model."""
    model = build("kimi_linear")
    result: Any = swap_attention(model)
    assert result == ["model.layers.0.self_attn", "model.layers.2.self_attn"]
    assert copy.deepcopy(result) == pickle.loads(pickle.dumps(result)) == result
    with pytest.raises(TypeError, match="changed the layers of this model in place"):
        result(torch.tensor([[1]]))
    for name in ("generate", "to", "config", "save_pretrained"):
        with pytest.raises(AttributeError, match=f"no attribute {name}: .* Go on with the model itself"):
            getattr(result, name)


def test_swapping_a_softmax_decoder_converts_it_for_one_release() -> None:
    with pytest.warns(DeprecationWarning, match=r"swap_attention of a LlamaForCausalLM .* use kda_layers.convert_att"):
        new: Any = swap_attention(llama(), "3:1", memory_share=0.5, linear_conv_kernel_dim=3)
    assert (type(new).__name__, new.config.linear_conv_kernel_dim) == ("KDALlamaForCausalLM", 3)
    assert (new.config.linear_recompute, new.config.linear_memory_share) == ("auto", 0.5)
    with (
        pytest.warns(DeprecationWarning, match="swap_attention of a LlamaForCausalLM"),
        pytest.raises(TypeError, match="linear_recompute must be left out beside recompute"),
    ):
        swap_attention(llama(), "3:1", recompute="always", linear_recompute="never")


def test_a_model_that_is_not_converted_is_sent_on() -> None:
    message = r"family \(swap_attention, in place: .*kimi_linear.*\), got model_type 'kimi_linear'"
    with pytest.raises(ValueError, match=message):
        convert_attention(build("kimi_linear"), [0])
