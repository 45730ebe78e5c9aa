"""Prefixes that requests of continuous batching share: fewer tokens are read, the answers are those of `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tests.modeling.models import OURS, of_models, stock

try:
    from kda_layers.modeling.serving import prefixes
    from tests.modeling.test_continuous_batching import (
        FP32,
        LATENT,
        Engine,
        config,
        generated,
        generation,
        model,
        prompts,
    )
except ImportError as error:  # as that file says
    pytest.skip(str(error), allow_module_level=True)

PAGE = 16
SHARING = [*(name for name in OURS if name not in ("key_bias", "windows", "mistral")), *LATENT]
some = pytest.mark.parametrize("name", ["kda", "hybrid", "llama", *LATENT])


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
    e = engine(name, num_blocks=20, max_batch_tokens=128)
    asked = prompts(*[100] * (e.states.num_blocks // 2))  # twice the states that prefixes may keep
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


def test_one_id_for_two_prompts() -> None:
    """A request that fails while it waits leaves no plan to a later one with its id."""
    e, (first, other) = engine(max_batch_tokens=40), prompts(200, 210)
    e.add(first)
    e.run()
    e.add(other)
    e.step()
    e.scheduler.max_requests_per_batch = 1
    e.add(first + other, request_id="again")
    e.step()
    assert "again" in e.scheduler.waiting_requests
    e.processor.fail_all_requests(RuntimeError("no more"))
    e.add(other[:195], request_id="again")
    assert e.run()["again"].generated_tokens == generated("kda", [other[:195]], 8)[0]
    e.step()
    assert not sharing(e).plans
    assert not sharing(e).readers


@pytest.mark.parametrize("length", [129, 130, 150])
def test_forks_of_a_prompt_with_a_known_prefix(length: int) -> None:
    """The engine forks a request before its last token, which is not the only one left."""
    e, (prompt,) = engine(returned=3), prompts(length)
    for _ in range(2):
        e.add(prompt)
        e.run()
    assert e.tokens() == generated("kda", [prompt], 8) * 6
    e.check_empty()


def test_forks_of_one_token() -> None:
    """Alone in a step, which would have no token to read."""
    e = engine(returned=3)
    e.add([5])
    results = e.run()
    assert sorted(results) == ["req_0", "req_0__child#0", "req_0__child#1"]
    assert [r.generated_tokens for r in results.values()] == generated("kda", [[5]], 8) * 3
    e.check_empty()


def test_a_prompt_waits_for_active_requests_alone() -> None:
    """A short one that comes before a long one, by the order of every other step, does not wait for it."""
    e, (first, system, long, short) = engine(max_batch_tokens=100), prompts(5, 140, 600, 10)
    e.add(first, request_id="first")
    e.step()
    e.add(system + long, request_id="long")
    e.add(system + short, request_id="short")
    e.step()
    assert [*e.scheduler.active_requests] == ["first", "short"]
    results = e.run()
    answers = [results[request].generated_tokens for request in ("long", "short")]
    assert answers == generated("kda", [system + long, system + short], 8)
    assert e.read == 5 + 140 + 10 + 740 - 128 + 3 * 7


# ---------------------------------------------------------------- requests that give their slots back


def preempt(e: Engine, request: str) -> None:
    """Take an active request's slot and pages away, as if it asked for more than there is."""
    e.scheduler.starved_requests = [(e.scheduler.active_requests[request], 10**6)]
    assert e.processor.offloading_manager.offload_requests()
    e.scheduler.starved_requests = []
    e.scheduler.block_new_requests = False
    assert request in e.scheduler.waiting_requests


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))


@pytest.mark.parametrize("name", ["hybrid", "llama"])  # of KDA layers alone, an active request lacks nothing
@pytest.mark.parametrize("offload", [0.0, 0.01])
def test_preempted_requests(name: str, offload: float, unpinned: None) -> None:
    """A request goes on where it was or, without memory, reads its tokens again: prefixes were given up first."""
    e, (prompt, other) = engine(name, cpu_offload_space=offload), prompts(150, 90)
    for request, tokens in (("a", prompt), ("b", other)):
        e.add(tokens, request_id=request)
    for _ in range(4):
        e.step()
    reread = 0 if offload else e.scheduler.active_requests["a"].position_offset
    preempt(e, "a")
    assert e.scheduler.waiting_requests["a"].is_cpu_offloaded == bool(offload)
    results = e.run()
    answers = [(out.prompt_ids + out.generated_tokens)[-8:] for out in (results["a"], results["b"])]
    assert answers == generated(name, [prompt, other], 8)
    assert e.read == 150 + 90 + 2 * 7 + reread
    e.check_empty()


