"""transformers' continuous batching of models with KDA layers: the tokens of `generate`, however steps are made up.

`Engine` runs the engine's steps one by one in the test's own thread. fp32: tiny random models have no near ties.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

import kda_layers
from kda_layers import KDAConfig, KDAForCausalLM
from kda_layers.kernels.fused.mechanism import few_tokens
from kda_layers.kernels.kda.contract import Problem
from kda_layers.modeling import seams
from kda_layers.modeling.layer.slots import SlotState
from kda_layers.modeling.models.generation import LoopOnDevice
from kda_layers.states import dequantize_state, quantize_state
from tests.kernels import emulated_layer_step
from tests.kernels.cases import error
from tests.modeling import stock_models
from tests.modeling.models import ALL_KDA, OURS, SWAPPED, build, of_models, stock

try:
    kda_layers.serving.enable_continuous_batching()
    from transformers import CompileConfig, ContinuousBatchingConfig
    from transformers.generation.continuous_batching import cache_allocators, continuous_api, initialization
    from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
    from transformers.generation.continuous_batching.scheduler import FIFOScheduler

    from kda_layers.modeling.serving import engine
    from kda_layers.modeling.serving.state_allocator import StateAllocator
except ImportError as error:
    if (error.name or "").startswith("kda_layers"):  # a file of ours that has moved
        raise
    pytest.skip(str(error), allow_module_level=True)

FP32 = torch.float32
LATENT = [f"swapped {family}" for family in ("kimi_linear", "bailing_hybrid") if f"swapped {family}" in SWAPPED]
GATED = [f"swapped {family}" for family in ("qwen3_next", "qwen3_5", "olmo_hybrid") if f"swapped {family}" in SWAPPED]
SERVED = [*(name for name in OURS if name != "key_bias"), *LATENT, *GATED]
every_served = of_models(SERVED)
# No softmax layers, rotary positions, sliding windows, latent attention, one decay for each head.
some = pytest.mark.parametrize("name", ["kda", "llama", "windows", *LATENT, *GATED])


@functools.cache
def model(name: str) -> PreTrainedModel:
    return build(name, FP32).eval()


def kernel_model(interval: int) -> PreTrainedModel:
    """A model whose decode steps the emulated kernel serves; one with softmax layers, if interval is 2."""
    torch.manual_seed(0)
    fields = dict(hidden_size=32, num_hidden_layers=2, linear_num_heads=1, linear_head_dim=64, head_dim=16)
    options: dict[str, Any] = (
        dict(vocab_size=30, num_attention_heads=2, full_attention_interval=interval, eos_token_id=None) | fields
    )
    return stock_models.cast(KDAForCausalLM(KDAConfig(**options)).eval(), torch.bfloat16)


def prompts(*lengths: int) -> list[list[int]]:
    torch.manual_seed(0)
    return [torch.randint(1, 29, (n,)).tolist() for n in lengths]


@functools.cache
def _generated(name: str, prompt: tuple[int, ...], new: int) -> list[int]:
    ids = torch.tensor([prompt])  # with a mask, or token 0 would be padding
    out = model(name).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return out[0, len(prompt) :].tolist()


def generated(name: str, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Return what `generate` gives for each prompt alone."""
    return [_generated(name, tuple(p), new) for p in prompts]


def generation(new: int) -> GenerationConfig:
    return GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1)


def config(**fields: Any) -> ContinuousBatchingConfig:
    # Without graphs, which transformers captures for a model on the CPU, too, where there is a GPU.
    small: dict[str, Any] = dict(page_size=16, num_blocks=200, max_batch_tokens=64, use_cuda_graph=False)
    return ContinuousBatchingConfig(**(small | fields))


class Engine:
    """The engine without its thread."""

    def __init__(self, m: PreTrainedModel, new: int = 8, returned: int = 1, fast_path: bool = False, **fields: Any):
        self.manager = m.init_continuous_batching(generation(new), config(**fields))
        self.manager.num_return_sequences = returned  # a GenerationConfig takes it for sampling alone
        if fast_path:  # otherwise for flash attention alone
            self.manager.continuous_batching_config.max_blocks_per_request = 4
        self.processor = self.manager._create_batch_processor()
        self.cache, self.scheduler = self.processor.cache, self.processor.scheduler
        self.states = self.cache.cache_allocators["linear_attention"]
        self.results: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []  # keywords of the model's calls

    def add(self, prompt: list[int], **options: Any) -> str:
        return self.manager.add_request(prompt, eos_token_id=-1, **options)

    def step(self) -> bool:
        if not self.processor.prepare_next_batch():
            return False
        self.steps.append(self.processor.inputs_and_outputs.get_model_kwargs(self.processor.model_runner.pad_inputs))
        self.processor._generation_step(self.manager.model)
        self.processor.update_batch()
        return True

    def run(self) -> dict[str, Any]:
        """Run all requests to their end; return the outputs by id."""
        while self.step():
            pass
        queue = self.manager.output_router.output_queue
        while not queue.empty():
            output = queue.get()
            self.results[output.request_id] = output
        return self.results

    def tokens(self) -> list[list[int]]:
        """Run all requests to their end; return their tokens in the order of their ids."""
        return [out.generated_tokens for _, out in sorted(self.run().items())]

    def check_empty(self) -> None:
        """All that was taken from the cache is back, or comes back when it is needed."""
        self.cache.evict_cached_blocks()
        self.cache.pool.try_to_free_sectors()
        assert self.cache.pool.num_free_sectors == self.cache.num_sectors
        assert not any(a.block_table for a in self.cache.cache_allocators.values())


