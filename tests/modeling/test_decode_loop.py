"""The loop of generate on the device gives transformers' own tokens: on a tape on the CPU, in CUDA graphs on a GPU."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationMixin,
    LogitsProcessor,
    MaxLengthCriteria,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from kda_layers import restore_attention, swap_attention
from kda_layers.kernels.kda.contract import KDA
from kda_layers.modeling.cuda_graphs import capture, decode_steps, decoding, kept
from kda_layers.modeling.layer.cache import cache_bytes
from kda_layers.modeling.models import generation, hybrid, modeling_kda
from kda_layers.modeling.seams import CACHE, MASKS_ON_DEVICE
from tests.kernels.cases import DEVICES
from tests.modeling import stock_models
from tests.modeling.captures import Captures, Reads, build, use_graphs
from tests.modeling.models import ids, left_padded

OTHERS = ("softplus_tied", "grouped", "key_bias", "head_decay", "llama", "llama, all")
# Of 29 tokens, so that some sequences end early; greedy ones by the first token that the model repeats.
ENDS = dict(eos_token_id=[3, 5, 7])
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": dict(do_sample=True, top_k=0),
    "every processor": dict(
        do_sample=True, temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2
    ),
    "repetition penalty": dict(repetition_penalty=1.3),
}  # fmt: skip


# Families with latent attention; transformers 5.17 has no Ling.
LATENT = [family for family in stock_models.KDA_FAMILIES if family != "glm5_next"]
# Steps of models with images and of indexed attention are not captured.
SWAPPED = [*LATENT, *(f for f in stock_models.GATED_DELTA_FAMILIES if f in ("qwen3_next", "qwen3_5", "olmo_hybrid"))]


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from use_graphs(request.param, monkeypatch)


@pytest.fixture
def captures(device: str, monkeypatch: pytest.MonkeyPatch) -> Captures:
    return Captures(monkeypatch)


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each generate, whether its loop was on the device; buffers of softmax layers grow after four tokens."""
    found: list[bool] = []
    serves = generation.loops_on_device

    def noted(*args: Any) -> bool:
        found.append(serves(*args))
        return found[-1]

    monkeypatch.setattr(generation, "loops_on_device", noted)
    monkeypatch.setattr(decoding, "SLOTS", 4)
    return found


def prompts(device: str, rows: int = 2, length: int = 9, padded: bool = False, seed: int = 0) -> dict[str, Tensor]:
    tokens, mask = left_padded([ids(length - 4 * (padded and n), seed=seed + n) for n in range(rows)])
    return dict(input_ids=tokens.to(device), attention_mask=mask.to(device))