@pytest.mark.parametrize("name", ["hybrid", "llama"])
def test_restored_into_the_slot_of_a_prefix(name: str, unpinned: None) -> None:
    """The copy of a state that is given up at once does not come after the restored one."""
    e = engine(name, new=30, num_blocks=200, cpu_offload_space=0.01)
    first, prompt, other = prompts(20, 150, 9)
    e.add(first, request_id="first")
    e.add(other, request_id="other")
    for _ in range(4):
        e.step()
    preempt(e, "first")
    waiting = e.scheduler.waiting_requests.pop("first")
    e.scheduler.waiting_requests_order.clear()
    e.add(prompt, request_id="prompt")
    e.step()
    assert sharing(e).due == {"prompt": 128}
    e.scheduler.waiting_requests["first"] = waiting
    e.scheduler.waiting_requests_order.append("first")
    e.cache.pool.try_to_free_sectors()
    e.scheduler.safety_margin = e.cache.compute_free_capacity()  # which the next slot falls below
    results = e.run()
    answers = [results[request].generated_tokens for request in ("first", "prompt", "other")]
    assert answers == generated(name, [first, prompt, other], 30)


@pytest.mark.parametrize("name", ["hybrid", "llama"])
def test_offloaded_before_its_first_step(name: str, unpinned: None) -> None:
    """A request that has begun with a prefix and finds no pages takes the states of the prefix along."""
    e, (prompt, more, other) = engine(name, new=30, num_blocks=200, cpu_offload_space=0.01), prompts(150, 60, 9)
    e.add(prompt)
    e.run()
    e.add(other, request_id="other")
    e.step()
    e.add(prompt[:140] + more, request_id="more")
    pool, pages = e.cache.pool, e.cache.cache_allocators["full_attention"].index
    pool.try_to_free_sectors()
    e.scheduler.safety_margin = 0.0
    blocks = pool.get_free_blocks(pages, pool.count_free_blocks(pages))
    sectors = pool.free_sectors[1:]
    del pool.free_sectors[1:]
    e.step()
    assert e.scheduler.waiting_requests["more"].is_cpu_offloaded
    pool.free_sectors.extend(sectors)
    pool.free_blocks(pages, blocks)
    e.scheduler.block_new_requests = False
    results = e.run()
    answers = [results[request].generated_tokens for request in ("more", "other")]
    assert answers == generated(name, [prompt[:140] + more, other], 30)


# ---------------------------------------------------------------- asynchronous steps


class Asynchronous(Reader):
    """Prepares and computes a step before the results of the step before are read, as on a GPU."""

    def __init__(self, *args: Any, **fields: Any):
        super().__init__(*args, **fields)
        p = self.processor
        p.use_async_batching = True
        self.ready = p.inputs_and_outputs
        self.launched: Any = None  # inputs and outputs of the step whose results are not read yet
        other = type(self.ready)(
            cache=self.cache, config=p.config, continuous_batching_config=p.cb_config, device=p.model_device,
            model_dtype=p.model_dtype, logit_processor=p.logit_processor,
        )  # fmt: skip
        self.both = self.ready, other

    def step(self) -> bool:
        p, now, before = self.processor, self.ready, self.launched
        self._use(now)
        more = p.prepare_next_batch()
        if more:
            for i, request in enumerate(before.req_id_to_new_token_position if before else ()):
                place = now.req_id_to_new_token_position.get(request)
                if place is not None:  # a token that was not known yet
                    now.input_ids[place] = before.output_ids[0, i]
            self.read += int(now.get_model_kwargs(False)["cu_seq_lens_q"][-1])
            p._generation_step(self.manager.model)
        if before is not None:
            self._use(before)
            p.update_batch()
            self.launched = None
        if more:
            self.ready, self.launched = self.both[now is self.both[0]], now
        return more or before is not None

    def _use(self, io: Any) -> None:
        self.processor.inputs_and_outputs = self.processor.model_runner.inputs_and_outputs = io


@some
def test_one_system_prompt_in_asynchronous_steps(name: str) -> None:
    """Pages are known as soon as the states, though the engine would hash them later."""
    e = Asynchronous(model(name), page_size=PAGE, max_batch_tokens=512, num_blocks=2000)
    system, *questions = prompts(140, *range(20, 26))
    asked = [system + question for question in questions]
    assert ask(e, asked) == generated(name, asked, 8)
    extra = e.read - (sum(map(len, asked)) - (len(asked) - 1) * 128 + len(asked) * 7)
    assert 0 <= extra <= len(asked), "a step of a request that has ended"
    e.check_empty()


def test_cancelled_in_an_asynchronous_step() -> None:
    """The results of the step that has read it are left out."""
    e = Asynchronous(model("hybrid"), page_size=PAGE, max_batch_tokens=64, num_blocks=2000)
    first, other = prompts(200, 20)
    e.add(first, request_id="first")
    e.add(other, request_id="other")
    for _ in range(2):
        e.step()
    e.manager.cancel_request("first")
    results = e.run()
    assert [*results] == ["other"]
    assert results["other"].generated_tokens == generated("hybrid", [other], 8)[0]
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