# ---------------------------------------------------------------- the tokens of generate


@every_served
@pytest.mark.parametrize("budget", [7, 256])
def test_generate_batch_gives_the_tokens_of_generate(name: str, budget: int) -> None:
    """Prompts in one step, or in chunks of a few tokens beside decoded ones; more than one chunk of the operator."""
    given = prompts(5, 1, 17, 70, 3, 130)
    out = model(name).generate_batch(given, generation(8), continuous_batching_config=config(max_batch_tokens=budget))
    assert [o.generated_tokens for o in out.values()] == generated(name, given, 8)


@some
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_joins_and_leaves(name: str, attention: str) -> None:
    """Requests come while others decode, and end at different steps; their slots serve the next ones."""
    given, lengths = prompts(4, 30, 1, 9, 64, 2, 21), [9, 3, 12, 1, 7, 5, 10]
    want = [generated(name, [p], n)[0] for p, n in zip(given, lengths, strict=True)]
    m = build(name, FP32)  # the engine changes its attention
    m.set_attn_implementation(attention)
    engine = Engine(m, max_batch_tokens=16)
    for prompt, new in zip(given, lengths, strict=True):
        engine.add(prompt, max_new_tokens=new)
        engine.step()
        engine.step()
    assert engine.tokens() == want
    assert {step["max_length_q"] == 1 for step in engine.steps} == {True, False}  # both ways through the operator
    engine.check_empty()


@some
def test_what_a_slot_held_does_not_matter(name: str) -> None:
    engine, given = Engine(model(name)), prompts(1, 5, 20)
    engine.states._copy_view[2 * engine.states.blocks_per_sector :].fill_(0xFF)  # NaN in any dtype
    for prompt in given:
        engine.add(prompt)
    assert engine.tokens() == generated(name, given, 8)


@some
@pytest.mark.parametrize("length", [1, 2, 40])
def test_forks_copy_the_states(name: str, length: int) -> None:
    """The sequences of one prompt share its prefill; states, unlike pages, cannot be shared."""
    engine, given = Engine(model(name), returned=3), prompts(length, 11)
    for prompt in given:
        engine.add(prompt)
    got = engine.run()
    assert len(got) == 6
    for i, want in enumerate(generated(name, given, 8)):
        assert [o.generated_tokens for n, o in got.items() if n.startswith(f"req_{i}")] == [want] * 3
    engine.check_empty()


