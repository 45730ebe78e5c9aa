"""Prefixes that requests of continuous batching share: fewer tokens are read, the answers are those of `generate`."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from tests.modeling.models import OURS, of_models, stock

try:
    from kda_layers.modeling.serving import prefixes
    from tests.modeling.test_continuous_batching import FP32, Engine, config, generated, generation, model, prompts
except ImportError as error:  # as that file says
    pytest.skip(str(error), allow_module_level=True)

PAGE = 16
SHARING = [name for name in OURS if name not in ("key_bias", "windows", "mistral")]
some = pytest.mark.parametrize("name", ["kda", "hybrid", "llama"])


@pytest.fixture(autouse=True)
def worth_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LEAST", 64)


class Reader(Engine):
    """Counts the tokens of prompts and new ones that the model has read."""

    read = 0

    def step(self) -> bool:
        stepped = super().step()
        if stepped:
            self.read += int(self.steps[-1]["cu_seq_lens_q"][-1])  # the engine's next step overwrites it
        return stepped


def engine(name: str = "kda", **fields: Any) -> Reader:
    return Reader(model(name), **(dict(page_size=PAGE, max_batch_tokens=512, num_blocks=2000) | fields))


def ask(e: Reader, asked: list[list[int]]) -> list[list[int]]:
    """Return the answers to prompts that come at once."""
    requests = [e.add(prompt) for prompt in asked]
    results = e.run()
    return [results[request].generated_tokens for request in requests]


def sharing(e: Engine) -> Any:
    return e.states.prefixes


@of_models(SHARING)
def test_a_prompt_again(name: str) -> None:
    """The second time, only what is behind the last end of a block is read."""
    e, (prompt,) = engine(name), prompts(150)
    for _ in range(3):
        e.add(prompt)
        e.run()
    assert e.tokens() == generated(name, [prompt], 8) * 3
    assert e.read == 150 + 2 * (150 - 128) + 3 * 7
    assert len(sharing(e).kept) == 1
    e.check_empty()


@some
def test_one_system_prompt(name: str) -> None:
    """One of many prompts at once reads what all begin with, and the others wait for it."""
    e, (system, *questions) = engine(name), prompts(140, *range(20, 32))
    asked = [system + question for question in questions]
    assert ask(e, asked) == generated(name, asked, 8)
    assert e.read == sum(map(len, asked)) - (len(asked) - 1) * 128 + len(asked) * 7
    e.check_empty()


@some
def test_later_questions_after_one_system_prompt(name: str) -> None:
    """The first prompt with a common prefix reads it again, as nobody knew that it would be shared."""
    e, (system, *questions) = engine(name), prompts(140, 90, 91, 92, 93)
    asked = [system + question for question in questions]
    lengths = []
    for prompt in asked:
        before = e.read
        assert ask(e, [prompt]) == generated(name, [prompt], 8)
        lengths.append(e.read - before - 7)
    assert lengths == [230, 231, 232 - 128, 233 - 128]


@some
def test_turns_of_a_chat(name: str) -> None:
    e, (prompt, *more) = engine(name), prompts(100, 70, 75, 80)
    for turn in (*more, []):
        before = e.read
        (answer,) = ask(e, [prompt])
        assert [answer] == generated(name, [prompt], 8)
        assert e.read - before - 7 <= 142, "of at most 375"
        prompt = prompt + answer + turn
    e.check_empty()


def test_a_shorter_budget() -> None:
    """A prompt that is read in parts, whose ends are elsewhere."""
    e, (system, *questions) = engine(max_batch_tokens=50), prompts(200, 10, 11, 12)
    asked = [system + question for question in questions]
    assert ask(e, asked) == generated("kda", asked, 8)
    assert e.read == sum(map(len, asked)) - 2 * 192 + 3 * 7


def test_the_least_recently_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    e, asked = engine(), prompts(80, 81, 82)
    monkeypatch.setattr(prefixes, "SHARE", e.states.num_blocks // 2)  # states of two prefixes

    def spared(prompt: list[int]) -> int:
        before = e.read
        assert ask(e, [prompt]) == generated("kda", [prompt], 8)
        return len(prompt) + 7 - (e.read - before)

    assert [spared(asked[i]) for i in (0, 1, 0, 2, 0, 1)] == [0, 0, 64, 0, 64, 0]
    assert len(sharing(e).kept) == 2
    e.check_empty()


@some
def test_requests_come_before_prefixes(name: str) -> None:
    """In a cache with room for few requests, no state of a prefix keeps one out."""
    e = engine(name, num_blocks=60, max_batch_tokens=128)
    asked = prompts(*[100] * 2 * e.states.num_blocks)
    assert ask(e, asked * 2) == generated(name, asked, 8) * 2
    e.check_empty()


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_who_waits_goes_on_without_the_other(end: str) -> None:
    e, (system, *questions) = engine(max_batch_tokens=40), prompts(200, 10, 11, 12)
    asked = [system + question for question in questions]
    first = e.add(asked[0])
    others = [e.add(prompt) for prompt in asked[1:]]
    e.step()
    assert len(e.scheduler.active_requests) == 1
    if end == "cancelled":
        e.manager.cancel_request(first)
    else:
        e.processor.fail_all_requests(RuntimeError("no more"))
        others = [e.add(prompt, request_id=f"again {i}") for i, prompt in enumerate(asked[1:])]
    results = e.run()
    assert [results[request].generated_tokens for request in others] == generated("kda", asked[1:], 8)
    e.check_empty()


def test_forks_of_a_prompt_with_a_known_prefix() -> None:
    e, (prompt,) = engine(returned=3), prompts(150)
    for _ in range(2):
        e.add(prompt)
        e.run()
    assert e.tokens() == generated("kda", [prompt], 8) * 6
    e.check_empty()


@some
def test_preempted_requests(name: str) -> None:
    """A request that gives its slot back reads its tokens again, from the longest prefix that is kept."""
    e, (prompt, other) = engine(name), prompts(150, 90)
    for p in (prompt, other):
        e.add(p)
    for _ in range(4):
        e.step()
    e.scheduler.starved_requests = [(next(iter(e.scheduler.active_requests.values())), 1)]
    assert e.processor.offloading_manager.offload_requests()
    assert sorted(e.tokens()) == sorted(generated(name, [prompt, other], 8))
    e.check_empty()


def test_blocks_are_those_of_all_layers() -> None:
    """A block is of full pages and full chunks, at whose ends a prefill in parts has the bits of one pass."""
    assert sharing(engine("kda", page_size=48)).block == 64
    assert sharing(engine("llama", page_size=48)).block == 192


def test_short_prompts_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step and a copy for a prefix of few tokens would cost more than they spare."""
    monkeypatch.setattr(prefixes, "LEAST", 256)
    e, (prompt,) = engine(), prompts(200)
    for _ in range(2):
        e.add(prompt)
    assert e.tokens() == generated("kda", [prompt], 8) * 2
    assert len(e.steps) == 8
    assert not sharing(e).kept


def test_it_can_be_turned_off() -> None:
    e, (prompt,) = engine(allow_block_sharing=False), prompts(150)
    for _ in range(2):
        e.add(prompt)
        e.run()
    assert e.read == 2 * (150 + 7)
    assert not e.cache.use_prefix_sharing


def test_sliding_windows_share_no_prefixes() -> None:
    """As their pages are overwritten; the engine then shares none of any layer."""
    e, (prompt,) = engine("windows"), prompts(150)
    for _ in range(2):
        e.add(prompt)
        e.run()
    assert not e.cache.use_prefix_sharing
    assert e.read == 2 * (150 + 7)
    assert e.tokens() == generated("windows", [prompt], 8) * 2


def test_stock_models_share_pages_as_before() -> None:
    m = stock("llama", FP32)
    options = config(page_size=PAGE)
    manager = m.init_continuous_batching(GenerationConfig(**generation(8).to_diff_dict()), options)
    assert manager._create_batch_processor().cache.use_prefix_sharing
