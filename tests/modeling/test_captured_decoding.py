"""generate with captured decode steps is the eager one, bit for bit: on a tape on the CPU, in CUDA graphs on a GPU."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CompileConfig, LogitsProcessor, PreTrainedModel, StaticCache

from kda_layers.modeling.cuda_graphs import decoding, kept
from kda_layers.modeling.cuda_graphs.decoding import CAPTURED_DECODING, CapturedDecoding
from kda_layers.modeling.layer import weights
from kda_layers.modeling.layer.fast_paths import SupposedCall
from tests.kernels.cases import BF16, DEVICES
from tests.modeling import models
from tests.modeling.captures import Captures, build, use_graphs
from tests.modeling.models import ids, left_padded
from tests.modeling.taped_graphs import TapedGraphs

on_cuda = pytest.param("cuda", marks=pytest.mark.gpu)
# KDA beside softmax attention, alone, in a variant
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("kda", "llama")]
every_name = pytest.mark.parametrize("name", ["hybrid", *OTHERS])
LONG = dict(max_new_tokens=10)
EVERYTHING = dict(return_dict_in_generate=True, output_scores=True, output_hidden_states=True)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from use_graphs(request.param, monkeypatch)


@pytest.fixture
def captures(device: str, monkeypatch: pytest.MonkeyPatch) -> Captures:
    return Captures(monkeypatch)


def generated(m: PreTrainedModel, tokens: Tensor, **options: Any) -> Any:
    """Ten greedy tokens with a static cache and all that can be returned, by default."""
    if "past_key_values" not in options:
        options.setdefault("cache_implementation", "static")
    options = LONG | EVERYTHING | dict(do_sample=False, attention_mask=torch.ones_like(tokens)) | options
    torch.manual_seed(5)
    return m.generate(tokens, **options)


def check_same(got: Any, want: Any) -> None:
    """Fail unless two results of `generated` have the same bits: tokens, scores, hidden states and caches."""
    assert torch.equal(got.sequences, want.sequences)
    for name in ("scores", "hidden_states"):
        steps = zip(getattr(got, name) or (), getattr(want, name) or (), strict=True)
        for n, step in enumerate(steps):
            a, b = ((t,) if isinstance(t, Tensor) else t for t in step)
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), f"{name} of step {n}"
    for a, b in zip(contents(got.past_key_values), contents(want.past_key_values), strict=True):
        assert torch.equal(a, b)


def contents(cache: Any) -> list[Tensor]:
    """Copies of all tensors of a cache."""
    held = [value for layer in cache.layers for value in vars(layer).values()]
    held += [value for part in held if isinstance(part, dict) for value in part.values()]
    return [value.clone() for value in held if isinstance(value, Tensor)]


def check_like_eager(m: PreTrainedModel, tokens: Tensor, **options: Any) -> Any:
    got = generated(m, tokens, **options)
    check_same(got, generated(m, tokens, disable_compile=True, **options))
    return got


def eager_calls(m: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the calls of `m` that run in Python, captures included."""
    calls: list[int] = []
    forward = type(m).forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(m), "forward", counted)
    return calls


# ---------------------------------------------------------------- bit for bit