@pytest.mark.parametrize("offload", [0.0, 0.01])
@pytest.mark.parametrize("name", ["hybrid", "llama", *LATENT])
def test_preempted_requests_go_on(name: str, offload: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values outgrow the cache: requests are recomputed, or their states and pages wait on the CPU."""
    empty = torch.empty  # pinned memory needs a GPU
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    blocks = 38 if name in LATENT else 60  # pages of latents are smaller, for about as many slots
    engine = Engine(model(name), new=50, page_size=4, num_blocks=blocks, cpu_offload_space=offload)
    offloaded: list[int] = []
    manager = engine.processor.offloading_manager
    copy = manager._offload_to_cpu

    def count(requests: list[Any], tables: Any) -> Any:
        copied = copy(requests, tables)
        assert len(copied) == (len(requests) if offload else 0)
        offloaded.append(len(requests))
        return copied

    monkeypatch.setattr(manager, "_offload_to_cpu", count)
    given = prompts(*[6] * 12)
    for prompt in given:
        engine.add(prompt)
    got = engine.run()
    want = generated(name, given, 50)
    # A recomputed request counts what it had as a part of its prompt.
    for i, prompt in enumerate(given):
        out = got[f"req_{i}"]
        assert (out.prompt_ids + out.generated_tokens)[len(prompt) :][-50:] == want[i]
    assert sum(offloaded) > 0
    engine.check_empty()


@some
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """States are fp32 beside bf16 states of the convolution, or fp64. In bf16, near ties may differ from `generate`."""
    m, given = build(name, dtype), prompts(5, 1, 70)
    want = [m.generate(torch.tensor([p]), max_new_tokens=8, do_sample=False)[0, len(p) :].tolist() for p in given]
    engine = Engine(m)
    for prompt in given:
        engine.add(prompt)
    got = engine.tokens()
    conv, state = engine.states.pools[engine.states.layer_indices[0]]
    assert (conv.dtype, state.dtype) == (dtype, torch.float64 if dtype == torch.float64 else FP32)
    if dtype == torch.float64:
        assert got == want
    else:
        assert [tokens[0] for tokens in got] == [tokens[0] for tokens in want]


# ---------------------------------------------------------------- padded steps, as for CUDA graphs


@some
def test_padded_steps(name: str) -> None:
    """Fake sequences of length 0 and tokens of no sequence neither read nor write a slot.

    The first step has no such token, only fake sequences after the last one.
    """
    engine, given = Engine(model(name), q_padding_interval_size=16, max_requests_per_batch=12), prompts(5, 1, 40, 2)
    engine.processor.model_runner.pad_inputs = True
    for prompt in given:
        engine.add(prompt)
    assert engine.tokens() == generated(name, given, 8)
    last = engine.steps[-1]
    assert last["input_ids"].shape[1] == 16
    assert last["write_index"][engine.states.index][4:].eq(-1).all()


@pytest.mark.parametrize("name", ALL_KDA)
def test_steps_of_block_tables(name: str) -> None:
    """The engine's path for decoded tokens: slots come from block tables, rows are padded to powers of two."""
    engine, given = Engine(model(name), fast_path=True), prompts(5, 1, 37)
    engine.processor.model_runner.pad_inputs = True
    for prompt in given:
        engine.add(prompt)
    assert engine.tokens() == generated(name, given, 8)
    tables = [step["block_table"] for step in engine.steps if step["block_table"] is not None]
    assert len(tables) >= 7
    assert all(table.shape[1] == 4 for table in tables)


@pytest.mark.parametrize("name", ALL_KDA)
def test_tokens_after_the_warmup(name: str) -> None:
    """Before any request the engine runs its largest steps, which a GPU captures, on requests that do not exist."""
    engine, given = Engine(model(name), fast_path=True, max_requests_per_batch=4), prompts(5, 1, 37)
    engine.processor.model_runner.pad_inputs = True
    engine.processor.warmup(model(name))
    engine.check_empty()
    for prompt in given:
        engine.add(prompt)
    assert engine.tokens() == generated(name, given, 8)


def resolved(name: str, monkeypatch: pytest.MonkeyPatch, device: str = "cuda", **given: Any) -> dict[str, Any]:
    """Return the engine's options for a model on a device, with graphs as a GPU has them."""
    m, asked = model(name), ContinuousBatchingConfig(**given)
    on_device = SimpleNamespace(device=torch.device(device), modules=m.modules)
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "cuda")
    token = engine._model.set(on_device)
    try:
        found = continuous_api.resolve_continuous_batching_config(
            config=m.config,
            cb_config=asked,
            workload_hints=None,
            has_logit_processors=False,
            device=torch.device("cpu"),
        )
    finally:
        engine._model.reset(token)
    assert asked == ContinuousBatchingConfig(**given), "the caller's options were changed"
    names = "use_cuda_graph", "use_async_batching", "max_blocks_per_request", "decode_compile_config"
    return {n: getattr(found, n) for n in names} | {"varlen": found.varlen_compile_config is not None}


STOCK = dict(
    use_cuda_graph=(False, False), use_async_batching=False, max_blocks_per_request=0, decode_compile_config=None,
    varlen=False,
)  # fmt: skip
GRAPHS = STOCK | dict(use_cuda_graph=(True, True), use_async_batching=True, max_blocks_per_request=1)


