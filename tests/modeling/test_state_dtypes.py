"""Recurrent states of caches in bf16 and int8: those of fp32 calls, rounded after each call, whatever holds them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

import kda_layers
from kda_layers import KDAConfig, KimiDeltaAttention
from kda_layers.modeling.layer.cache import cache_bytes, with_kda_layers
from kda_layers.modeling.seams import CACHE
from kda_layers.states import dequantize_state, quantize_state
from tests.kernels.cases import BF16, FP32, FP64
from tests.modeling import models
from tests.modeling.captures import Captures, use_graphs
from tests.modeling.models import ids
from tests.modeling.stock_models import FAMILIES

NAMES = {"bfloat16": BF16, "int8": torch.int8}
narrow = pytest.mark.parametrize("name", NAMES)
some_models = pytest.mark.parametrize("kind", ["kda", "grouped", "llama", f"swapped {FAMILIES[0]}"])


def build(kind: str, name: str = "float32", **fields: Any) -> Any:
    model = models.build(kind, FP32, **fields).eval()
    model.config.linear_state_dtype = name
    return model


def new_cache(model: Any, static: bool = False) -> Any:
    cache = StaticCache(config=model.config, max_cache_len=200) if static else DynamicCache(config=model.config)
    return with_kda_layers(cache)


def states_of(cache: Any) -> list[dict[int, Tensor]]:
    """For each KDA layer its recurrent state, and the scales of an int8 one."""
    return [layer.recurrent_states for layer in cache.layers if hasattr(layer, "recurrent_states")]


def rounded(state: Tensor, name: str) -> Tensor:
    return state.bfloat16().float() if name == "bfloat16" else dequantize_state(*quantize_state(state))


def value(states: dict[int, Tensor]) -> Tensor:
    """A state of any dtype in fp32."""
    return states[0].float() if 1 not in states else dequantize_state(states[0], states[1])


def check(got: Any, want: Any) -> None:
    """The states of two caches are the same numbers."""
    for one, other in zip(states_of(got), states_of(want), strict=True):
        assert torch.equal(value(one), value(other))


@narrow
@some_models
@pytest.mark.parametrize("static", [False, True])
def test_states_are_those_of_fp32_rounded_after_each_call(kind: str, name: str, static: bool) -> None:
    """Prompts, parts of them, steps and padding: logits and states have the bits."""
    model, exact = build(kind, name), build(kind)
    cache, want = new_cache(model, static), new_cache(exact, static)
    tokens, mask, at = ids(2, 81), torch.ones(2, 81, dtype=torch.long), 0
    mask[1, :7] = 0
    with torch.no_grad():
        for length in (70, 1, 1, 6, 1, 1, 1):
            call: dict[str, Any] = dict(attention_mask=mask[:, : at + length], use_cache=True)
            part = tokens[:, at : at + length]
            logits = model(part, **call, **{CACHE: cache}).logits
            assert torch.equal(logits, exact(part, **call, **{CACHE: want}).logits)
            changed = 0
            for states in states_of(want):
                before = states[0].clone()
                states[0].copy_(rounded(before, name))
                changed += int(not torch.equal(before, states[0]))
            assert changed == len(states_of(want))
            check(cache, want)
            at += length
    assert {s[0].dtype for s in states_of(cache)} == {NAMES[name]}
    layers = [i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]
    assert all(cache.has_previous_state(i) for i in layers)


@narrow
def test_bytes_of_a_cache(name: str) -> None:
    model, exact = build("kda", name), build("kda")
    caches = new_cache(model), new_cache(exact)
    with torch.no_grad():
        for m, cache in zip((model, exact), caches, strict=True):
            m(ids(2, 5), use_cache=True, **{CACHE: cache})
    states = 2 * 2 * 2 * 8 * 8  # layers, rows, heads, V, K
    kept = 2 * states if name == "bfloat16" else states + 4 * states // 8
    assert cache_bytes(caches[1]) - cache_bytes(caches[0]) == 4 * states - kept


@narrow
@pytest.mark.parametrize("kind", ["kda", "hybrid"])
def test_generate(kind: str, name: str) -> None:
    """Dynamic and static caches have the same tokens; beams are reordered with their states; a cache is continued."""
    model, tokens = build(kind, name), ids(2, 9)
    options: dict[str, Any] = dict(max_new_tokens=12, do_sample=False, eos_token_id=-1, return_dict_in_generate=True)
    out = model.generate(tokens, **options)
    static = model.generate(tokens, **options, cache_implementation="static", disable_compile=True)
    assert torch.equal(static.sequences, out.sequences)
    assert {s[0].dtype for s in states_of(getattr(out, CACHE))} == {NAMES[name]}
    beams = model.generate(tokens, **options, num_beams=3)
    assert beams.sequences.shape == (2, 21)
    assert states_of(getattr(beams, CACHE))[0][0].shape[0] == 6

    cache = copy.deepcopy(getattr(out, CACHE))
    cache.reorder_cache(torch.tensor([1, 0]))
    for got, want in zip(states_of(cache), states_of(getattr(out, CACHE)), strict=True):
        assert torch.equal(value(got), value(want).flip(0))


@narrow
def test_a_cache_made_in_inference_mode_goes_on_outside(name: str) -> None:
    model, tokens = build("kda", name), ids(1, 9)
    with torch.inference_mode():
        cache = new_cache(model)
        model(tokens, use_cache=True, **{CACHE: cache})
        want = copy.deepcopy(cache)
        model(tokens[:, :1], use_cache=True, **{CACHE: want})
    with torch.no_grad():
        model(tokens[:, :1], use_cache=True, **{CACHE: cache})
    check(cache, want)


@narrow
def test_with_gradients(name: str) -> None:
    """A call with gradients reads a copy of the state, which the cache then overwrites."""
    model, cache = build("kda", name), None
    cache = new_cache(model)
    for length in (5, 1):
        model(ids(1, length), use_cache=True, **{CACHE: cache}).logits.sum().backward()
    assert {s[0].dtype for s in states_of(cache)} == {NAMES[name]}


@narrow
def test_a_long_recorded_prompt_is_rounded_once(name: str) -> None:
    """Its last tokens are recorded apart, from a state that is not rounded."""
    model, tokens = build("kda", name), ids(1, 200)
    recorded, plain = new_cache(model), new_cache(model)
    recorded.activate_past_recording()
    with torch.no_grad():
        got, want = (model(tokens, use_cache=True, **{CACHE: c}).logits for c in (recorded, plain))
    assert torch.equal(got, want)
    check(recorded, plain)


def test_calls_after_a_recorded_prompt_are_replayed_as_they_were() -> None:
    model, tokens = build("kda", "bfloat16"), ids(1, 20)
    cache, want = new_cache(model), new_cache(model)
    cache.activate_past_recording()
    with torch.no_grad():
        for start, end in ((0, 10), (10, 11), (11, 12), (12, 13)):
            model(tokens[:, start:end], use_cache=True, **{CACHE: cache})
        for start, end in ((0, 10), (10, 11)):
            model(tokens[:, start:end], use_cache=True, **{CACHE: want})
    cache.crop(-2)
    check(cache, want)


@narrow
@pytest.mark.parametrize("left", [1, 3, 4])
def test_tokens_that_are_taken_back(name: str, left: int) -> None:
    """The state after the tokens that stay: that of a call with these alone, up to one more rounding in int8."""
    model, tokens = build("kda", name), ids(1, 14)
    cache, want = new_cache(model), new_cache(model)
    cache.activate_past_recording()
    with torch.no_grad():
        for c, parts in ((cache, (10, 4)), (want, (10, 4 - left))):
            at = 0
            for length in filter(None, parts):
                model(tokens[:, at : at + length], use_cache=True, **{CACHE: c})
                at += length
    cache.crop(-left)
    for got, other in zip(states_of(cache), states_of(want), strict=True):
        within = 0.0 if name == "bfloat16" else 1.001 * other[1][..., None]
        assert got[0].dtype == NAMES[name]
        assert ((value(got) - value(other)).abs() <= within).all()
    draft = model.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=-1, prompt_lookup_num_tokens=3)
    assert draft.shape == (1, 20)


@narrow
def test_a_cache_keeps_its_dtype(name: str) -> None:
    """It is read when a cache begins; one that was reset must fit."""
    model, tokens = build("kda"), ids(1, 5)
    cache = new_cache(model)
    with torch.no_grad():
        model(tokens, use_cache=True, **{CACHE: cache})
        model.config.linear_state_dtype = name
        model(tokens, use_cache=True, **{CACHE: cache})
        assert {s[0].dtype for s in states_of(cache)} == {FP32}
        cache.reset()
        with pytest.raises(
            ValueError, match=rf"^cache must be new, or hold states in {name} as state_dtype says.*float32"
        ):
            model(tokens, use_cache=True, **{CACHE: cache})
        again = new_cache(model)
        first = model(tokens, use_cache=True, **{CACHE: again}).logits
        again.reset()
        assert not any(value(s).any() for s in states_of(again))
        assert torch.equal(model(tokens, use_cache=True, **{CACHE: again}).logits, first)


@narrow
@pytest.mark.parametrize("kind", ["kda", "llama"])
def test_a_configuration_keeps_it(kind: str, name: str, tmp_path: Any) -> None:
    build(kind, name).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).linear_state_dtype == name
    model = AutoModelForCausalLM.from_pretrained(tmp_path, linear_state_dtype="float32")
    layers = [m for m in model.modules() if isinstance(m, KimiDeltaAttention)]
    assert layers
    assert {m.state_dtype for m in layers} == {"float32"}
    model.config.linear_state_dtype = name
    assert {m.state_dtype for m in layers} == {name}
    assert f"state_dtype={name}" in repr(layers[0])


@pytest.mark.parametrize("bad", ["fp8", "float64", BF16, None])
def test_bad_names(bad: Any) -> None:
    for make in (lambda: KDAConfig(linear_state_dtype=bad), lambda: setattr(KDAConfig(), "linear_state_dtype", bad)):
        with pytest.raises(StrictDataclassError, match="linear_state_dtype"):
            make()
    text = r"^state_dtype must be 'float32', 'bfloat16' or 'int8', got "
    with pytest.raises(ValueError, match=text):
        KimiDeltaAttention(16, 2, 8, state_dtype=bad)
    model = build(f"swapped {FAMILIES[0]}")
    model.config.linear_state_dtype = bad  # of transformers' own class, which does not know the field
    with torch.no_grad(), pytest.raises(ValueError, match=text):
        model(ids(1, 5), use_cache=True)


@narrow
def test_fp64_is_refused(name: str) -> None:
    model = build("kda", name).to(FP64)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=rf"^state_dtype must be 'float32' for inputs in float64.*{name}"),
    ):
        model(ids(1, 5), use_cache=True)
    model(ids(1, 5), use_cache=False)


def test_a_layer_alone() -> None:
    torch.manual_seed(0)
    layer, x = KimiDeltaAttention(16, 2, 8, layer_idx=0, state_dtype="int8").eval(), torch.randn(1, 5, 16)
    cache = DynamicCache(config=KDAConfig(num_hidden_layers=1))  # stock layers, which nobody replaces here
    with torch.no_grad():
        for part in x.split((4, 1), 1):
            layer(part, cache=cache)
    assert states_of(cache)[0][0].dtype == torch.int8
    assert states_of(cache)[0][1].shape == (1, 2, 8)


def test_explain_tells_what_int8_loses() -> None:
    for name, want in (("float32", False), ("bfloat16", False), ("int8", True)):
        text = kda_layers.explain(build("kda", name).to(BF16))
        decode = text[text.index("decode:") : text.index("training:")]
        assert ("keeps states in int8: 'bfloat16' for linear_state_dtype is served" in decode) == want
        assert (f"state is {name}, needs float32" in decode) == (name != "float32")
        assert "keeps states" not in text[: text.index("decode:")] + text[text.index("training:") :]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captures]:
    for _ in use_graphs("cpu", monkeypatch):
        yield Captures(monkeypatch)


@narrow
@pytest.mark.parametrize("kind", ["kda", "hybrid"])
def test_captured_steps(kind: str, name: str, captures: Captures) -> None:
    """Graphs hold such states, and are kept for later calls until the dtype is another one."""
    model, tokens = build(kind, name), ids(2, 9)
    options: dict[str, Any] = dict(max_new_tokens=12, do_sample=False, eos_token_id=-1)
    want = model.generate(tokens, **options, disable_compile=True)
    assert captures.since() == 0
    for made in (1, 0):
        assert torch.equal(model.generate(tokens, **options), want)
        assert captures.since() == made
    model.config.linear_state_dtype = "float32"
    exact = model.generate(tokens, **options, disable_compile=True)
    assert torch.equal(model.generate(tokens, **options), exact)
    assert captures.since() == 1