def generated(m: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> tuple[Any, Tensor]:
    """Return what generate does, of 20 new tokens by default, and the random number after it."""
    torch.manual_seed(5)
    out = m.generate(**inputs, **dict(do_sample=False, max_new_tokens=20) | options)
    return out, torch.rand(1, device=m.device)


def check_like_transformers(m: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Any:
    """Fail unless tokens and random numbers are those of transformers' loop of eager steps; return the tokens."""
    got, random = generated(m, inputs, **options)
    assert got.is_contiguous()
    assert got.untyped_storage().nbytes() == got.nbytes, "no place of a token that was not chosen is kept"
    want, same = generated(m, inputs, **options, disable_compile=True)
    assert torch.equal(got, want)
    assert torch.equal(random, same)
    return got


@pytest.mark.parametrize("choice", ["greedy", "every processor", slow("sampled"), slow("repetition penalty")])
@pytest.mark.parametrize("ends", [False, True], ids=["", "ends"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("static", [False, slow(True)], ids=["default", "static"])
@pytest.mark.parametrize("name", ["kda", "hybrid", *map(slow, OTHERS)])
def test_tokens(
    name: str, static: bool, padded: bool, ends: bool, choice: str, device: str, loops: list[bool], captures: Captures
) -> None:
    m, options = build(name, device), CHOICES[choice] | (ENDS if ends else {})
    if static:
        options |= dict(cache_implementation="static")
    lengths = set()
    for seed in range(2):
        lengths.add(check_like_transformers(m, prompts(device, padded=padded, seed=seed), **options).shape[1])
    assert loops == [True, False] * 2
    if not ends:
        assert lengths == {29}
    if not ends and not (padded and "repetition_penalty" in options):  # which may hold the padding, in a tensor
        grows = not static and "full_attention" in m.config.layer_types
        # Of 19 steps after 9 + 1 tokens, with 4 slots at a time; the first graph of a generate is kept.
        assert captures.since() == (5 + 4 if grows else 1)


@pytest.mark.parametrize(
    ("rows", "length", "new"), [(1, 1, 1), (1, 1, 2), (3, 5, 3), (2, 70, 17), (1, 9, 9), (2, 9, 10)]
)
@pytest.mark.parametrize("name", ["kda", "hybrid"])
def test_lengths(name: str, rows: int, length: int, new: int, device: str, loops: list[bool]) -> None:
    m = build(name, device)
    assert check_like_transformers(m, prompts(device, rows, length), max_new_tokens=new).shape == (rows, length + new)
    assert loops == [True, False]


@pytest.mark.parametrize("at", [n if n in (1, 8, 9, 19) else slow(n) for n in range(1, 20)])
def test_every_end(at: int, device: str) -> None:
    """A sequence ends at any step between two synchronisations; the other one, if there is one, goes on."""
    m = build("kda", device)
    for rows in (1, 2):
        inputs = prompts(device, rows)
        tokens, _ = generated(m, inputs, do_sample=True)
        end = int(tokens[0, 8 + at])
        ended = check_like_transformers(m, inputs, do_sample=True, eos_token_id=end, pad_token_id=0)
        assert end in ended[0, 9 : 9 + at]


def test_python_runs_until_the_capture_only(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second generate replays the graph of the first one; replays run no Python of the model."""
    m, calls, forward = build("kda", device), [], hybrid.HybridModel.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(hybrid.HybridModel, "forward", counted)
    for want in ([9, 1, 1], [9]):
        generated(m, prompts(device))
        assert calls == want
        calls.clear()


@pytest.mark.parametrize(("returned", "steps"), [(False, 8), (True, 2)])
def test_steps_beyond_the_end(
    returned: bool, steps: int, device: str, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host checks for the end after eight steps; if the cache is returned, after each."""
    m, ran, advance = build("kda", device), [], decode_steps.Advance.__call__
    inputs = prompts(device, rows=1)
    tokens, _ = generated(m, inputs)
    end = int(tokens[0, 11])
    assert end not in tokens[0, 9:11]
    monkeypatch.setattr(decode_steps.Advance, "__call__", lambda self: (ran.append(1), advance(self))[1])
    out, _ = generated(m, inputs, eos_token_id=end, return_dict_in_generate=returned)
    assert (out.sequences if returned else out).tolist() == tokens[:, :12].tolist()
    assert len(ran) == steps


def test_scores_beyond_the_end_may_be_nan(device: str) -> None:
    """Steps after the end of all sequences are dropped, whatever they compute."""
    m = build("kda", device)
    with torch.no_grad():
        m.model.embed_tokens.weight[0] = torch.nan  # which no prompt has
    options = dict(do_sample=True, top_k=0, eos_token_id=[0, 2, 3, 5, 7, 11, 13], pad_token_id=0)
    lengths = {check_like_transformers(m, prompts(device, rows=1, seed=n), **options).shape[1] for n in range(6)}
    assert lengths & set(range(11, 17)), "some end before the first check"


def test_a_head_that_is_wider_than_the_configuration_says(device: str) -> None:
    """As many random numbers are drawn beyond the end, and taken back, as there are scores."""
    m = build("kda", device)
    m.lm_head = nn.Linear(m.config.hidden_size, 37, bias=False).to(m.lm_head.weight)
    m.model.embed_tokens = nn.Embedding(37, m.config.hidden_size).to(m.lm_head.weight)
    for seed in range(4):
        check_like_transformers(m, prompts(device, seed=seed), do_sample=True, top_k=0, eos_token_id=[3, 5, 7, 31])


@pytest.mark.parametrize("name", ["kda", "hybrid"])
@pytest.mark.parametrize("most", [5, 9, 10])
def test_lengths_that_the_prompt_reaches(name: str, most: int, device: str, loops: list[bool]) -> None:
    """One token is chosen all the same."""
    options = dict(stopping_criteria=[MaxLengthCriteria(most)])
    assert check_like_transformers(build(name, device), prompts(device), **options).shape == (2, 10)
    assert loops == [True, False]


def test_a_length_without_end(device: str, loops: list[bool]) -> None:
    """Every token has a place from the start, so that too many are left to transformers."""
    end = int(generated(build("kda", device), prompts(device, rows=1))[0][0, 14])
    check_like_transformers(build("kda", device), prompts(device, rows=1), max_new_tokens=10**15, eos_token_id=end)
    assert loops == [True, False, False]


def test_criteria_and_processors_of_the_user(device: str, loops: list[bool]) -> None:
    """A penalty that leaves out new tokens would not know those that are still to come."""
    m = build("kda", device)
    check_like_transformers(m, prompts(device), stopping_criteria=[EosTokenCriteria(torch.tensor(3))], pad_token_id=0)
    check_like_transformers(m, prompts(device), tokenizer=object())
    assert loops == [True, False] * 2
    for ignored in (4, 10):
        penalty = RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=ignored)
        check_like_transformers(m, prompts(device), logits_processor=[penalty])
    assert loops[4:] == [True, False, False, False]


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize("ends", [{}, ENDS], ids=["", "ends"])
@pytest.mark.parametrize("name", ["kda", "hybrid", "key_bias"])
def test_the_cache_that_is_returned(name: str, ends: dict[str, Any], device: str, loops: list[bool]) -> None:
    """It has the class, the length, the size and, up to rounding, the contents of that of eager steps."""
    m = build(name, device)
    (got, _), (want, _) = (
        generated(m, prompts(device), return_dict_in_generate=True, disable_compile=plain, **ends)
        for plain in (False, True)
    )
    assert loops == [True, False]
    assert torch.equal(got.sequences, want.sequences)
    ours, theirs = got[CACHE], want[CACHE]
    assert [type(layer) for layer in ours.layers] == [type(layer) for layer in theirs.layers]
    assert ours.get_seq_length() == theirs.get_seq_length() == got.sequences.shape[1] - 1
    assert cache_bytes(ours) == cache_bytes(theirs)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        for x in ("keys", "values"):
            assert (getattr(a, x, None) is None) == (getattr(b, x, None) is None)
            if getattr(a, x, None) is not None:
                torch.testing.assert_close(getattr(a, x), getattr(b, x))
        for x in ("conv_states", "recurrent_states"):
            for mine, other in zip(getattr(a, x, {}).values(), getattr(b, x, {}).values(), strict=True):
                torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(
    "make", [DynamicCache, lambda **kw: StaticCache(**kw, max_cache_len=80)], ids=["dynamic", "static"]
)
@pytest.mark.parametrize("name", ["kda", "hybrid"])
def test_a_conversation(name: str, make: Any, device: str, loops: list[bool]) -> None:
    """Turns that continue a cache of the user, in a copy of it, too."""
    m, results = build(name, device), []
    for plain in (False, True):
        cache, text = make(config=m.config), ids(1, 6).to(device)
        for turn in range(3):
            if turn == 2:
                cache = copy.deepcopy(cache)
            text, _ = generated(
                m, dict(input_ids=text), **{CACHE: cache}, disable_compile=plain, max_new_tokens=6, **ENDS
            )
            text = torch.cat((text, ids(1, 3, seed=turn).to(device)), 1)
        results.append(text)
    assert loops == [True] * 3 + [False] * 3
    assert torch.equal(*results)


def test_keys_and_values_are_held_once(device: str) -> None:
    """The layers that buffers stand for have given theirs up."""
    m = build("hybrid", device)
    cache = m(**prompts(device))[CACHE]
    layer, buffers = cache.layers[1], decoding.Buffers(cache)
    keys = layer.keys.clone()
    buffers.grow(0, 20)
    assert layer.keys is None
    assert torch.equal(cache.layers[1].keys[:, :, :9], keys)
    buffers.give_back()
    assert cache.layers[1] is layer
    assert torch.equal(layer.keys, keys)


def test_kept_results(device: str) -> None:
    """Tokens and caches of a generate are not changed by later ones, which use the memory of its graph."""
    m = build("hybrid", device)
    results = [generated(m, prompts(device, seed=seed), return_dict_in_generate=True)[0] for seed in range(3)]
    for seed, got in enumerate(results):
        want, _ = generated(m, prompts(device, seed=seed), return_dict_in_generate=True)
        assert torch.equal(got.sequences, want.sequences)
        assert torch.equal(got[CACHE].layers[1].keys, want[CACHE].layers[1].keys)
        assert torch.equal(got[CACHE].layers[0].recurrent_states[0], want[CACHE].layers[0].recurrent_states[0])


# ---------------------------------------------------------------- what the host is asked for


class Collects(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("ends", [{}, ENDS], ids=["", "ends"])
@pytest.mark.parametrize("rows", [1, 2])
def test_streamers(rows: int, ends: dict[str, Any], device: str, loops: list[bool]) -> None:
    m, streamers = build("kda", device), (Collects(), Collects())
    for streamer, plain in zip(streamers, (False, True), strict=True):
        generated(m, prompts(device, rows), streamer=streamer, disable_compile=plain, do_sample=True, **ends)
    assert loops == [True, False]
    assert streamers[0].got == streamers[1].got
    assert streamers[0].ended == streamers[1].ended == 1


def test_a_streamer_that_fails(device: str) -> None:
    """The error passes and the cache of the user is whole: it has the tokens of the steps that ran."""

    class Fails(Collects):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.got) == 5:
                raise ConnectionError("gone")

    m, cache = build("hybrid", device), None
    cache = DynamicCache(config=m.config)
    with pytest.raises(ConnectionError, match="gone"):
        generated(m, prompts(device), streamer=Fails(), **{CACHE: cache})
    assert type(cache.layers[1]).__name__ == "DynamicLayer"
    filled = cache.get_seq_length()
    assert 9 < filled < 28
    assert cache.layers[1].keys.shape[2] == filled
    check_like_transformers(m, prompts(device))


class Bans(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([input_ids.shape[1] % 29], device=scores.device), -torch.inf)


class Stops(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 14, device=input_ids.device)


PLAIN: dict[str, dict[str, Any]] = {
    "scores": dict(output_scores=True, return_dict_in_generate=True),
    "processor": dict(logits_processor=[Bans()]),
    "criterion": dict(stopping_criteria=[Stops()]),
    "length penalty": dict(no_repeat_ngram_size=2),
    "least tokens": dict(min_new_tokens=5, **ENDS),
    "no cache": dict(use_cache=False),
    "embeddings": {},
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_transformers_chooses_itself(name: str, device: str, loops: list[bool]) -> None:
    m, options = build("kda", device), dict(PLAIN[name])
    if name == "embeddings":
        options["inputs_embeds"] = m.get_input_embeddings()(prompts(device, seed=3)["input_ids"]).detach()
    (got, _), (want, _) = (generated(m, prompts(device), disable_compile=plain, **options) for plain in (False, True))
    assert loops == [False, False]
    got, want = ((out if isinstance(out, Tensor) else out.sequences) for out in (got, want))
    assert torch.equal(got, want)


def test_outputs_that_are_not_returned(device: str, loops: list[bool]) -> None:
    """transformers drops scores without return_dict_in_generate."""
    check_like_transformers(build("kda", device), prompts(device), output_scores=True)
    assert loops[0]


def in_training(m: Any) -> None:
    m.train()


def hooked(m: Any) -> None:
    m.model.layers[0].register_forward_hook(lambda *_: None)


def replaced(m: Any) -> None:
    m.prepare_inputs_for_generation = m.prepare_inputs_for_generation


def next_tokens(m: Any) -> None:
    """A class whose steps get other tokens."""

    def prepare(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return type(self).__mro__[1].prepare_inputs_for_generation(self, (input_ids + 1) % 29, *args, **kwargs)

    m.__class__ = type("Next", (type(m),), dict(prepare_inputs_for_generation=prepare))


def other_positions(m: Any) -> None:
    """A method of the instance that changes what the next step gets."""
    update = m._update_model_kwargs_for_generation

    def updated(*args: Any, **kwargs: Any) -> Any:
        found = update(*args, **kwargs)
        return found | dict(position_ids=found["position_ids"] + 3)

    m._update_model_kwargs_for_generation = updated


def reading_its_mask(m: Any) -> None:
    """A forward that reads the mask [B, S] of every call."""

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        assert attention_mask is None or attention_mask.ndim == 2
        return type(self).__mro__[1].forward(self, input_ids, attention_mask=attention_mask, **kwargs)

    m.__class__ = type("Reading", (type(m),), dict(forward=forward))


CHANGES = [in_training, hooked, replaced, next_tokens, other_positions, reading_its_mask]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", ["kda", "llama"])
def test_models_that_are_called_by_transformers(name: str, change: Any, device: str, loops: list[bool]) -> None:
    m = build(name, device)
    change(m)
    check_like_transformers(m, prompts(device))
    assert loops == [False, False]


@pytest.mark.parametrize("learned", [False, True], ids=["LoRA", "prompt"])
def test_adapters(learned: bool, device: str, loops: list[bool]) -> None:
    """PEFT replaces a method of every model; learned prompts alone change what a step gets."""
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2, init_lora_weights=False)
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    m = peft.get_peft_model(build("kda", device), prompt if learned else lora).eval().to(device)
    check_like_transformers(m, prompts(device))
    assert loops == [not learned, False]
    if not learned:
        with_adapter, _ = generated(m, prompts(device))
        with m.disable_adapter():
            without = check_like_transformers(m, prompts(device))
        assert not torch.equal(with_adapter, without), "an adapter that is switched off between two generates"


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("ends", [{}, ENDS], ids=["", "ends"])
def test_scores_that_are_nan(ends: dict[str, Any], device: str) -> None:
    """Drawing from them is an error, as in torch.multinomial; the greedy choice is transformers'."""
    m = build("kda", device)
    with torch.no_grad():
        m.lm_head.weight[4] = torch.nan
    with pytest.raises(RuntimeError, match="scores must be finite where tokens are drawn, got NaN or inf"):
        generated(m, prompts(device), do_sample=True, top_k=0, **ends)
    check_like_transformers(m, prompts(device))


def test_a_step_that_cannot_be_captured(device: str, captures: Captures) -> None:
    """Its loop stays on the device, eagerly, with one warning."""
    m = build("kda", device)
    m.model.layers[1].mlp = Reads(m.model.layers[1].mlp)
    with pytest.warns(UserWarning, match="decodes without a CUDA graph, and slower, as capturing one failed"):
        check_like_transformers(m, prompts(device))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_like_transformers(m, prompts(device, seed=1))
    assert (captures.made, captures.tried) == (0, 2)


def test_changes_between_generates(device: str) -> None:
    """Weights written in place, moved and replaced."""
    m = build("kda", device)
    before = check_like_transformers(m, prompts(device))
    with torch.no_grad():
        m.lm_head.weight.mul_(-1)
    assert not torch.equal(check_like_transformers(m, prompts(device)), before)
    m.lm_head.weight = nn.Parameter(-m.lm_head.weight.detach())
    assert torch.equal(check_like_transformers(m, prompts(device)), before)
    m.load_state_dict({name: t.roll(1, 0) for name, t in m.state_dict().items()}, assign=True)
    assert not torch.equal(check_like_transformers(m, prompts(device)), before)


def test_modes(device: str, loops: list[bool]) -> None:
    """Autocast and inference mode, each with a graph of its own."""
    m = build("hybrid", device).float()
    want = check_like_transformers(m, prompts(device))
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(check_like_transformers(m, prompts(device)), want)
        with torch.autocast(device, torch.bfloat16):
            check_like_transformers(m, prompts(device))
    assert loops == [True, False] * 5


def test_random_numbers_go_on(device: str) -> None:
    """Two generates in a row draw as transformers' would: no number is drawn beyond the end, and none twice."""
    m, results = build("kda", device), []
    for plain in (False, True):
        torch.manual_seed(1)
        options = dict(do_sample=True, top_k=0, max_new_tokens=20, disable_compile=plain, **ENDS)
        results.append([m.generate(**prompts(device, seed=seed), **options) for seed in range(4)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len({tuple(a.shape) for a in results[0]}) > 1, "some end early"


# ---------------------------------------------------------------- swapped models


@pytest.mark.parametrize("choice", ["greedy", slow("every processor"), slow("sampled")])
@pytest.mark.parametrize("ends", [False, slow(True)], ids=["", "ends"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("static", [False, slow(True)], ids=["default", "static"])
@pytest.mark.parametrize("dense", [slow(True), False], ids=["dense", "experts"])
@pytest.mark.parametrize("family", [slow(f) if f not in ("kimi_linear", "qwen3_next") else f for f in SWAPPED])
def test_tokens_of_swapped_models(
    family: str, dense: bool, static: bool, padded: bool, ends: bool, choice: str, device: str, loops: list[bool],
    captures: Captures,
) -> None:  # fmt: skip
    """They are those of transformers' loop, and of the stock model; latent attention gets buffers."""
    stock = stock_models.build(family, dense=dense).to(device)
    m, options = copy.deepcopy(stock), CHOICES[choice] | (ENDS if ends else {})
    swap_attention(m)
    if static:
        options |= dict(cache_implementation="static")
    for seed in range(2):
        got = check_like_transformers(m, prompts(device, padded=padded, seed=seed), **options)
        want, _ = generated(stock, prompts(device, padded=padded, seed=seed), **options, disable_compile=True)
        assert torch.equal(got, want)
    assert loops == [True, False] * 2
    assert captures.made > 0


def test_steps_multiply_experts_as_transformers(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU transformers switches to batched_mm for decode steps; grouped_mm in fp32 cannot be captured."""
    m, log, advance = stock_models.build("kimi_linear").to(device), list[str](), decode_steps.Steps.advance
    swap_attention(m)

    @contextlib.contextmanager
    def optimized(model: Any) -> Iterator[None]:
        log.append("begin")
        yield
        log.append("end")

    monkeypatch.setattr(GenerationMixin, "_optimize_model_for_decode", optimized)
    monkeypatch.setattr(decode_steps.Steps, "advance", lambda steps: log.append("step") or advance(steps))
    generated(m, prompts(device), max_new_tokens=2)
    assert log == ["begin", "step", "end"]


def test_a_swapped_model_is_of_its_stock_class(device: str, loops: list[bool]) -> None:
    """By name, by isinstance, in copies and in what is saved; restored, it is that class."""
    stock = stock_models.build("kimi_linear").to(device)
    m = copy.deepcopy(stock)
    swap_attention(m)
    assert isinstance(m, type(stock))
    assert (type(m).__name__, type(m).__module__) == (type(stock).__name__, type(stock).__module__)
    want = check_like_transformers(m, prompts(device))
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert type(other) is type(m)
        assert torch.equal(check_like_transformers(other, prompts(device)), want)
    assert loops == [True, False] * 3
    restore_attention(m)
    assert type(m) is type(stock)
    assert torch.equal(generated(m, prompts(device))[0], want)
    assert len(loops) == 6
    assert not kept.history_of(m)._kept


def test_classes_that_swapping_leaves_alone(device: str, loops: list[bool]) -> None:
    """One that chooses tokens in its own way, and one that something has put before ours."""
    m = stock_models.build("kimi_linear").to(device)
    stock: Any = type(m)
    m.__class__ = type("Mine", (stock,), dict(_sample=lambda self, ids, *args, **kwargs: ids))
    swap_attention(m)
    assert type(m).__name__ == "Mine"
    assert generated(m, prompts(device))[0].shape[1] == 9
    restore_attention(m)
    m.__class__ = stock
    swap_attention(m)
    m.__class__ = outer = type("Outer", (type(m),), {})
    restore_attention(m)
    assert type(m) is outer
    check_like_transformers(m, prompts(device))
    assert loops == [False, False], "its layers are stock ones again"


# ---------------------------------------------------------------- graphs that outlive a generate


@pytest.mark.parametrize("name", ["kda", "hybrid"])
def test_a_graph_serves_later_generates(name: str, device: str, captures: Captures) -> None:
    """Requests of the same kind, with other prompts and lengths, in turns with other kinds."""
    m = build(name, device)
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (prompts(device, 2, 9), dict(max_new_tokens=3)),
        (prompts(device, 3, 9), dict(max_new_tokens=3)),
        (prompts(device, 2, 9), dict(max_new_tokens=3, repetition_penalty=1.2)),
        (prompts(device, 2, 9), dict(max_new_tokens=3, repetition_penalty=1.3)),
        (prompts(device, 2, 9), dict(max_new_tokens=3, do_sample=True)),
    ]
    for inputs, options in kinds:
        check_like_transformers(m, inputs, **options)
        assert captures.since() == 1
    for inputs, options in kinds:
        check_like_transformers(m, inputs, **options)
    for length, new in ((9, 3), (10, 2), (9, 2)):  # up to 12 tokens
        check_like_transformers(m, prompts(device, 2, length, seed=length), max_new_tokens=new, **ENDS)
    assert captures.since() == 1, "with end tokens"
    check_like_transformers(m, prompts(device, 2, 8), max_new_tokens=6)  # the first buffers have 12 places, as before
    assert captures.since() == 1


@pytest.mark.parametrize("name", ["kda", "hybrid"])
def test_a_cache_that_is_returned_is_nobody_elses(name: str, device: str, captures: Captures) -> None:
    """It takes part in no kept graph, and a kept graph in none of its steps."""
    m = build(name, device)
    check_like_transformers(m, prompts(device), max_new_tokens=3)
    captures.since()
    for seed in range(2):
        generated(m, prompts(device, seed=seed), max_new_tokens=3, return_dict_in_generate=True)
    assert captures.since() == 2


def renormed(m: Any) -> None:
    m.model.layers[0].input_layernorm.eps = 10.0


def with_other_options(m: Any) -> None:
    m.model.layers[0].self_attn.kda_options["lower_bound"] = -0.1


def with_another_layer(m: Any) -> None:
    m.model.layers[0] = copy.deepcopy(m.model.layers[1])


def reconfigured(m: Any) -> None:
    m.set_attn_implementation("eager" if MASKS_ON_DEVICE else "sdpa")


def moved(m: Any) -> None:
    for p in m.parameters():
        p.data = p.data.clone()


class Scale:
    """An object with state, which can be called."""

    factor = 1.0

    def __call__(self) -> None:
        """Do nothing."""


class Scaled(nn.Module):
    """An MLP whose sign and size depend on what it holds, in as many ways."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.extra, self.factors, self.names, self.scale = inner, torch.tanh, {"a": 3.0}, {"n"}, Scale()
        self.scale.factor, self.on, self.off = 50.0, [1.0], list[float]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * self.scale.factor * self.factors.get("a", -3.0)
        y = y if self.extra is None else self.extra(y)
        return y * (1 if self.names else -1) * (sum(self.on) - sum(self.off))


class Negated(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return -5 * super().forward(x)


def without_extra(m: Any) -> None:
    m.model.layers[1].mlp.extra = None


def with_another_key(m: Any) -> None:
    m.model.layers[1].mlp.factors["b"] = m.model.layers[1].mlp.factors.pop("a")


def with_fewer_names(m: Any) -> None:
    m.model.layers[1].mlp.names.clear()


def rescaled(m: Any) -> None:
    m.model.layers[1].mlp.scale.factor = -50.0


def in_another_list(m: Any) -> None:
    m.model.layers[1].mlp.off.append(m.model.layers[1].mlp.on.pop())


def of_another_class(m: Any) -> None:
    m.model.layers[1].mlp.__class__ = Negated


EDITS = [renormed, with_other_options, with_another_layer, reconfigured, moved]
OF_SCALED = [without_extra, with_another_key, with_fewer_names, rescaled, in_another_list, of_another_class]


@pytest.mark.parametrize("edit", [*EDITS, *map(slow, OF_SCALED)], ids=lambda edit: edit.__name__)
def test_a_graph_of_a_model_that_was_changed_is_dropped(edit: Any, device: str, captures: Captures) -> None:
    m = build("kda", device)
    if edit in OF_SCALED:
        m.model.layers[1].mlp = Scaled(m.model.layers[1].mlp)
    before = check_like_transformers(m, prompts(device, 4), max_new_tokens=30)
    captures.since()
    edit(m)
    after = check_like_transformers(m, prompts(device, 4), max_new_tokens=30)
    assert captures.since() == (1 if edit is not reconfigured or MASKS_ON_DEVICE else 0)
    assert torch.equal(before, after) == (edit in (moved, reconfigured)), "the change must be one that shows"


def test_adapters_between_generates(device: str, captures: Captures) -> None:
    """Scaled, switched and switched off."""
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    m = peft.get_peft_model(build("kda", device), lora).eval().to(device)
    m.add_adapter("other", lora)
    m.to(device)
    found = [check_like_transformers(m, prompts(device, 4))]
    check_like_transformers(m, prompts(device, 4))
    assert captures.since() == 1
    m.set_adapter("other")
    found.append(check_like_transformers(m, prompts(device, 4)))
    for module in m.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scale_layer(5.0)
    found.append(check_like_transformers(m, prompts(device, 4)))
    with m.disable_adapter():
        found.append(check_like_transformers(m, prompts(device, 4)))
    assert captures.since() == 3
    assert len({tuple(tokens.flatten().tolist()) for tokens in found}) == 4


@pytest.mark.parametrize(("name", "value"), [("MOST_STEPS", 0), ("MOST_BYTES", 1)])
def test_graphs_that_are_not_kept(
    name: str, value: int, device: str, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, name, value)
    m = build("kda", device)
    for want in (1, 1):
        check_like_transformers(m, prompts(device))
        assert captures.since() == want


def test_kept_graphs_go_with_the_model(device: str, captures: Captures) -> None:
    m = build("kda", device)
    for moves, want in ((True, 1), (False, 1), (False, 0)):
        check_like_transformers(m, prompts(device))
        assert captures.since() == want
        if moves:
            m.to(device)
    gone = weakref.ref(m.lm_head.weight)
    gc.collect()
    gc.disable()
    try:
        del m
        assert gone() is None
    finally:
        gc.enable()


class Shifts(TorchFunctionMode):
    """A mode that changes what F.linear returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        return out + 1 if func is nn.functional.linear else out


def test_what_surrounds_a_generate(device: str, captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes, settings of torch, a forward that is patched and a failed capture leave no graph in use."""
    m = build("kda", device)
    want = check_like_transformers(m, prompts(device, 4))
    assert captures.since() == 1
    with Shifts():
        assert not torch.equal(check_like_transformers(m, prompts(device, 4)), want)
    monkeypatch.setattr(capture, "_failed", [1])
    for count in (2, 0):  # one of the mode
        check_like_transformers(m, prompts(device, 4))
        assert captures.since() == count
    monkeypatch.setattr(torch.backends.cudnn, "enabled", not torch.backends.cudnn.enabled)
    check_like_transformers(m, prompts(device, 4))
    assert captures.since() == 1
    forward = modeling_kda.KDAMLP.forward
    monkeypatch.setattr(modeling_kda.KDAMLP, "forward", lambda self, x: -3 * forward(self, x))
    assert not torch.equal(check_like_transformers(m, prompts(device, 4)), want)
    assert captures.since() == 1


def test_another_backend(device: str, captures: Captures) -> None:
    m = build("kda", device)
    check_like_transformers(m, prompts(device))
    kept_backends = dict(KDA.backends())
    try:
        KDA.backends()["mine"] = copy.copy(KDA.backend("eager"))
        check_like_transformers(m, prompts(device))
    finally:
        KDA.backends().clear()
        KDA.backends().update(kept_backends)
    assert captures.since() == 2


def test_a_cache_that_somebody_else_holds(device: str) -> None:
    """A decoding method of the user's may pass the cache on; later steps leave it alone."""
    m, held = build("hybrid", device), []

    def mine(model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        held.append(kwargs[CACHE])
        return model._sample(input_ids, *args, **kwargs)

    def states() -> list[Tensor]:
        layers = held[0].layers
        return [layers[0].recurrent_states[0], layers[0].conv_states[0], layers[1].keys, layers[1].values]

    options = dict(max_new_tokens=3, do_sample=False)
    m.generate(**prompts(device), **options)
    m.generate(**prompts(device), **options, custom_generate=mine)
    before = [t.clone() for t in states()]
    m.generate(**prompts(device, seed=5), **options)
    assert all(map(torch.equal, before, states()))


def test_returned_caches_have_no_spare_places(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "SLOTS", 512)
    m = build("hybrid", device)
    got, _ = generated(m, prompts(device), max_new_tokens=3, return_dict_in_generate=True)
    keys = got[CACHE].layers[1].keys
    assert keys.untyped_storage().nbytes() == keys.nbytes


def test_long_requests_are_not_kept(device: str, captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places for a million tokens count as the cache does."""
    monkeypatch.setattr(decode_steps, "MOST_BYTES", 2**23)
    m = build("kda", device)
    for new, want in ((10**6, 1), (10**6, 1), (10, 1), (10, 0)):
        check_like_transformers(m, prompts(device, 4), max_new_tokens=new, eos_token_id=3, pad_token_id=0)
        assert captures.since() == want


def test_weights_may_be_swapped() -> None:
    """The record of a model has no weak reference to a parameter, with which torch refuses to swap it."""
    m = build("kda", "cpu")
    state = kept.ModelState(m)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        m.load_state_dict(m.state_dict())
        m.model.to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert not state.is_current(m)


@pytest.mark.parametrize("held", [torch.eye(3).to_sparse(), torch.eye(3).numpy()], ids=["sparse", "array"])
def test_what_cannot_be_compared(held: Any, device: str, captures: Captures) -> None:
    """A model that holds it keeps no graph."""
    m = build("kda", device)
    m.model.graph = held
    for seed in range(2):
        check_like_transformers(m, prompts(device, seed=seed))
        assert captures.since() == 1


def test_memory_is_used_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that changes between two calls captures again, in the same memory."""
    made: list[Any] = []
    graphs: Any = kept.CudaGraphs
    monkeypatch.setattr(kept, "CudaGraphs", lambda device: made.append(graphs(device)) or made[-1])
    m = build("kda", device)
    for n in range(4):
        m.model.norm.eps = 1.0 + n
        check_like_transformers(m, prompts(device))
    assert len(made) == 1


def test_what_was_replaced_is_freed() -> None:
    """The record of a model that a graph was captured of holds none of its weights."""
    m = build("kda", "cpu")
    state, weight = kept.ModelState(m), weakref.ref(m.lm_head.weight)
    layers = [weakref.ref(p) for p in m.model.layers[0].parameters()]
    assert state.is_current(m)
    m.model.layers[0] = copy.deepcopy(m.model.layers[1])
    m.lm_head.weight = nn.Parameter(m.lm_head.weight.detach().clone())
    assert not state.is_current(m)
    gc.collect()
    assert weight() is None
    assert all(p() is None for p in layers)


@pytest.mark.parametrize("name", ["kda", "hybrid"])
@pytest.mark.parametrize("threaded", [False, slow(True)], ids=["", "thread"])
def test_a_generate_within_another(name: str, threaded: bool, device: str) -> None:
    """A streamer that generates with the same model does not get the graph that is in use, nor its tensors."""
    m = build(name, device)
    want = check_like_transformers(m, prompts(device, 1))
    other = check_like_transformers(m, prompts(device, 1, seed=1))
    inner: list[Tensor] = []

    class Generates(Collects):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.got) in (3, 8, 13):
                work = threading.Thread(target=lambda: inner.append(generated(m, prompts(device, 1, seed=1))[0]))
                (work.start if threaded else work.run)()
                if threaded:
                    work.join()

    for _ in range(2):
        assert torch.equal(generated(m, prompts(device, 1), streamer=Generates())[0], want)
    assert len(inner) == 6
    assert all(torch.equal(tokens, other) for tokens in inner)


@pytest.mark.parametrize("name", ["hybrid", "llama"])
def test_attention_implementations(name: str, device: str, loops: list[bool], captures: Captures) -> None:
    """Masks of eager attention copy from the host before transformers 5.20."""
    m = build(name, device)
    m.set_attn_implementation("eager")
    check_like_transformers(m, prompts(device, padded=True))
    assert loops == [MASKS_ON_DEVICE, False]
    assert (captures.made > 0) == MASKS_ON_DEVICE


def test_it_needs_no_softmax_layer_to_be_first(device: str, loops: list[bool]) -> None:
    m = build("grouped", device)
    assert m.config.layer_types[0] == "full_attention"
    for padded, rows in itertools.product((False, True), (2, 3)):
        check_like_transformers(m, prompts(device, rows, padded=padded))
    assert loops == [True, False] * 4
