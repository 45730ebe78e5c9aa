"""Tests that need a GPU: CUDA graphs, compiled kernels, and memory that must not grow."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, StaticCache

from kda_layers import (
    KDAConfig,
    KDAForCausalLM,
    KimiDeltaAttention,
    explain,
    kda,
    kda_step,
    swap_attention,
    use_backend,
)
from kda_layers.kernels.kda.contract import KDA, Inputs, default_problem, problem_of
from kda_layers.kernels.kda.cuda.layer_step.contract import Problem as StepProblem
from kda_layers.kernels.kda.cuda.layer_step.op import RepeatedLayerStep, has_kernel
from tests.kernels.cases import BF16, Case, budget, call, error, make_inputs, on_installed_backends, options, serve
from tests.kernels.test_decode import serve_step
from tests.modeling import stock_models

pytestmark = pytest.mark.gpu

SIZES = dict(
    vocab_size=97, hidden_size=256, num_hidden_layers=4, linear_num_heads=2, linear_head_dim=128,
    num_attention_heads=4, intermediate_size=512,
)  # fmt: skip
every_kind = pytest.mark.parametrize("interval", [0, 2], ids=["kda", "hybrid"])


def build(interval: int, dtype: torch.dtype = BF16, **more: Any) -> Any:
    torch.manual_seed(0)
    config = KDAConfig(**SIZES | more, full_attention_interval=interval, bos_token_id=None, eos_token_id=None)
    return KDAForCausalLM(config).to("cuda", dtype).eval()


def captured(f: Any) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph


# ---------------------------------------------------------------- the operator in CUDA graphs


@on_installed_backends
def test_decode_step_in_a_graph(backend: str, required_backends: frozenset[str]) -> None:
    """Replays advance the state in place, as calls do."""
    x = make_inputs(Case(T=5, B=3, state=True), "cuda")
    serve_step(backend, x, required_backends)
    tokens = [x._replace(**{n: getattr(x, n)[:, t : t + 1] for n in ("q", "k", "v", "g", "beta")}) for t in range(5)]
    buffers = [t.clone() for t in tokens[0][:5]]
    state, out = x.initial_state.clone(), torch.empty_like(x.v[:, :1])

    def step() -> None:
        out.copy_(kda_step(*buffers, state, **options(x), backend=backend))

    graph = captured(step)
    state.copy_(x.initial_state)
    want_state = x.initial_state.clone()
    for token in tokens:
        for buffer, t in zip(buffers, token[:5], strict=True):
            buffer.copy_(t)
        graph.replay()
        want = kda_step(*token[:5], want_state, **options(x), backend=backend)
        assert torch.equal(out, want)
        assert torch.equal(state, want_state)


def test_slots_and_drafts_in_a_graph() -> None:
    """Slots and numbers of accepted tokens are read at replay, not at capture."""
    x = make_inputs(Case(T=4, B=3, state=True), "cuda")
    serve_step("fla", x, frozenset())
    pool = torch.randn(16, *x.initial_state.shape[1:], device="cuda")
    slots = torch.arange(12, device="cuda").view(3, 4)
    accepted = torch.tensor([1, 2, 4], device="cuda", dtype=torch.int32)
    extra = dict(state_indices=slots, num_accepted=accepted)
    out, work = torch.empty_like(x.v), pool.clone()

    def step() -> None:
        out.copy_(kda_step(*x[:5], work, **options(x), **extra, backend="fla"))

    graph = captured(step)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        slots.copy_(torch.randperm(16, generator=generator)[:12].view(3, 4))
        accepted.copy_(torch.randint(1, 5, (3,), generator=generator))
        work.copy_(pool)
        graph.replay()
        want_pool = pool.clone()
        want = kda_step(*x[:5], want_pool, **options(x), **extra, backend="fla")
        assert torch.equal(out, want)
        assert torch.equal(work, want_pool)
        untouched = [n for n in range(16) if n not in slots.flatten().tolist()]
        assert torch.equal(work[untouched], pool[untouched])


@pytest.mark.parametrize("lengths", [None, (70, 0, 65, 3)], ids=["fixed", "packed"])
def test_whole_sequences_in_a_graph(lengths: tuple[int, ...] | None) -> None:
    """Packed lengths too are read at replay: nothing waits for the host."""
    x = make_inputs(Case(T=138, lengths=lengths, state=True), "cuda")
    serve("fla", problem_of(x), frozenset())
    outs: list[Tensor] = []

    def run() -> None:
        outs[:] = [t for t in call(x, "fla") if t is not None]

    with torch.no_grad():
        graph = captured(run)
        others = [(138, 0, 0, 0), (1, 64, 64, 9)] if lengths else [None]
        for other in others:
            if other:
                x.cu_seqlens.copy_(torch.tensor((0, *other)).cumsum(0))
            x.v.normal_()
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(outs, call(x, "fla"), strict=True))


# ---------------------------------------------------------------- torch.compile


@pytest.mark.compiles
@on_installed_backends
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_compiled_layer(train: bool, backend: str, required_backends: frozenset[str]) -> None:
    """One graph for every length; as close to fp64 as the layer without torch.compile, up to a rounding.

    B * T is a multiple of 8, as Inductor pads matrices that are not, which takes it another graph. (The backend is
    entered twice for the first length: dynamic=True makes a symbol of the norm's epsilon and then thinks better of it.)
    """
    serve(backend, replace(default_problem("cuda"), needs_grad=train), required_backends)
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = KimiDeltaAttention(256, 2, 128, backend=backend).to("cuda", BF16)
    exact = KimiDeltaAttention(256, 2, 128).double()
    exact.load_state_dict({n: p.cpu().double() for n, p in layer.state_dict().items()})
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for T in (200, 332, 640):
        x, d_out = torch.randn(2, T, 256).to(BF16), torch.randn(2, T, 256).to(BF16)
        results = []
        for f, module, cast in ((exact, exact, dict(dtype=torch.float64)), (layer, layer, dict(device="cuda")),
                                (compiled, layer, dict(device="cuda"))):  # fmt: skip
            with torch.set_grad_enabled(train):
                y = f(x.to(**cast))
                results.append([y.detach()])
                if train:
                    results[-1] += torch.autograd.grad(y, list(module.parameters()), d_out.to(y))
        errors = [[error(a, b) for a, b in zip(r, results[0], strict=True)] for r in results[1:]]
        for plain, compiled_error in zip(*errors, strict=True):
            assert compiled_error <= 2 * (plain + 2**-8)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1]


@pytest.mark.compiles
@every_kind
def test_compiled_training_of_a_model(interval: int) -> None:
    """Loss and gradients under bf16 autocast, compiled whole, against the same without torch.compile."""
    torch._dynamo.reset()
    model = build(interval, torch.float32).train()
    compiled = torch.compile(model, fullgraph=True)
    tokens = torch.randint(0, 97, (2, 300), device="cuda")
    results = []
    for f in (model, compiled):
        model.zero_grad()
        with torch.autocast("cuda", BF16):
            loss = f(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        results.append((loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    assert error(results[1][0], results[0][0]) < 2**-8
    assert error(results[1][1], results[0][1]) < 2**-4


@pytest.mark.compiles
@every_kind
def test_generation_compiled_into_cuda_graphs(interval: int) -> None:
    """A static cache and mode 'reduce-overhead': no graph break, no second graph, the tokens of plain generation."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(interval, torch.float32)
    compile_config = CompileConfig(fullgraph=True, dynamic=False, mode="reduce-overhead")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (1, 2):
            tokens = torch.randint(0, 97, (2, 40), device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
            kwargs = dict(max_new_tokens=30, do_sample=False)
            want = model.generate(tokens, **kwargs)
            got = model.generate(tokens, cache_implementation="static", compile_config=compile_config, **kwargs)
            assert torch.equal(got, want)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


# ---------------------------------------------------------------- a decode step by the layer's one kernel


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of sequences in the calls of `layer_step` by layers; a skip where no kernel serves."""
    if not has_kernel(
        None, torch.device("cuda"), BF16, torch.float32, 128, 128, 1, 4, 128, 128, "lower_bound", "sigmoid"
    ):
        pytest.skip("no kernel serves a layer's decode step here: " + explain(StepProblem.default("cuda")))
    calls: list[int] = []
    run = RepeatedLayerStep.__call__

    def counted(step: RepeatedLayerStep, q: Tensor, *more: Any, **kwargs: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            calls.append(q.shape[0])
        return run(step, q, *more, **kwargs)

    monkeypatch.setattr(RepeatedLayerStep, "__call__", counted)
    return calls


@torch.no_grad()
def decoded(model: Any, ids: Tensor, mask: Tensor | None = None, prompt: int = 70) -> Tensor:
    """Logits of the tokens after the prompt, one by one."""
    kwargs = {} if mask is None else dict(attention_mask=mask[:, :prompt])
    past, logits = model(ids[:, :prompt], use_cache=True, **kwargs).past_key_values, []
    for t in range(prompt, ids.shape[1]):
        kwargs = {} if mask is None else dict(attention_mask=mask[:, : t + 1])
        logits.append(model(ids[:, t : t + 1], past_key_values=past, **kwargs).logits)
    return torch.cat(logits, 1)


def check_decoding(model: Any, exact: Any, ids: Tensor, calls: list[int], mask: Tensor | None = None) -> None:
    """Fails unless logits by the kernel are about as close to fp64 as those by the layers' own operations."""
    fused = decoded(model, ids, mask)
    assert calls
    assert set(calls) == {ids.shape[0]}
    calls.clear()
    with use_backend("eager"):
        plain = decoded(model, ids, mask)
        truth = decoded(exact, ids, mask)
    assert not calls
    assert error(fused, truth) <= budget(error(plain, truth), BF16)


@every_kind
@pytest.mark.parametrize("sequences", [1, 33])
def test_decoding_by_one_kernel(interval: int, sequences: int, kernel_calls: list[int]) -> None:
    model = build(interval)
    ids = torch.randint(0, 97, (sequences, 75), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    check_decoding(model, copy.deepcopy(model).double(), ids, kernel_calls)


@pytest.mark.parametrize("sequences", [1, 33])
def test_a_low_rank_decay_beside_a_full_rank_gate_decodes_by_one_kernel(
    sequences: int, kernel_calls: list[int]
) -> None:
    model = build(0, linear_gate_rank=0, linear_decay_rank=128)
    ids = torch.randint(0, 97, (sequences, 75), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    check_decoding(model, copy.deepcopy(model).double(), ids, kernel_calls)


@pytest.mark.parametrize("sequences", [1, 33])
@pytest.mark.parametrize("family", stock_models.KDA_FAMILIES)
def test_a_swapped_model_decodes_by_one_kernel(family: str, sequences: int, kernel_calls: list[int]) -> None:
    """With the convolution in bf16; where a family keeps it in fp32, its layers use their own operations."""
    head = {"head_dim" if family == "bailing_hybrid" else "linear_head_dim": 128}
    model = stock_models.cast(stock_models.build(family, dense=True, **head), BF16).to("cuda")
    swap_attention(model)
    for layer in stock_models.swapped_layers_of(model).values():
        layer.conv1d.to(BF16)
    ids = torch.randint(3, 80, (sequences, 75), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    check_decoding(model, exact, ids, kernel_calls)


@every_kind
def test_padded_rows_decode_by_one_kernel(interval: int, kernel_calls: list[int]) -> None:
    """Rows that are padded on the left, each as if it were alone."""
    model = build(interval)
    ids = torch.randint(0, 97, (3, 75), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 40, 69)):
        mask[row, :padding] = 0
    check_decoding(model, copy.deepcopy(model).double(), ids, kernel_calls, mask)
    rows = [decoded(model, ids[n : n + 1, p:], prompt=70 - p) for n, p in enumerate((0, 40, 69))]
    assert error(decoded(model, ids, mask), torch.cat(rows)) < 2**-6


def test_a_static_cache_generates_what_a_dynamic_one_does(kernel_calls: list[int]) -> None:
    """Compiled decode steps, of weights that the prefill has laid side by side, before and after they change."""
    model = build(0)
    ids = torch.randint(0, 97, (2, 40), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    greedy = dict(max_new_tokens=20, do_sample=False)
    for backend, mode in (("eager", None), ("inductor", "reduce-overhead")):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        static = dict(
            cache_implementation="static",
            compile_config=CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=mode),
        )
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(2):
                got = model.generate(ids, **greedy, **static)
                want = model.generate(ids, **greedy)
                assert kernel_calls
                assert backend == "inductor" or torch.equal(got, want)  # Inductor rounds elsewhere
                assert got.shape == want.shape
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(torch.randn_like(p) * p.std() / 4 if p.numel() > 1 else 0)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]


def test_a_captured_decode_step(kernel_calls: list[int]) -> None:
    """Replays are the steps, bit by bit; the parameters stay where the graph reads them."""
    model = build(0)
    ids = torch.randint(0, 97, (2, 75), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    caches = [StaticCache(config=model.config, max_cache_len=1) for _ in range(2)]
    token, out = ids[:, :1].clone(), torch.empty(2, 1, 97, device="cuda", dtype=BF16)
    with torch.inference_mode():
        for cache in caches:
            model(ids[:, :70], past_key_values=cache)

        def step() -> None:
            out.copy_(model(token, past_key_values=caches[0]).logits)

        before = [t.clone() for layer in caches[0].layers for t in (layer.conv_states[0], layer.recurrent_states[0])]
        graph = captured(step)
        addresses = [p.data_ptr() for p in model.parameters()]
        states = [t for layer in caches[0].layers for t in (layer.conv_states[0], layer.recurrent_states[0])]
        for state, value in zip(states, before, strict=True):
            state.copy_(value)
        for t in range(70, 75):
            token.copy_(ids[:, t : t + 1])
            graph.replay()
            assert torch.equal(out, model(token, past_key_values=caches[1]).logits)
    assert kernel_calls
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_a_captured_training_step_keeps_its_parameters() -> None:
    """Inference after a capture lays no weights elsewhere, where the graph would not find them."""
    model = build(0).train()
    ids = torch.randint(0, 97, (2, 64), device="cuda")

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()

    graph = captured(step)
    addresses = [p.data_ptr() for p in model.parameters()]
    model.eval().generate(ids[:, :8], max_new_tokens=3)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    model.zero_grad(set_to_none=False)
    graph.replay()
    got = [p.grad.clone() for p in model.parameters()]
    model.train().zero_grad(set_to_none=False)
    step()
    assert all(error(a, p.grad) < 2**-6 for a, p in zip(got, model.parameters(), strict=True))


def test_memory_is_constant_while_generating() -> None:
    model = build(0)
    cache = StaticCache(config=model.config, max_cache_len=1)
    token = torch.zeros(1, 1, dtype=torch.long, device="cuda")
    with torch.inference_mode():
        model(torch.zeros(1, 70, dtype=torch.long, device="cuda"), past_key_values=cache)

        def step() -> None:
            token.copy_(model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True))

        graph = captured(step)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(5000):
            graph.replay()
        assert torch.cuda.max_memory_allocated() == before
    assert all(t.isfinite().all() for layer in cache.layers for t in layer.recurrent_states.values())


@pytest.mark.filterwarnings("error:plain PyTorch serves")
def test_default_choice_on_a_gpu() -> None:
    """Automatic choice takes the first fused backend that serves, without a word."""
    x: Inputs = make_inputs(Case(checkpoints=False), "cuda")
    KDA.clear_caches()  # a warning is given once
    first = next(b.name for b in KDA.backends().values() if not b.unsupported(problem_of(x)))
    assert first != "eager"
    chosen, named = (kda(*x[:5], **options(x), backend=b).o for b in (None, first))
    assert torch.equal(chosen, named)