@pytest.mark.parametrize(
    ("name", "given", "chosen"),
    [
        ("kda", {}, GRAPHS),
        ("kda", dict(max_blocks_per_request=8), GRAPHS),
        ("kda", dict(max_blocks_per_request=0), GRAPHS | dict(max_blocks_per_request=0)),
        ("kda", dict(cpu_offload_space=0.1), GRAPHS | dict(use_async_batching=False)),
        ("kda", dict(cpu_offload_space=None), GRAPHS | dict(use_async_batching=False)),
        ("kda", dict(use_async_batching=False), GRAPHS | dict(use_async_batching=False)),
        ("kda", dict(use_cuda_graph=False), STOCK | dict(max_blocks_per_request=1)),
        ("kda", dict(varlen_compile_config=CompileConfig(mode="default")), STOCK | dict(varlen=True)),
        ("kda", dict(decode_compile_config=CompileConfig(mode="default")), STOCK),
        ("kda", dict(default_compile_level=1), STOCK | dict(varlen=True)),
        ("hybrid", {}, STOCK),
        ("llama", {}, STOCK),
    ],
)
def test_what_is_left_open_is_chosen_for_kda_layers_alone(
    name: str, given: dict[str, Any], chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_reads_nothing", lambda module: True)
    assert resolved(name, monkeypatch, **given) == chosen
    assert resolved(name, monkeypatch, "cpu", **given) == resolved("llama", monkeypatch, **given)


def test_plain_pytorch_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads slots on the host; which backend serves a layer depends on its dtype and widths."""
    assert resolved("kda", monkeypatch) == STOCK
    asked = []

    def select(problem: Problem, backend: str | None) -> Any:
        asked.append(problem)
        return SimpleNamespace(name="eager" if problem.decode else "sm90")

    monkeypatch.setattr(engine.KDA_BACKENDS, "select", select)
    assert resolved("kda", monkeypatch) == STOCK
    assert [p.decode for p in asked] == [False, True]
    assert (asked[0].K, asked[0].V, asked[0].has_state, asked[0].packed) == (8, 8, True, True)
    monkeypatch.setattr(engine.KDA_BACKENDS, "select", lambda *_: SimpleNamespace(name="sm90"))
    assert resolved("kda", monkeypatch) == GRAPHS


def test_steps_of_graphs_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the engine warms up and captures a step, a few tokens are no reason against a fused form."""
    model_runner = importlib.import_module("transformers.generation.continuous_batching.model_runner")
    monkeypatch.setattr(model_runner, "stream_context", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(model_runner, "memory_pool_context", lambda pool: contextlib.nullcontext())
    monkeypatch.setattr(model_runner, "create_accelerator_graph", lambda: None)
    monkeypatch.setattr(model_runner, "accelerator_graph_capture_context", lambda *_, **__: contextlib.nullcontext())
    runner = SimpleNamespace(mem_pool=None, graph_pool_id=None, inputs_and_outputs=mock.Mock())
    few: list[bool] = []
    model_runner.ModelRunner._capture_graph(runner, lambda x: few.append(few_tokens(x)), None, torch.zeros(1, 60, 8))
    assert few == [False, False]  # the warm-up and the capture
    assert few_tokens(torch.zeros(1, 60, 8))


def test_offloading_excludes_asynchronous_steps() -> None:
    """None is a pool of the engine's choice, not none."""
    manager = model("kda").init_continuous_batching(
        generation(8), config(use_async_batching=True, cpu_offload_space=None)
    )
    with pytest.raises(ValueError, match="cpu_offload_space must be 0 with use_async_batching=True, got None"):
        manager._create_batch_processor()


def test_a_step_of_one_token_prompts_on_block_tables() -> None:
    engine, given = Engine(model("kda"), fast_path=True), prompts(1, 1, 1)
    engine.states._copy_view[2 * engine.states.blocks_per_sector :].fill_(0xFF)
    for prompt in given:
        engine.add(prompt)
    assert engine.tokens() == generated("kda", given, 8)
    assert engine.steps[0]["block_table"] is not None


@pytest.mark.parametrize("tables", [False, True])
def test_slots_are_not_read_by_the_host(tables: bool) -> None:
    """So a step can be captured in a CUDA graph: tensors of the meta device have no values."""
    states = Engine(model("grouped")).states
    pools = {i: (conv.to("meta"), state.to("meta")) for i, (conv, state) in states.pools.items()}
    states.pools = pools
    meta = functools.partial(torch.zeros, dtype=torch.int32, device="meta")
    write_index, table = [meta(8).long()] * 2, meta(2, 8, 4) if tables else None
    slots = states.step(meta(1, 8), meta(9), 1 if tables else 8, write_index, table)
    assert slots.one_each is tables
    state = SlotState(slots, states.layer_indices[0])
    state.write_conv(state.conv, meta(1, 8))


def test_empty_sequences_have_no_slot() -> None:
    """Wherever they are: two sequences must not write to one slot."""
    states = Engine(model("kda")).states
    slots = states.step(
        torch.tensor([[0, 1, 7, 0]]), torch.tensor([0, 0, 2, 2, 3]), 2, [torch.tensor([5, 5, 6, -1])], None
    )
    assert slots.cu_seqlens.tolist() == [0, 0, 2, 2, 3, 4]
    assert slots.index.tolist() == [-1, 5, -1, 6, -1]
    assert slots.read.tolist() == [0, 5, 0, 6, 0]
    assert slots.written.tolist() == [states.spare, 5, states.spare, 6, states.spare]


# ---------------------------------------------------------------- bounds


def pages_for(m: PreTrainedModel, sectors: int, page_size: int = 16) -> int:
    """The `num_blocks` by which the cache has this many sectors."""
    cache = Engine(m, page_size=page_size, num_blocks=1 << 10).cache
    return max(1, (1 << 10) * sectors // cache.num_sectors)


@pytest.mark.parametrize("name", ["kda", "llama", *LATENT])
def test_requests_wait_for_a_slot(name: str) -> None:
    engine = Engine(model(name), num_blocks=pages_for(model(name), 4))
    given, most = prompts(*[5, 9, 3] * 6), 0
    for prompt in given:
        engine.add(prompt)
    while engine.step():
        most = max(most, len(engine.states.block_table))
        assert most <= engine.states.num_blocks == engine.cache.num_sectors
    got = engine.run()
    assert 1 < most < len(given)
    assert [got[f"req_{i}"].generated_tokens for i in range(len(given))] == generated(name, given, 8)
    engine.check_empty()


@pytest.mark.parametrize("length", [1, 40])
def test_a_fork_has_a_name_of_its_own(length: int) -> None:
    """A request whose forks would have the names of others in progress fails, and these go on."""
    engine, (prompt,) = Engine(model("kda"), returned=2), prompts(length)
    engine.add(prompt, request_id="x__child#0", max_new_tokens=8)
    engine.step()
    engine.add(prompt, request_id="x")
    results = engine.run()
    assert "request_id must not be that of a request in progress, got 'x__child#0'" in results["x"].error
    assert results["x__child#0"].generated_tokens == generated("kda", [prompt], 8)[0]
    engine.check_empty()


@pytest.mark.parametrize("kept", [False, True])
def test_a_cache_is_freed(kept: bool) -> None:
    """At once, if the engine is not kept; a kept one leaves Python's collector as it was."""
    m, frozen = build("kda", FP32).eval(), gc.get_freeze_count()
    made: list[Any] = []
    register = StateAllocator.register_cache_tensor

    def registered(self: Any, size: int, bytes_: int, tensor: Tensor, pool: Any) -> None:
        made.append(weakref.ref(tensor))
        register(self, size, bytes_, tensor, pool)

    with mock.patch.object(StateAllocator, "register_cache_tensor", registered):
        m.generate_batch(prompts(5), generation(2), continuous_batching_config=config(), persistent_manager=kept)
    assert [ref() is not None for ref in made] == [kept]
    assert gc.get_freeze_count() == frozen


@pytest.mark.emulated
def test_a_token_beside_an_empty_sequence_is_no_decode_step() -> None:
    """A request of one token that waits for its forks has none in the step."""
    m = kernel_model(0)
    with emulated_layer_step.first_choice():
        states = Engine(m).states
        one = states.step(torch.tensor([[0]]), torch.tensor([0, 0, 1]), 1, [torch.tensor([5])], None)
        assert not one.one_each
        layer, x = m.model.layers[0].self_attn, torch.randn(1, 1, 32).bfloat16()
        alone = states.step(torch.tensor([[0]]), torch.tensor([0, 1]), 1, [torch.tensor([6])], None)
        with torch.no_grad():
            got, want = (layer(x, cache=s, cu_seqlens=s.cu_seqlens)[0] for s in (one, alone))
        assert error(got, want) <= 2**-8  # one rounding to bf16; 0.7 of it measured


def test_a_cache_without_room_for_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match="raise num_blocks \\(now 1\\) or max_memory_percent"):
        Engine(model("llama"), page_size=4, num_blocks=1)


def test_what_would_take_a_token_back_is_refused() -> None:
    """The engine offloads a request that is in flight as of one token earlier."""
    manager = model("kda").init_continuous_batching(generation(8), config(cpu_offload_space=0.1))
    manager.continuous_batching_config.use_async_batching = True
    with pytest.raises(ValueError, match=r"cpu_offload_space must be 0 with use_async_batching=True, got 0\.1"):
        manager._create_batch_processor()


def test_a_request_that_is_too_long_fails_alone() -> None:
    engine = Engine(model("llama"), num_blocks=pages_for(model("llama"), 4))
    room = (engine.cache.num_sectors - 1) * engine.cache.cache_allocators["full_attention"].blocks_per_sector * 16
    given = prompts(5, room - 4, room - 8, 7)
    for prompt in given:
        engine.add(prompt)
    got = engine.run()
    assert "shorten it (max_tokens), or raise num_blocks" in got["req_1"].error
    want = generated("llama", given, 8)
    assert [got[f"req_{i}"].generated_tokens for i in (0, 2, 3)] == [want[i] for i in (0, 2, 3)]
    engine.check_empty()


def test_a_model_of_kda_layers_alone_takes_any_length() -> None:
    engine = Engine(model("kda"), num_blocks=pages_for(model("kda"), 2))
    given = prompts(2000)
    engine.add(given[0])
    assert engine.cache.max_tokens_read < 2000
    assert engine.tokens() == generated("kda", given, 8)


def test_a_cancelled_request_returns_its_slot() -> None:
    engine, given = Engine(model("llama")), prompts(5, 6)
    gone, kept = engine.add(given[0], max_new_tokens=1000), engine.add(given[1])
    engine.step()
    engine.step()
    assert gone in engine.states.block_table
    engine.manager.cancel_request(gone)
    engine.step()
    assert gone not in engine.states.block_table
    assert engine.run()[kept].generated_tokens == generated("llama", given, 8)[1]
    engine.check_empty()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "requests"), [("kda", 2_500), ("llama", 1_000)])