@every_name
@pytest.mark.parametrize("options", [dict(), dict(do_sample=True, top_k=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("padded", [False, True])
def test_generate(name: str, options: dict[str, Any], padded: bool, device: str, captures: Captures) -> None:
    """The first generate captures its second decode step, later ones capture their first."""
    m = build(name, device)
    for seed, rows in ((1, 2), (2, 2), (3, 1), (4, 2)):
        tokens, mask = left_padded([ids(9 - 4 * (padded and n), seed=seed + n) for n in range(rows)])
        mask, tokens = mask.to(device), tokens.to(device)
        check_like_eager(m, tokens, attention_mask=mask, **options)
        assert captures.since() == 1


@pytest.mark.parametrize("options", [dict(), dict(do_sample=True, top_k=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("name", "made"), [("kda", 1), ("hybrid", 0)])
def test_the_default_cache(name: str, made: int, options: dict[str, Any], device: str, captures: Captures) -> None:
    """A state of constant size is as good as a static cache; keys and values grow."""
    m = build(name, device)
    for seed in range(2):
        got = check_like_eager(m, ids(2, 9, seed=seed).to(device), cache_implementation=None, **options)
        assert captures.since() == made
        assert got.past_key_values.get_seq_length() == 18


@torch.no_grad()
def test_the_default_cache_counts_its_tokens(device: str, captures: Captures) -> None:
    """In Python: steps that are captured and replayed count as eager ones, and one that fails does not."""
    m = build("kda", device)
    tokens = ids(2, 9).to(device)
    cache, call = m(tokens).past_key_values, m.get_compiled_call(None)
    for n in range(9, 14):
        assert [layer.get_seq_length() for layer in cache.layers] == [n, n]
        call(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)
    assert captures.since() == 1
    call(input_ids=tokens[:, :3], past_key_values=cache, use_cache=True)  # several tokens, eagerly
    assert cache.get_seq_length() == 17


@every_name
def test_python_runs_until_the_capture_only(
    name: str, device: str, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, tokens = build(name, device), ids(2, 9).to(device)
    calls = eager_calls(m, monkeypatch)
    options = dict(return_dict_in_generate=False, output_scores=False, output_hidden_states=False)
    generated(m, tokens, **options)
    assert calls == [9, 1, 1]
    generated(m, tokens, **options)
    assert calls == [9, 1, 1, 9, 1]
    assert captures.since() == 2


@every_name
def test_caches_of_other_lengths_and_batches(name: str, device: str, captures: Captures) -> None:
    m = build(name, device)
    for rows, length, new in ((2, 9, 10), (1, 5, 4), (2, 70, 12), (3, 2, 7), (1, 5, 4), (2, 9, 10)):
        check_like_eager(m, ids(rows, length, seed=rows).to(device), max_new_tokens=new)
        assert captures.since() == 1


@every_name
def test_results_that_are_kept(name: str, device: str) -> None:
    """Caches, scores and hidden states of a generate are not changed by the next ones."""
    m = build(name, device)
    prompts = [ids(2, 9, seed=seed).to(device) for seed in range(3)]
    kept = [generated(m, tokens) for tokens in prompts]
    for got, tokens in zip(kept, prompts, strict=True):
        check_same(got, generated(m, tokens, disable_compile=True))


@every_name
def test_a_cache_of_the_user(name: str, device: str, captures: Captures) -> None:
    """Two conversations in turns, each continuing its own cache."""
    m = build(name, device)
    results = []
    for disable in (False, True):
        caches = [StaticCache(config=m.config, max_cache_len=60) for _ in range(2)]
        texts = [ids(1, 6, seed=seed).to(device) for seed in range(2)]
        for n in range(4):
            options = dict(past_key_values=caches[n % 2], disable_compile=disable, max_new_tokens=6)
            found = generated(m, texts[n % 2], attention_mask=None, **options)
            texts[n % 2] = torch.cat((found.sequences, ids(1, 3, seed=n).to(device)), 1)
        results.append([*texts, *(t for cache in caches for t in contents(cache))])
    assert captures.since() == 4
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("chunk", [1, 4])
@every_name
def test_chunked_prefill(name: str, chunk: int, device: str) -> None:
    m = build(name, device)
    for seed in range(2):
        check_like_eager(m, ids(2, 9, seed=seed).to(device), prefill_chunk_size=chunk)


@every_name
@pytest.mark.parametrize("options", [dict(num_beams=3), dict(num_beams=2, do_sample=True)], ids=["greedy", "sampled"])
def test_beams(name: str, options: dict[str, Any], device: str, captures: Captures) -> None:
    """transformers calls the model itself, as the cache of each step has other tensors."""
    m, tokens = build(name, device), ids(2, 9).to(device)
    for _ in range(2):
        check_like_eager(m, tokens, output_hidden_states=False, **options)
        assert captures.since() == 0


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_autocast(dtype: torch.dtype, device: str, captures: Captures) -> None:
    m, tokens = build("hybrid", device).float(), ids(2, 9).to(device)
    with torch.autocast(device, dtype):
        check_like_eager(m, tokens)
        assert captures.since() == 1
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(1.1)
        torch.clear_autocast_cache()
        check_like_eager(m, tokens)
    check_like_eager(m, tokens)


def test_autocast_makes_its_casts_in_the_graph(device: str) -> None:
    """Weights that are written in place while generate runs are followed, which casts of before would not be."""
    m, tokens = build("kda", device).float(), ids(2, 9).to(device)

    class Writes(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] in (9, 14):
                m.lm_head.weight.mul_(-1 if input_ids.shape[1] == 14 else 1)
                torch.clear_autocast_cache()
            return scores

    with torch.autocast(device, BF16):
        got = generated(m, tokens, logits_processor=[Writes()])
        with torch.no_grad():
            m.lm_head.weight.mul_(-1)
        torch.clear_autocast_cache()
        check_same(got, generated(m, tokens, logits_processor=[Writes()], disable_compile=True))


def test_inference_mode(device: str, captures: Captures) -> None:
    m, tokens = build("hybrid", device), ids(2, 9).to(device)
    want = generated(m, tokens, disable_compile=True)
    for _ in range(2):
        with torch.inference_mode():
            got = generated(m, tokens)
        check_same(got, want)
        assert captures.since() == 1
        check_same(generated(m, tokens), want)
        assert captures.since() == 1


def test_threads(device: str) -> None:
    """Generates that overlap on one model have graphs of their own."""
    m = build("kda", device)
    prompts = [ids(2, 9, seed=seed).to(device) for seed in range(3)]
    wanted = [generated(m, tokens, disable_compile=True) for tokens in prompts]
    inner: list[Any] = []

    class Generates(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] == 14:
                thread = threading.Thread(target=lambda: inner.append(generated(m, prompts[1])))
                thread.start()
                thread.join()
                inner.append(generated(m, prompts[2]))
            return scores

    got = generated(m, prompts[0], logits_processor=[Generates()])
    check_same(got, wanted[0])
    check_same(inner[0], wanted[1])
    check_same(inner[1], wanted[2])
    assert len(kept._histories[m].idle) == 2, "one for the two in turns"


# ---------------------------------------------------------------- a model that changes


def write(m: Any) -> None:
    with torch.no_grad():
        m.lm_head.weight.mul_(-1)


def replace(m: Any) -> None:
    m.lm_head.weight = nn.Parameter(-m.lm_head.weight.detach())


def move(m: Any) -> None:
    m.lm_head.weight.data = -m.lm_head.weight.data


def replace_layer(m: Any) -> None:
    layer, old = m.model.layers[1].mlp, m.model.layers[1].mlp.down_proj
    layer.down_proj = nn.Linear(old.in_features, old.out_features).to(old.weight)


def load(m: Any) -> None:
    m.load_state_dict({name: t.roll(1, 0) for name, t in m.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [write, replace, move, replace_layer, load], ids=lambda c: c.__name__)
def test_a_change_between_generates_is_seen(change: Any, device: str, captures: Captures) -> None:
    m, tokens = build("kda", device), ids(2, 9).to(device)
    before = generated(m, tokens)
    change(m)
    after = check_like_eager(m, tokens)
    assert captures.since() == 2
    assert not torch.equal(after.scores[0], before.scores[0])


def test_another_dtype_and_a_copy(device: str, captures: Captures) -> None:
    m, tokens = build("kda", device), ids(2, 9).to(device)
    generated(m, tokens)
    check_like_eager(copy.deepcopy(m), tokens)
    check_like_eager(m.float(), tokens)
    assert captures.since() == 3


def test_weights_may_move_after_a_capture(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of a generate is gone when weights are laid side by side again."""
    if device == "cpu":
        monkeypatch.setattr(weights, "DEVICES", ("cpu",))
        monkeypatch.setattr(weights, "is_capturing", lambda device: TapedGraphs.recording)
    m, tokens = build("kda", device), ids(1, 9).to(device)
    for _ in range(2):
        check_like_eager(m, tokens)
        for layer in m.model.layers:
            assert not layer.mlp.merged_weights.fixed
            assert layer.mlp.merged_weights.whole is not None
        load(m)


@pytest.mark.slow
def test_models_are_not_kept(device: str) -> None:
    """The graphs of a model go with it."""
    m, tokens = build("kda", device), ids(1, 9).to(device)
    generated(m, tokens)
    gc.collect()
    before = len(kept._histories)
    del m
    gc.collect()
    assert len(kept._histories) == before - 1


def hook(m: Any) -> None:
    m.model.layers[0].register_forward_hook(lambda *args: None)


def pre_hook(m: Any) -> None:
    m.model.norm.register_forward_pre_hook(lambda *args: None)


def replaced_forward(m: Any) -> None:
    m.model.norm.forward = m.model.norm.forward


def compiled_module(m: Any) -> None:
    m.model.layers[0].mlp.compile(backend="eager")


def quantised(m: Any) -> None:
    m.hf_quantizer = object()


class Shard(nn.Parameter):
    """As DTensor, of another type than a parameter."""


def sharded(m: Any) -> None:
    m.lm_head.weight = Shard(m.lm_head.weight.detach())


def shared_out(m: Any) -> None:
    m.model.norm.to("meta")


def configured(m: Any) -> None:
    m.generation_config.compile_config = CompileConfig()


REFUSALS = [hook, pre_hook, replaced_forward, compiled_module, quantised, sharded, shared_out, configured]


@pytest.mark.parametrize("change", REFUSALS, ids=lambda c: c.__name__)
def test_models_that_torch_compile_serves(change: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, **options: ("compiled", options.get("mode")))
    m = build("kda", device)
    assert isinstance(m.get_compiled_call(None), CapturedDecoding)
    change(m)
    assert m.get_compiled_call(None) == ("compiled", "reduce-overhead")


def test_options_global_hooks_and_windows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, **options: ("compiled", options.get("mode")))
    m = build("kda", device)
    assert m.get_compiled_call(CompileConfig(mode="default")) == ("compiled", "default")
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert m.get_compiled_call(None) == ("compiled", "reduce-overhead")
    finally:
        handle.remove()
    assert isinstance(m.get_compiled_call(None), CapturedDecoding)
    windows = build("windows", device)
    assert windows.get_compiled_call(None) == ("compiled", "reduce-overhead")


def is_capturable(m: Any) -> bool:
    return CAPTURED_DECODING.serves(SupposedCall(m.device, m.dtype), m)


def test_a_model_on_two_devices(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "DEVICES", (device, "meta"))
    m = build("kda", device)
    assert is_capturable(m)
    m.model.norm.to("meta")
    assert not is_capturable(m)


def test_a_cpu_is_not_captured() -> None:
    assert not is_capturable(models.build("kda"))


# ---------------------------------------------------------------- calls of other kinds


def step_of(m: Any, device: str, name: str = "kda") -> tuple[CapturedDecoding, Any, dict[str, Any]]:
    """The function of a generate, a cache that holds a prompt, and the arguments of a decode step."""
    cache = StaticCache(config=m.config, max_cache_len=40)
    m(ids(2, 9).to(device), past_key_values=cache)
    arguments = dict(
        input_ids=ids(2, 1).to(device), past_key_values=cache, position_ids=torch.full((2, 1), 9, device=device),
        attention_mask={"linear_attention": None}, use_cache=True, return_dict=True,
    )  # fmt: skip
    return m.get_compiled_call(None), cache, arguments


@torch.no_grad()
def test_shapes_that_grow_are_never_captured(device: str, captures: Captures) -> None:
    m = build("kda", device)
    call, _, arguments = step_of(m, device)
    _, _, same = step_of(m, device)
    for n in range(4):
        for extra in (dict(token_type_ids=torch.zeros(2, 9 + n, device=device)), dict(max_length_q=n)):
            assert torch.equal(call(**arguments, **extra).logits, m(**same, **extra).logits)
    for n in range(4):
        extra = dict(token_type_ids=torch.zeros(2, 9 + n, device=device))
        assert torch.equal(call(**arguments, **extra).logits, m(**same, **extra).logits)
    assert captures.since() == 0


@torch.no_grad()
def test_signatures_in_turns(device: str, captures: Captures) -> None:
    """A call that differs runs eagerly and drops the graph; two equal ones capture again."""
    m = build("kda", device)
    call, _, arguments = step_of(m, device)
    _, _, same = step_of(m, device)
    made = []
    for keep in (0, 0, 0, 1, 0, 0, 0, True, 1, 1):
        got, want = call(**arguments, logits_to_keep=keep), m(**same, logits_to_keep=keep)
        assert torch.equal(got.logits, want.logits)
        made.append(captures.since())
    assert made == [0, 1, 0, 0, 0, 1, 0, 0, 0, 1]


@torch.no_grad()
def test_inference_mode_for_some_calls(device: str, captures: Captures) -> None:
    m = build("kda", device)
    call, _, arguments = step_of(m, device)
    _, _, same = step_of(m, device)
    made = []
    for inference in (1, 1, 1, 0, 0, 0, 1):
        with torch.inference_mode(bool(inference)), torch.no_grad():
            assert torch.equal(call(**arguments).logits, m(**same).logits)
        made.append(captures.since())
    assert made == [0, 1, 0, 0, 1, 0, 0]


@torch.no_grad()
def test_an_eager_call_drops_the_graph(device: str, captures: Captures) -> None:
    m = build("kda", device)
    call, _, arguments = step_of(m, device)
    made = []
    for tokens in (1, 1, 1, 2, 1, 1, 1):
        call(**arguments) if tokens == 1 else two_tokens(call, arguments)
        made.append(captures.since())
    assert made == [0, 1, 0, 0, 0, 1, 0]


@torch.no_grad()
def test_two_caches_in_turns(device: str, captures: Captures) -> None:
    m = build("kda", device)
    call, _, first = step_of(m, device)
    pairs = [(first, step_of(m, device)[2]), (step_of(m, device)[2], step_of(m, device)[2])]
    for n in (0, 0, 0, 1, 0, 1, 1, 1, 0):
        arguments, same = pairs[n]
        assert torch.equal(call(**arguments).logits, m(**same).logits)
        got, want = (contents(of["past_key_values"]) for of in (arguments, same))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert captures.since() == 2


def with_grad(call: Any, arguments: Any) -> Any:
    with torch.enable_grad():
        return call(**arguments)


def in_training(call: Any, arguments: Any) -> Any:
    call.model.train()
    try:
        return call(**arguments)
    finally:
        call.model.eval()


def positional(call: Any, arguments: Any) -> Any:
    return call(arguments["input_ids"], **{k: v for k, v in arguments.items() if k != "input_ids"})


def two_tokens(call: Any, arguments: Any) -> Any:
    tokens = arguments["input_ids"].repeat(1, 2)
    return call(**arguments | dict(input_ids=tokens, position_ids=arguments["position_ids"].repeat(1, 2)))


def unknown_argument(call: Any, arguments: Any) -> Any:
    return call(**arguments, token_type_ids={1, 2})


def other_device(call: Any, arguments: Any) -> Any:
    return call(**arguments, token_type_ids=torch.zeros(2, 1, device="meta"))


EAGER = [with_grad, in_training, positional, two_tokens, unknown_argument, other_device]


@pytest.mark.parametrize("how", EAGER, ids=lambda f: f.__name__)
@torch.no_grad()
def test_calls_that_run_eagerly(how: Any, device: str, captures: Captures) -> None:
    m = build("kda", device)
    call, _, arguments = step_of(m, device)
    _, _, same = step_of(m, device)
    model = type("Plain", (), dict(model=m, __call__=lambda self, *args, **kwargs: m(*args, **kwargs)))()
    for _ in range(3):
        assert torch.equal(how(call, arguments).logits, how(model, same).logits)
    assert captures.since() == 0


@torch.no_grad()
def test_a_cache_that_is_changed_between_steps(device: str, captures: Captures) -> None:
    """States that are replaced, moved or reset, and a cache with Python state that changes in a step."""
    m = build("kda", device)
    call, cache, arguments = step_of(m, device)
    _, other, same = step_of(m, device)

    def step() -> int:
        assert torch.equal(call(**arguments).logits, m(**same).logits)
        return captures.since()

    assert [step(), step(), step()] == [0, 1, 0]
    for each in (cache, other):
        each.layers[0].recurrent_states[0] = each.layers[0].recurrent_states[0].flip(0).clone()
    assert [step(), step(), step()] == [0, 1, 0]
    for each in (cache, other):
        each.layers[1].conv_states[0].data = each.layers[1].conv_states[0].data.clone()
    assert [step(), step(), step()] == [0, 1, 0]
    for each in (cache, other):
        each.reset()
    assert step() == 0
    assert [step(), step(), step()] == [0, 1, 0]
    for each in (cache, other):
        each.activate_past_recording()
    assert [step(), step(), step()] == [0, 0, 0]


@torch.no_grad()
def test_a_cache_that_is_reordered(device: str, captures: Captures) -> None:
    """As beam search does it: a step with other tensors than the one before is neither replayed nor captured."""
    m = build("hybrid", device)
    call, cache, arguments = step_of(m, device)
    _, other, same = step_of(m, device)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool, device=device)
    masks = dict(attention_mask={"linear_attention": None, "full_attention": mask})
    for captured in (False, True):
        for _ in range(3 * captured):
            assert torch.equal(call(**arguments | masks).logits, m(**same | masks).logits)
        assert captures.since() == captured
        for n in range(4):
            for each in (cache, other):
                each.reorder_cache(torch.tensor([1, n % 2], device=device))
            assert torch.equal(call(**arguments | masks).logits, m(**same | masks).logits)
        assert captures.since() == 0


# ---------------------------------------------------------------- failures


class Reads(nn.Module):
    """A norm that waits for the device in every call, or in the first ones."""

    def __init__(self, norm: nn.Module, calls: float = float("inf")) -> None:
        super().__init__()
        self.norm, self.calls = norm, calls

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            self.calls -= 1
            if self.calls >= 0 and x.sum().item() > 1e30:
                raise ValueError
        return self.norm(x)


@every_name
def test_a_step_that_cannot_be_captured(name: str, device: str, captures: Captures) -> None:
    """It warns once, and the results are those of eager steps."""
    m, tokens = build(name, device), ids(2, 9).to(device)
    m.model.norm = Reads(m.model.norm)
    want = generated(m, tokens, disable_compile=True)
    with pytest.warns(UserWarning, match=r"decodes without a CUDA graph, and slower, .*: .*disable_compile=True.*Comp"):
        check_same(generated(m, tokens), want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same(generated(m, tokens), want)
    assert captures.since() == 0
    assert captures.tried == 2, "once in each generate"


def test_a_first_step_that_cannot_be_captured_yet(device: str, captures: Captures) -> None:
    """As after a change of the model that needs kernels which are not loaded: the second step is tried again."""
    m, tokens = build("kda", device), ids(2, 9).to(device)
    generated(m, tokens)
    assert captures.since() == 1
    norm = m.model.norm
    want = generated(m, tokens, disable_compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m.model.norm = Reads(norm, calls=2)  # the failed capture, and the eager step
        check_same(generated(m, tokens), want)
    assert captures.since() == 1


class Replaces(nn.Module):
    """A norm that replaces a state of the cache, or sets a number, in a decode step, and may wait for the device."""

    def __init__(self, norm: nn.Module, tensor: bool, waits: bool) -> None:
        super().__init__()
        self.norm, self.tensor, self.waits, self.cache = norm, tensor, waits, None

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1 and self.cache is not None:
            layer = self.cache.layers[0]
            if self.tensor:
                layer.recurrent_states[0] = layer.recurrent_states[0].clone()
            else:
                layer.steps = 1 - getattr(layer, "steps", 0)
            if self.waits:
                x.sum().item()
        return self.norm(x)


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("waits", [False, True])
@torch.no_grad()
def test_a_step_that_changes_python_state(waits: bool, tensor: bool, device: str) -> None:
    m = build("kda", device)
    call, cache, arguments = step_of(m, device)
    _, _, same = step_of(m, device)
    call(**arguments)
    m(**same)
    m.model.norm = Replaces(m.model.norm, tensor, waits)
    m.model.norm.cache = cache
    problem = "capturing one failed" if waits else "a step changes more of its cache than the contents of tensors"
    with pytest.warns(UserWarning, match=problem):
        got = call(**arguments).logits
    if not tensor:
        assert cache.layers[0].steps == 1, "once, in the eager step"
    m.model.norm.cache = None
    assert torch.equal(got, m(**same).logits)
    assert torch.equal(call(**arguments).logits, m(**same).logits)


@torch.no_grad()
def test_errors_of_the_model_pass(device: str) -> None:
    """A call that is wrong raises the model's error, without a warning."""
    m = build("kda", device)
    call, _, arguments = step_of(m, device)
    wrong = arguments | dict(position_ids=torch.zeros(1, 3, dtype=torch.long, device=device))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with pytest.raises(ValueError, match="position_ids must have shape"):
                call(**wrong)


# ---------------------------------------------------------------- on a GPU alone


@pytest.mark.parametrize("device", [on_cuda], indirect=True)
def test_memory_does_not_grow(device: str) -> None:
    m, tokens = build("hybrid", device), ids(2, 9).to(device)
    for _ in range(3):
        generated(m, tokens)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(10):
        generated(m, tokens)
    torch.cuda.synchronize()
    gc.collect()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
