"""Section model: tokens per second of a language model, all KDA and all softmax attention.

Decoding is one greedy step over a static cache, compiled in one graph and replayed from a CUDA graph. The softmax model
gets its best case: every position of its cache is in use, so that no mask is built or read. A KDA model's step does not
depend on the context, so it is measured once for each batch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from benchmarks.gpu.cases import Sizes
from benchmarks.gpu.contenders import Contender, Prepared, require
from benchmarks.gpu.harness import Job, Row, Setup, compete
from benchmarks.gpu.layer import MODES, to_bf16, to_fp32, where_time_goes
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.peers import SOFTMAX
from benchmarks.gpu.truth import Results
from kda_layers import KDAConfig, KDAForCausalLM, KimiDeltaAttention
from kda_layers.kernels.kda.contract import default_problem
from kda_layers.modeling.layer.cache import cache_bytes

LIMIT = 0.1  # a model in bf16 against fp32: each of its layers rounds, which alone makes about 0.04
PEAK = 989e12  # flop/s of an H200 in bf16, dense, by its data sheet
PROMPT = 64  # tokens in a KDA model's states before the step
NO_MASK = {"full_attention": None, "linear_attention": None}
GRAPH, REDUCE_OVERHEAD = "CUDA graph", "reduce-overhead"  # ours of the compiled step; transformers' of its generate


def model(setup: Setup) -> list[Job]:
    """Decoding steps of both models, prefill and training step of the KDA model."""
    batches, contexts = setup.sizes.decode_batches, setup.sizes.contexts
    decoded = [(kind, b, c, GRAPH) for b in batches for kind, cs in (("KDA", (0,)), (SOFTMAX, contexts)) for c in cs]
    decoded += [("KDA", batches[0], 0, REDUCE_OVERHEAD), (SOFTMAX, batches[0], contexts[0], REDUCE_OVERHEAD)]
    jobs = [Job(_decode_fields(*a), partial(_decode, setup, *a)) for a in decoded]
    whole = [("prefill", "call"), *(("training step", mode) for mode in MODES)]
    return jobs + [Job(_whole_fields(setup, *a), partial(_whole, setup, *a)) for a in whole]


def build(sizes: Sizes, kind: str, device: str) -> KDAForCausalLM:
    """The model of the configuration with random weights, in bf16; with kind SOFTMAX, all its layers softmax."""
    fields = json.loads(sizes.config.read_text())
    del fields["model_type"]
    if sizes.vocab_size is not None:
        fields["vocab_size"] = sizes.vocab_size
    if kind == SOFTMAX:
        fields["layer_types"] = ["full_attention"] * fields["num_hidden_layers"]
    torch.manual_seed(0)
    with torch.device(device):
        made = KDAForCausalLM(KDAConfig(**fields))
    return to_bf16(made).eval()


def with_backend(made: Any, backend: str) -> Any:
    """A copy of the model whose KDA layers run on that backend: contenders take turns."""
    made = copy.deepcopy(made)
    use(made, backend)
    return made


def use(made: Any, backend: str) -> None:
    """Sets the kernel backend of every KDA layer."""
    for m in made.modules():
        if isinstance(m, KimiDeltaAttention):
            m.kda_options["backend"] = backend


def _require(backend: str, device: str, needs_grad: bool, decode: bool = False) -> None:
    problem = replace(default_problem(device), needs_grad=needs_grad)
    require(backend, problem)
    if decode:
        require(backend, replace(problem, decode=True, has_state=True))


# ---------------------------------------------------------------- decoding


def _decode_fields(kind: str, batch: int, context: int, mode: str) -> Row:
    return {"what": "decode", "model": kind, "batch": batch, "context": context or "any", "mode": mode}


def _decode(setup: Setup, kind: str, batch: int, context: int, mode: str) -> list[Row]:
    machine, fields = setup.machine, _decode_fields(kind, batch, context, mode)
    made: Any = build(setup.sizes, kind, machine.device)
    prompt = torch.randint(made.config.vocab_size, (batch, PROMPT), device=machine.device)
    facts: Row = {}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if kind == SOFTMAX:
        needed, free = _softmax_cache_bytes(made.config, batch, context), machine.free_bytes()
        if needed > 0.9 * free:
            text = f"its cache needs {needed / 2**30:.0f} GiB, of which {free / 2**30:.0f} are free"
            return [fields | {"contender": SOFTMAX, "ours": False, "status": "refused", "reason": text}]
        cache = _softmax_cache(made, batch, context, None)
        truth = _softmax_truth(made, cache, context, prompt[:1, -1:])
        contenders = [Contender(SOFTMAX, partial(_softmax_step, made, cache, context, prompt, mode, machine, facts))]
    else:
        truth = _kda_truth(made, prompt[:1])
        contenders = [
            Contender(b, partial(_kda_step, made, b, prompt, mode, machine, facts), ours=True)
            for b in setup.backends
        ]  # fmt: skip
    rows = compete(fields, contenders, truth, machine, limit=LIMIT, more=lambda *_: _graph_note(facts, mode))
    return [_per_second(row, batch) for row in rows]


def _per_second(row: Row, tokens: int) -> Row:
    return row | ({"tokens/s": tokens / row["time"]["median"] * 1e3} if "time" in row else {})


def _graph_note(facts: Row, mode: str) -> Row:
    """Return a note on a timed step; it says if inductor left out its CUDA graphs, which it does silently."""
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] if mode == REDUCE_OVERHEAD else 0
    return facts | ({"note": f"inductor left out {skipped} CUDA graphs"} if skipped else {})


class _Step:
    """A compiled greedy decoding step from ids [B, 1]: what is called, and how what it changed is put back."""

    def __init__(self, made: Any, cache: Any, ids: Tensor, restore_cache: Callable[[], None], mode: str):
        self.first, self.ids, self.restore_cache, self.mode = ids.clone(), ids.clone(), restore_cache, mode
        self.cache = cache

        def logits(ids: Tensor, cache: Any) -> Tensor:  # the cache as an argument, as generate hands it over
            return made(input_ids=ids, past_key_values=cache, use_cache=True, attention_mask=NO_MASK).logits[:, -1]

        options: dict[str, Any] = {"mode": REDUCE_OVERHEAD} if mode == REDUCE_OVERHEAD else {}
        self.compiled: Any = torch.compile(logits, fullgraph=True, **options)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        if self.mode == REDUCE_OVERHEAD:
            torch.compiler.cudagraph_mark_step_begin()
        logits = self.compiled(self.ids, self.cache)
        self.ids.copy_(logits.argmax(-1, keepdim=True))
        return logits

    def restore(self) -> None:
        self.ids.copy_(self.first)
        self.restore_cache()

    def prepared(self, machine: Machine, restore_each: bool) -> Prepared:
        if self.mode == GRAPH:
            run: Any = machine.graph(self, self.restore)
        else:
            run = self
            for _ in range(4):  # compiles; then inductor records its graph
                if restore_each:
                    self.restore()
                self()
        return Prepared(run, _first_logits, self.restore, restore_each)


def _first_logits(logits: Tensor) -> Results:
    return {"logits": logits[:1]}


def _kda_step(made: Any, backend: str, prompt: Tensor, mode: str, machine: Machine, facts: Row) -> Prepared:
    """A step after the prompt, whose last token is the step's."""
    _require(backend, machine.device, needs_grad=False, decode=True)
    made = with_backend(made, backend)
    cache: Any = StaticCache(config=made.config, max_cache_len=PROMPT)
    with torch.no_grad():
        made(input_ids=prompt[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    states = [s for layer in cache.layers for s in (layer.conv_states[0], layer.recurrent_states[0])]
    kept = [s.clone() for s in states]

    def put_back() -> None:
        for s, before in zip(states, kept, strict=True):
            s.copy_(before)
        cache.get_seq_length().fill_(PROMPT - 1)  # counted on the device

    facts["cache MiB"] = cache_bytes(cache) / 2**20
    return _Step(made, cache, prompt[:, -1:], put_back, mode).prepared(machine, restore_each=False)


@torch.no_grad()
def _kda_truth(made: Any, prompt: Tensor) -> Results:
    wide = to_fp32(made)
    use(wide, "eager")
    return {"logits": wide(input_ids=prompt, use_cache=False, logits_to_keep=1).logits[:, -1]}


def _softmax_step(
    made: Any, cache: Any, context: int, prompt: Tensor, mode: str, machine: Machine, facts: Row
) -> Prepared:
    """A step on a full cache. The position is put back before each call: one further would lie outside."""
    facts["cache MiB"] = cache_bytes(cache) / 2**20
    step = _Step(made, cache, prompt[:, -1:], lambda: _fill_to(cache, context), mode)
    return step.prepared(machine, restore_each=True)


def _softmax_cache_bytes(config: Any, batch: int, context: int) -> int:
    return 2 * 2 * batch * (context + 1) * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def _softmax_cache(made: Any, batch: int, context: int, values_of: Any) -> Any:
    """A cache of `context` positions and one for the step: random, or the first rows of another's."""
    config = made.config
    cache: Any = StaticCache(config=config, max_cache_len=context + 1)
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, made.dtype, made.device)
    for i, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            t = getattr(layer, name)
            t.normal_() if values_of is None else t.copy_(getattr(values_of.layers[i], name)[:batch])
    _fill_to(cache, context)
    return cache


def _fill_to(cache: Any, context: int) -> None:
    for layer in cache.layers:
        layer.cumulative_length.fill_(context)


@torch.no_grad()
def _softmax_truth(made: Any, cache: Any, context: int, ids: Tensor) -> Results:
    wide = to_fp32(made)
    same: Any = _softmax_cache(wide, 1, context, cache)
    return {"logits": wide(input_ids=ids, past_key_values=same, use_cache=True, attention_mask=NO_MASK).logits[:, -1]}


# ---------------------------------------------------------------- full sequences


def _whole_fields(setup: Setup, what: str, mode: str) -> Row:
    return {"what": what, "model": "KDA", "batch": 1, "context": setup.sizes.model_T, "mode": mode}


def _whole(setup: Setup, what: str, mode: str) -> list[Row]:
    machine, T = setup.machine, setup.sizes.model_T
    made: Any = build(setup.sizes, "KDA", machine.device)
    tokens = torch.randint(made.config.vocab_size, (1, T), device=machine.device)
    make = _prefill if what == "prefill" else _training_step
    wide = to_fp32(made)
    use(wide, "eager")
    true = make(wide, tokens, "call")
    truth = true.results(true.run())
    del wide, true
    torch._dynamo.reset()

    def prepare(backend: str) -> Prepared:
        _require(backend, machine.device, needs_grad=what != "prefill")
        return make(with_backend(made, backend), tokens, mode)

    contenders = [Contender(b, partial(prepare, b), ours=True) for b in setup.backends]
    train = what != "prefill"
    more = partial(where_time_goes, machine) if train else None
    rows = compete(_whole_fields(setup, what, mode), contenders, truth, machine, limit=LIMIT, memory=True, more=more)
    rows = [_per_second(row, T) for row in rows]
    if not train:
        return rows
    flops = 6 * sum(p.numel() for p in made.parameters()) * T  # without the operator's own, some 5 % more
    return [r | ({"MFU %": 100 * flops / PEAK / r["time"]["median"] * 1e3} if "time" in r else {}) for r in rows]


def _prefill(made: Any, tokens: Tensor, mode: str) -> Prepared:
    """The prompt into a new cache and the last token's logits; transformers never compiles this."""
    assert mode == "call"

    @torch.no_grad()
    def run() -> Tensor:
        return made(input_ids=tokens, use_cache=True, logits_to_keep=1).logits[:, -1]

    return Prepared(run, _first_logits)


def _training_step(made: Any, tokens: Tensor, mode: str) -> Prepared:
    """Loss and every gradient; no optimizer."""
    called: Any = torch.compile(made, fullgraph=True) if mode == "compiled" else made

    def run() -> Tensor:
        made.zero_grad()
        loss = called(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def results(loss: Tensor) -> Results:
        return {"loss": loss[None], "d_parameters": torch.cat([p.grad.flatten() for p in made.parameters()])}

    return Prepared(run, results)