def test_slots_and_memory_are_constant(name: str, requests: int) -> None:
    """After each group of requests all slots and pages are free, and as many tensors are alive as after the first."""
    engine = Engine(model(name), new=2, num_blocks=pages_for(model(name), 64), max_batch_tokens=256)
    given = prompts(1, 2, 3, 5)
    want = generated(name, given, 2)
    alive: set[int] = set()
    for _ in range(requests // 500):
        numbers = {engine.add(given[i % 4]): i % 4 for i in range(500)}
        for request, out in engine.run().items():
            assert out.error is None
            assert out.generated_tokens == want[numbers.pop(request)]
        assert not numbers
        engine.results.clear()
        engine.steps.clear()
        engine.check_empty()
        gc.collect()
        alive.add(sum(type(t) is Tensor for t in gc.get_objects()))
    assert len(alive) == 1


# ---------------------------------------------------------------- requests that cannot be served


@pytest.mark.parametrize("name", ["kda", "hybrid"])
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt must have at least one token, got none"),
        ([1, 29], "token ids must be from 0 to 28, the model's vocabulary, got 29"),
        ([1, -1], "token ids must be from 0 to 28, the model's vocabulary, got -1"),
        ([[1, 2]], "the prompt must be a list of token ids"),
        ("ab", "the prompt must be a list of token ids"),
    ],
)
def test_a_prompt_that_cannot_be_served_fails_alone(name: str, prompt: Any, message: str) -> None:
    given = prompts(5, 9)
    out = list(model(name).generate_batch([given[0], prompt, given[1]], generation(8), config()).values())
    assert message in out[1].error
    assert out[1].generated_tokens == []
    assert [out[i].generated_tokens for i in (0, 2)] == generated(name, given, 8)


def test_a_request_id_in_use_fails_alone() -> None:
    engine, given = Engine(model("llama")), prompts(5, 6)
    engine.add(given[0], request_id="same")
    engine.step()
    engine.add(given[1], request_id="same")
    engine.step()
    first = engine.manager.output_router.output_queue.get_nowait()
    assert first.error == "request_id must not be that of a request in progress, got 'same'"
    assert engine.run()["same"].generated_tokens == generated("llama", given[:1], 8)[0]
    engine.check_empty()


def test_a_request_of_no_limit_ends_with_the_cache() -> None:
    """It would fail the others when it finds no page."""
    engine = Engine(model("llama"), num_blocks=pages_for(model("llama"), 4))
    engine.manager.generation_config.max_new_tokens = None
    given = prompts(5, 7)
    engine.add(given[0])
    engine.add(given[1], max_new_tokens=8)
    got = engine.run()
    room = (engine.cache.num_sectors - 1) * engine.cache.cache_allocators["full_attention"].blocks_per_sector * 16
    assert len(given[0]) + len(got["req_0"].generated_tokens) == room
    assert got["req_0"].error is None
    assert got["req_1"].generated_tokens == generated("llama", given[1:], 8)[0]
    engine.check_empty()


# ---------------------------------------------------------------- order of prompts


@some
def test_a_short_prompt_passes_long_ones(name: str) -> None:
    """It waits for two steps at most, and the oldest prompt has every other step."""
    engine, given = Engine(model(name), max_batch_tokens=16, num_blocks=400), prompts(400, 300, 6)
    oldest = engine.add(given[0])
    engine.add(given[1])
    engine.step()
    short = engine.add(given[2])
    for _ in range(2):
        engine.step()
    assert engine.scheduler.active_requests[short].generated_len() > 0
    read = engine.scheduler.active_requests[oldest].position_offset
    for _ in range(10):
        engine.step()
    assert engine.scheduler.active_requests[oldest].position_offset >= read + 5 * (16 - 2)
    assert engine.tokens() == generated(name, given, 8)
    engine.check_empty()


def test_stock_models_keep_the_order_of_arrival() -> None:
    m = stock("llama", FP32)
    assert (
        type(m.init_continuous_batching(generation(8), config())._create_batch_processor().scheduler) is FIFOScheduler
    )


# ---------------------------------------------------------------- sizes on a CPU


def sizes(name: str, **given: Any) -> tuple[int, int, int]:
    """Tokens of a step, tokens of all layers that the cache has room for, bytes of the tensors of a step."""
    manager = model(name).init_continuous_batching(generation(8), ContinuousBatchingConfig(**given))
    processor = manager._create_batch_processor()
    masks = processor.inputs_and_outputs.attention_mask or {}
    return processor.cache.max_batch_tokens, processor.cache.num_blocks * 256, sum(m.nbytes for m in masks.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kda", "hybrid", "llama"])
def test_sizes_on_a_cpu(name: str) -> None:
    step, tokens, masks = sizes(name)
    assert step == 512
    assert 32_768 <= tokens < 40_000
    assert masks < 300 * 2**20
    assert sizes(name, max_batch_tokens=64, num_blocks=8)[0] == 64
    assert sizes(name, num_blocks=8)[1] < 32_768


def test_a_cpu_without_the_memory_for_them(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The engine then takes what there is; what was asked for raises."""
    monkeypatch.setattr(PagedAttentionMemoryHandler, "get_available_memory", lambda self: 40 * 2**20)
    assert 0 < sizes("hybrid")[1] < 32_768
    assert "no memory for the default num_blocks=128" in caplog.text
    with pytest.raises(MemoryError):
        sizes("hybrid", num_blocks=300)


# ---------------------------------------------------------------- refusals


def test_stock_models_are_served_as_before() -> None:
    m, given = stock("llama", FP32).eval(), prompts(5, 17)
    want = [m.generate(torch.tensor([p]), max_new_tokens=8, do_sample=False)[0, len(p) :].tolist() for p in given]
    out = m.generate_batch(given, generation(8), continuous_batching_config=config())
    assert [o.generated_tokens for o in out.values()] == want


def test_other_linear_attention_is_refused() -> None:
    fields = dict(
        vocab_size=29, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, num_local_experts=2, layer_types=["linear_attention"] * 2,
    )  # fmt: skip
    m = transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**fields))
    with pytest.raises(ValueError, match="its linear-attention layers are not those of kda_layers"):
        m.generate_batch(prompts(3), generation(2))


@pytest.mark.parametrize("name", GATED)
def test_stock_gated_delta_nets_are_refused(name: str) -> None:
    m = stock_models.build(name.removeprefix("swapped "))
    with pytest.raises(ValueError, match=r"got stock layers at .*: call kda_layers.swap_attention\(model\) first"):
        m.generate_batch(prompts(3), generation(2))
    kda_layers.swap_attention(m, [0])
    with pytest.raises(ValueError, match=r"must be swapped for .* got stock layers at model\.layers\.2\.linear_attn,"):
        m.generate_batch(prompts(3), generation(2))


def test_biased_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="does not serve attention_bias='key'"):
        model("key_bias").generate_batch(prompts(3), generation(2))


def test_a_plain_cache_is_no_engine() -> None:
    """The engine hands its cache by the name that any cache has since transformers 5.24."""
    m = model("kda")
    cache = transformers.DynamicCache(config=m.config)
    m(torch.tensor([[1, 2]]), cache=cache, write_index=None)
    assert cache.get_seq_length() == 2


def test_it_is_off_until_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoopOnDevice, "batches_continuously", False)
    with pytest.raises(RuntimeError, match=r"needs kda_layers.serving.enable_continuous_batching\(\)"):
        model("kda").generate_batch(prompts(3), generation(2))


def test_enabling_twice_wraps_once() -> None:
    module = importlib.import_module("transformers.generation.continuous_batching.cache")
    init = module.PagedAttentionCache.__init__
    kda_layers.serving.enable_continuous_batching()
    assert module.PagedAttentionCache.__init__ is init


def test_another_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is missing, an allocator that transformers has itself: nothing is wrapped then."""
    module = importlib.import_module("transformers.generation.continuous_batching.cache")
    monkeypatch.setattr(LoopOnDevice, "batches_continuously", False)
    with monkeypatch.context() as patch:
        patch.setattr(seams, "installed", lambda name: (5, 18))
        with pytest.raises(ImportError, match="takes full and sliding attention alone"):
            kda_layers.serving.enable_continuous_batching()
    with pytest.raises(ImportError, match="has an allocator of its own for linear_attention"):
        kda_layers.serving.enable_continuous_batching()
    monkeypatch.setattr(module, "ATTN_TYPE_TO_ALLOCATOR", {})
    monkeypatch.delattr("transformers.generation.continuous_batching.scheduler.Scheduler.add_waiting_request")
    init = module.PagedAttentionCache.__init__
    with pytest.raises(ImportError, match=r"Scheduler.add_waiting_request, seen in transformers 5.19 to .*lacks"):
        kda_layers.serving.enable_continuous_batching()
    assert module.PagedAttentionCache.__init__ is init
    assert not module.ATTN_TYPE_TO_ALLOCATOR


def test_slots_need_their_offsets() -> None:
    engine = Engine(model("kda"))
    engine.add(prompts(5)[0])
    engine.step()
    call = engine.steps[0]
    slots = engine.states.step(**call)
    layer, x = model("kda").model.layers[0].self_attn, torch.randn(1, 5, 32)
    with torch.no_grad(), pytest.raises(ValueError, match="pass their cu_seqlens"):
        layer(x, past_key_values=slots)


def test_a_states_views_are_apart() -> None:
    """Writing to any layer's states of any slot changes no other view."""
    allocator = Engine(model("grouped")).states
    views: list[Tensor] = [view for pair in allocator.pools.values() for view in pair]
    assert isinstance(allocator, cache_allocators.CacheAllocator)
    for view in views:
        view.fill_(0)
    for i, view in enumerate(views, 1):
        view.fill_(i)
    for i, view in enumerate(views, 1):
        assert (view == i).all()


# ---------------------------------------------------------------- states in bf16 and int8

NARROW = {"bfloat16": 2, "int8": 1}  # bytes of an element
narrow = pytest.mark.parametrize("dtype", NARROW)


def with_states_in(dtype: str, name: str, **fields: Any) -> PreTrainedModel:
    m = build(name, FP32, **fields).eval()
    m.config.linear_state_dtype = dtype
    return m


@narrow
@pytest.mark.parametrize("name", ["kda", "llama"])
def test_narrow_states_in_slots(name: str, dtype: str) -> None:
    """Nothing that the slots held before matters, NaN as scales neither; in bf16 tokens are those of `generate`.

    Sums of other batches have other last bits, by which int8 states are rounded to other numbers at random.
    """
    m, given, got = with_states_in(dtype, name), prompts(5, 1, 17, 40), []
    for byte in (0, 0xFF):
        engine = Engine(m, new=12)
        engine.states._copy_view[2 * engine.states.blocks_per_sector :].fill_(byte)
        for prompt in given:
            engine.add(prompt)
        got.append(engine.tokens())
        (_, state, *scales) = next(iter(engine.states.pools.values()))
        assert (state.element_size(), len(scales)) == (NARROW[dtype], int(dtype == "int8"))
        engine.check_empty()
    assert got[0] == got[1]
    if dtype == "bfloat16":
        ids = [torch.tensor([prompt]) for prompt in given]
        options: dict[str, Any] = dict(max_new_tokens=12, do_sample=False)
        out = [m.generate(t, attention_mask=torch.ones_like(t), **options)[0, t.shape[1] :].tolist() for t in ids]
        assert got[0] == out


@narrow
def test_narrow_states_in_steps_of_every_kind(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts beside decoded tokens: each call is that of the same states in fp32, which are then rounded."""
    calls, attend = [], SlotState.attend

    def compared(self: Any, inputs: Any, options: Any, recompute: Any) -> Tensor:
        slots, found = self.slots, SlotState.__new__(SlotState)
        wide = self.pool.float() if self.scales is None else dequantize_state(self.pool, self.scales)
        found.slots, found.pool, found.scales = slots, wide, None
        want = attend(found, inputs, options, recompute)
        o = attend(self, inputs, options, recompute)
        assert torch.equal(o, want)
        live = slots.index[slots.index >= 0]
        kept = wide[live].bfloat16() if self.scales is None else quantize_state(wide[live])[0]
        assert torch.equal(self.pool[live], kept)
        if self.scales is not None:
            assert torch.equal(self.scales[live], quantize_state(wide[live])[1])
        calls.append(slots.one_each)
        return o

    monkeypatch.setattr(SlotState, "attend", compared)
    m, given = with_states_in(dtype, "hybrid"), prompts(5, 1, 17, 70, 3)
    out = m.generate_batch(given, generation(8), continuous_batching_config=config(max_batch_tokens=7))
    assert [len(o.generated_tokens) for o in out.values()] == [8] * 5
    assert all(o.error is None for o in out.values())
    assert {*calls} == {True, False}


def test_narrow_states_take_less_memory() -> None:
    """Slots are smaller: with a little for alignment, by the bytes of states."""
    sizes: dict[str, Any] = dict(linear_head_dim=32, linear_num_heads=4)
    states = {d: Engine(with_states_in(d, "kda", **sizes)).states for d in ("float32", *NARROW)}
    conv, elements, scales = 4 * 3 * 4 * 32 * 4, 4 * 32 * 32, 4 * 4 * 32  # multiples of an alignment
    want = {"float32": conv + 4 * elements, "bfloat16": conv + 2 * elements, "int8": conv + elements + scales}
    assert {d: s.bytes_per_block for d, s in states.items()} == {d: 2 * n for d, n in want.items()}  # layers
    float32, bfloat16, int8 = (s.num_blocks for s in states.values())
    assert float32 < bfloat16 < int8


@narrow
def test_narrow_states_of_fp64_are_refused(dtype: str) -> None:
    m = with_states_in(dtype, "kda").double()
    with pytest.raises(ValueError, match=f"^state_dtype must be 'float32' for inputs in float64.*{dtype}"):
        m.init_continuous_batching(generation(2), config())


# ---------------------------------------------------------------- decode steps by one kernel


@pytest.mark.emulated
@pytest.mark.parametrize("interval", [0, 2])
def test_decoded_by_the_layers_one_kernel(interval: int) -> None:
    """In the slots of the requests: prompts are read by operators, the tokens after them by one launch a layer."""
    m = kernel_model(interval)
    given = prompts(5, 70, 1)
    with emulated_layer_step.first_choice() as kernel:
        engine = Engine(m, new=4, max_batch_tokens=128)
        for prompt in given:
            engine.add(prompt)
        got = engine.tokens()
        assert [step["max_length_q"] for step in engine.steps] == [70, 1, 1, 1]
        layers = 1 if interval else 2
        assert [x.q.shape[:2] for x in kernel.calls] == [(3, 1)] * 3 * layers
        assert all(x.state_indices is not None for x in kernel.calls)
        for prompt, tokens in zip(given, got, strict=True):
            ids = torch.tensor([prompt])
            out = m.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
            assert out[0, len(prompt) :].tolist() == tokens
    engine.check_empty()


@pytest.mark.emulated
@pytest.mark.parametrize(("dtype", "by_kernel"), [("bfloat16", True), ("int8", False)])
def test_narrow_states_by_the_layers_one_kernel(dtype: str, by_kernel: bool) -> None:
    """It takes bf16 states, in caches and slots; int8 states are updated by `kda_step`."""
    m = kernel_model(0)
    m.config.linear_state_dtype, ids = dtype, torch.tensor([prompts(5)[0]])
    with emulated_layer_step.first_choice() as kernel:
        engine = Engine(m, new=4)
        engine.add(ids[0].tolist())
        (tokens,) = engine.tokens()
        out = m.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        assert len(kernel.calls) == 12 * by_kernel  # steps, layers, twice
        assert {x.state.dtype for x in kernel.calls} == ({torch.bfloat16} if by_kernel else set())
    assert len(tokens) == 4
    if by_kernel:
        assert out[0, 5:].tolist() == tokens
