"""Models of transformers that `swap_attention` changes in place: the same, and right where the stock layers are not."""

from __future__ import annotations

import copy
import functools
import io
import json
import os
import pickle
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import CompileConfig, DataCollatorWithFlattening, DynamicCache, PreTrainedModel

from kda_layers import KDAConfig, KDAForCausalLM, load_pretrained, restore_attention, swap_attention
from kda_layers.modeling.layer.forward import KDAForward
from kda_layers.modeling.seams import RENAMED
from kda_layers.serving import enable_speculative_decoding
from tests.kernels.cases import BF16, DEVICES, FP32, budget, error
from tests.modeling.stock_models import (
    FAMILIES,
    GATED_DELTA_FAMILIES,
    IN_PLACE,
    KDA_FAMILIES,
    MIXING,
    build,
    cast,
    every_family,
    every_family_in_place,
    every_kda_family,
    swapped_layers_of,
    with_oracle,
)
from tests.processes import run_two

ROOT = Path(__file__).parents[2]
GREEDY = dict(max_new_tokens=12, do_sample=False)
FEW = dict(max_new_tokens=24, do_sample=False, suppress_tokens=[0, 1, 2, *range(7, 97)])  # guesses often hit
# Errors vary manyfold between models, where a token with short q or k happens to matter, and between batches, as some
# gradients have two elements: the typical one of several models is compared, over batches and all layers together.
MODELS, DRAWS = 5, 2


@pytest.fixture(autouse=True, params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Every test runs wholly on each device of this machine."""
    with torch.device(request.param) as device:
        yield device


def ids(*shape: int, seed: int = 1, high: int = 80) -> Tensor:
    tokens = torch.randint(3, high, shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return tokens.to(torch.get_default_device())


def both(family: str, dtype: torch.dtype = FP32, **options: Any) -> tuple[Any, Any]:
    """A stock model and a swapped copy."""
    stock = cast(build(family, **options), dtype)
    swapped = copy.deepcopy(stock)
    swap_attention(swapped)
    return stock, swapped


def logits(model: Any, tokens: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens, **kwargs).logits


def limit(family: str) -> float:
    """By how much two fp32 results may differ: twice what stock's differ from fp64, and one rounding; of each."""
    return _limit(family, torch.get_default_device())


@functools.cache
def _limit(family: str, device: torch.device) -> float:
    stock, tokens = build(family), ids(2, 75)
    return 2 * budget(error(logits(stock, tokens), logits(with_oracle(stock), tokens)), FP32)


# ---------------------------------------------------------------- equal


SOFTPLUS = [(f, False) for f in IN_PLACE] + [(f, True) for f in KDA_FAMILIES]


@pytest.mark.parametrize(("family", "softplus"), SOFTPLUS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_logits_loss_and_every_gradient(family: str, dtype: torch.dtype, softplus: bool) -> None:
    errors: dict[str, list[tuple[float, float]]] = {}  # of stock and swapped, for each model
    for seed in range(MODELS):
        stock = cast(build(family, dense=dtype == BF16, softplus=softplus, seed=seed), dtype)
        models = dict(stock=stock, swapped=copy.deepcopy(stock), truth=with_oracle(stock))
        swap_attention(models["swapped"])
        stock_results, swapped_results, truth = (results(model) for model in models.values())
        assert stock_results.keys() == swapped_results.keys() == truth.keys()
        for name, t in truth.items():
            errors.setdefault(name, []).append((error(stock_results[name], t), error(swapped_results[name], t)))
        gates = [n for n in truth if n.endswith(("A_log", "dt_bias", "self_attn.A", "dt_proj.weight"))]
        assert len(gates) == 2
        assert all(truth[n].abs().max() > 0 for n in gates)
    typical = {n: [statistics.median(each) for each in zip(*pairs, strict=True)] for n, pairs in errors.items()}
    wrong = {n: (swapped, stock) for n, (stock, swapped) in typical.items() if not swapped <= budget(stock, dtype)}
    assert not wrong


def results(model: Any) -> dict[str, Tensor]:
    """Logits, loss and gradients on a few batches, those of all layers together."""
    found: dict[str, list[Tensor]] = {}
    for draw in range(DRAWS):
        tokens = ids(2, 70, seed=draw)
        out = model(tokens, labels=tokens, use_cache=False)
        model.zero_grad()
        out.loss.backward()
        values = dict(logits=out.logits, loss=out.loss) | {n: p.grad for n, p in model.named_parameters()}
        for name, value in values.items():
            if value is not None:
                role = re.sub(r"layers\.\d+", "layers", name)
                found.setdefault(role, []).append(value.detach().flatten().clone())
    return {role: torch.cat(parts) for role, parts in found.items()}


GENERATION = {
    "greedy": {},
    "sampling": dict(do_sample=True),
    "beam": dict(num_beams=3),
    "beam, several": dict(num_beams=3, num_return_sequences=2),
    "static": dict(cache_implementation="static"),
    "no cache": dict(use_cache=False),
}


@every_family_in_place
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.compiles] * (how == "static")) for how in GENERATION]
)  # on a GPU, transformers compiles with a static cache
@pytest.mark.parametrize("padded", [False, True], ids=["", "left padding"])
def test_generation(family: str, how: str, padded: bool) -> None:
    stock, swapped = both(family)
    tokens = ids(2, 70)
    mask = torch.ones_like(tokens)
    if padded:
        tokens[0, :4], mask[0, :4] = 0, 0
    out = []
    for model in (stock, swapped):
        torch.manual_seed(0)
        # With a static cache, transformers would compile the stock model on a GPU, which takes a minute.
        options = GREEDY | GENERATION[how] | dict(disable_compile=model is stock)
        out.append(model.generate(tokens, attention_mask=mask, **options))
    assert torch.equal(*out)


@every_family_in_place
def test_continued_returned_caches(family: str) -> None:
    """Several turns, a copy of the returned cache, and token by token equal one pass."""
    _, swapped = both(family)
    tokens = ids(2, 75)
    want = logits(swapped, tokens, use_cache=False)
    with torch.no_grad():
        first = swapped(tokens[:, :66], use_cache=True)
        cache = first.past_key_values
        for past in (copy.deepcopy(cache), cache):
            got = [first.logits]
            for part in tokens[:, 66:].split([5, 1, 1, 2], 1):
                got.append(swapped(part, past_key_values=past).logits)
            assert error(torch.cat(got, 1), want) < limit(family)


@every_family_in_place
@pytest.mark.parametrize("n", [1, 4, 8])
def test_cropped_returned_caches(family: str, n: int) -> None:
    """A returned cache records when told to, gives tokens back, and goes on with others."""
    _, swapped = both(family)
    tokens, others = ids(2, 75), ids(2, 5, seed=2)
    with torch.no_grad():
        cache = swapped(tokens[:, :67], use_cache=True).past_key_values
        cache.activate_past_recording()
        swapped(tokens[:, 67:], past_key_values=cache)
        cache.crop(-n)
        got = swapped(others, past_key_values=cache).logits
    want = logits(swapped, torch.cat((tokens[:, : 75 - n], others), 1), use_cache=False)[:, -5:]
    assert error(got, want) < limit(family)


@every_family_in_place
def test_save_pretrained_is_that_of_stock(family: str, tmp_path: Path, device: torch.device) -> None:
    stock, swapped = both(family)
    for name, model in (("stock", stock), ("swapped", swapped)):
        model.save_pretrained(tmp_path / name)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("stock", "swapped")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][n], files[1][n]) for n in files[0])
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("stock", "swapped")]
    assert configs[0] == configs[1]
    again = type(stock).from_pretrained(tmp_path / "swapped").to(device)
    assert not any(type(m).__name__.startswith("Fast") for m in swapped_layers_of(again).values())
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), stock.parameters(), strict=True))


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": lambda m: _through_torch_save(m),
}


def _through_torch_save(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@every_family
@pytest.mark.parametrize("how", COPIES)
def test_copies_stay_swapped(family: str, how: str) -> None:
    stock, swapped = both(family)
    enable_speculative_decoding(swapped)
    other = COPIES[how](swapped)
    paths = list(swapped_layers_of(stock))
    assert torch.equal(logits(other, ids(2, 9)), logits(swapped, ids(2, 9)))
    lookup = dict(prompt_lookup_num_tokens=3, **GREEDY)
    prompt = ids(1, 20, high=6)
    assert torch.equal(other.generate(prompt, **lookup), swapped.generate(prompt, **lookup))
    assert restore_attention(other) == paths
    assert torch.equal(logits(other, ids(2, 9)), logits(stock, ids(2, 9)))
    with pytest.raises(ValueError, match="stateful"):
        other.generate(prompt, **lookup)
    swapped.generate(prompt, **lookup)  # the copy was restored, not the original


@pytest.mark.slow
@pytest.mark.parametrize("family", ["kimi_linear", "doge"])
def test_a_pickle_is_read_in_a_fresh_process(family: str, tmp_path: Path) -> None:
    """Pickles name the class of swapped layers, which is made on first use."""
    _, swapped = both(family)
    model = swapped.cpu()
    torch.save((model, ids(2, 9).cpu(), model(ids(2, 9).cpu()).logits), tmp_path / "model.pt")
    code = """
import sys, torch
model, tokens, logits = torch.load(sys.argv[1], weights_only=False)
assert torch.equal(model(tokens).logits, logits)
import kda_layers
print(len(kda_layers.restore_attention(model)))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(swapped_layers_of(model))


@pytest.mark.slow
@every_family_in_place
@pytest.mark.parametrize("kind", ["cpu", "disk"])
@pytest.mark.parametrize("first", ["swap", "offload"])
def test_accelerate_offload(family: str, kind: str, first: str, tmp_path: Path, device: torch.device) -> None:
    from accelerate import cpu_offload, disk_offload

    stock = build(family)
    tokens, model = ids(2, 9), copy.deepcopy(stock)
    want = logits(stock, tokens)

    def offload() -> None:
        if kind == "cpu":
            cpu_offload(model, execution_device=device)
        else:
            disk_offload(model, str(tmp_path), execution_device=device)

    if first == "swap":
        swap_attention(model)
        offload()
    else:
        offload()
        swap_attention(model)
    assert any(p.device.type == "meta" for layer in swapped_layers_of(model).values() for p in layer.parameters())
    calls = [type(m).__name__ for m in swapped_layers_of(model).values()]
    assert all(name.startswith("Fast") for name in calls)
    for _ in range(2):
        got = logits(model, tokens)
        assert got.isfinite().all()
        assert error(got, want) < limit(family)
    new = model.generate(tokens, **GREEDY)
    assert torch.equal(new, stock.generate(tokens, **GREEDY))
    restore_attention(model)
    assert torch.equal(logits(model, tokens), want)


@every_family
def test_hooked_layers_run_our_forward(family: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With accelerate's hooks there before the swap, it is our forward that is called."""
    from accelerate import cpu_offload

    model = build(family)
    cpu_offload(model, execution_device=device)
    swap_attention(model)
    seen = []
    compute = KDAForward.compute
    monkeypatch.setattr(KDAForward, "compute", lambda self, *args: seen.append(self) or compute(self, *args))
    logits(model, ids(1, 4))
    assert seen == list(swapped_layers_of(model).values())


# One KDA layer and one of another kind: compiling takes seconds a layer.
TWO_LAYERS: dict[str, dict[str, Any]] = {
    "kimi_linear": dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]),
    "glm5_next": dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]),
    "bailing_hybrid": dict(num_hidden_layers=2, layer_group_size=2),
    "doge": dict(num_hidden_layers=1),
} | {
    family: dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    for family in GATED_DELTA_FAMILIES
}


def compiled(families: Iterable[str]) -> list[Any]:
    """Families but Qwen4, whose indexer reads values; of gated delta nets, further ones are left to plain pytest."""
    further = ("qwen3_5_moe", "olmo_hybrid", "lara_mini")
    kept = [f for f in families if f != "qwen4_exp"]
    return [pytest.param(f, marks=[pytest.mark.combination] * (f in further)) for f in kept]


@pytest.mark.slow
@pytest.mark.compiles
# Before transformers 5.24 the backward of experts reads values.
@pytest.mark.parametrize("family", compiled(f for f in IN_PLACE if f != "qwen3_5_moe" or RENAMED))
def test_compile_fullgraph(family: str) -> None:
    dense = dict(mlp_layer_types=["dense", "dense"]) if family in KDA_FAMILIES else dict(dense=family == "qwen3_next")
    _, swapped = both(family, **TWO_LAYERS[family], **dense)
    torch._dynamo.reset()
    compiled = torch.compile(swapped, fullgraph=True, backend="aot_eager")
    exact = copy.deepcopy(swapped).double()
    if family in ("qwen3_5_moe", "lara_mini"):
        exact.set_experts_implementation("eager")  # the other ones have no fp64
    tokens, results = ids(2, 70), []
    for model, owner in ((swapped, swapped), (compiled, swapped), (exact, exact)):
        owner.zero_grad()
        out = model(tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        grads = {n: p.grad.clone() for n, p in owner.named_parameters() if p.grad is not None}
        results.append(dict(logits=out.logits.detach()) | grads)
    eager, got, truth = results
    apart = {n: e for n, want in eager.items() if not (e := error(got[n], want)) < limit(family)}
    # The limit is that of logits. Gradients of a few numbers, sums over all tokens, are further from fp64 in both.
    assert not {n: e for n, e in apart.items() if error(got[n], truth[n]) > budget(error(eager[n], truth[n]), FP32)}
    assert apart.keys() <= {n for n, p in swapped.named_parameters() if p.numel() < 8}


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("family", compiled(FAMILIES))
def test_compiled_generation(family: str) -> None:
    """With a static cache transformers compiles the decoding step whole."""
    kinds = dict(mlp_layer_types=["dense", "sparse"]) if family in KDA_FAMILIES else {}
    stock, swapped = both(family, **TWO_LAYERS[family], **kinds)
    torch._dynamo.reset()
    options = CompileConfig(fullgraph=True, dynamic=None, mode=None, backend="aot_eager")
    options._compile_all_devices = True  # otherwise only accelerators compile
    tokens = ids(2, 70)
    got = swapped.generate(tokens, cache_implementation="static", compile_config=options, **GREEDY)
    assert torch.equal(got, stock.generate(tokens, **GREEDY))


@every_kda_family
def test_the_gate_is_not_materialised_outside(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's gate keeps fp32 tensors of its size for the backward before the operator has seen it; ours none."""
    kept, size = [], 64 * 2 * 16  # tokens, heads, channels

    def pack(t: Tensor) -> Tensor:
        kept.append(t.dtype == FP32 and t.numel() == size)
        return t

    class Reached(Exception):
        pass

    def operator(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *_: Any, **__: Any) -> None:
        raise Reached(g)

    def gate(layer: Any, x: Tensor) -> Tensor:
        if type(layer).__module__.startswith("transformers."):
            return layer.forget_gate(x)
        with pytest.raises(Reached) as reached:
            layer(x)
        return reached.value.args[0]

    monkeypatch.setattr("kda_layers.modeling.layer.forward.kda", operator)
    counts = []
    for model in both(family, BF16, dense=True):
        layer = next(iter(swapped_layers_of(model).values()))
        x = torch.randn(1, 64, 32, dtype=BF16, requires_grad=True)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            g = gate(layer, x)
        assert g.numel() == size
        counts.append(sum(kept))
    assert counts[0] > 0
    assert counts[1] == 0


TWO_PROCESSES = """
import tests.modeling.conftest  # stock models on transformers' own PyTorch
import copy, os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from kda_layers import swap_attention
from tests.modeling.stock_models import FAMILIES, build
from tests.kernels.cases import error
from tests.modeling.test_swap_stock import ids, limit
dist.init_process_group("gloo")
torch.set_default_device("cpu")
for family in FAMILIES:
    swapped, tokens = build(family), ids(4, 20)
    swap_attention(swapped)
    swapped.train()
    alone, ddp = copy.deepcopy(swapped), DistributedDataParallel(swapped, find_unused_parameters=True)
    for model, rows in ((alone, tokens), (ddp, tokens.chunk(2)[dist.get_rank()])):
        model(rows, labels=rows, use_cache=False).loss.backward()
    wrong = [n for (n, p), q in zip(alone.named_parameters(), swapped.parameters())
             if p.grad is not None and not error(q.grad, p.grad) <= limit(family)]
    assert not wrong, (family, wrong)
dist.barrier()
os._exit(0)  # the interpreter's end, with gloo's threads, was seen to hang now and then
"""


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one() -> None:
    run_two("-c", TWO_PROCESSES, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


# ---------------------------------------------------------------- right where stock is wrong


DOCUMENTS = (5, 1, 17, 70)
PACKED = {
    "position_ids": dict(),
    "flash kwargs": dict(return_flash_attn_kwargs=True),
    "seq_idx": dict(return_seq_idx=True),
    "flash kwargs alone": dict(return_flash_attn_kwargs=True, return_position_ids=False),
    "seq_idx alone": dict(return_seq_idx=True, return_position_ids=False),
}


@every_family
@pytest.mark.parametrize("how", PACKED)
def test_packed_documents_do_not_leak(family: str, how: str, device: torch.device) -> None:
    stock, swapped = both(family, linear_only=family in MIXING)
    documents = [ids(n, seed=n).tolist() for n in DOCUMENTS]
    batch = dict(DataCollatorWithFlattening(**PACKED[how])([dict(input_ids=d) for d in documents]))
    batch = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in batch.items()}
    labels = batch.pop("labels")
    with torch.no_grad():
        want = torch.cat([logits(stock, torch.tensor([d]), use_cache=False) for d in documents], 1)
        assert error(swapped(**batch, use_cache=False).logits, want) < limit(family)
        try:
            leaked = error(stock(**batch, use_cache=False).logits, want)
        except ValueError as refusal:  # transformers 5.23 of seq_idx, without causal_conv1d
            leaked = "packed sequences" in str(refusal)
        assert leaked > 1e-2
    loss = swapped(**batch, labels=labels).loss  # in evaluation, where stock makes a cache by default
    parts = [swapped(torch.tensor([d]), labels=torch.tensor([d])).loss * (len(d) - 1) for d in documents if len(d) > 1]
    assert error(loss.detach(), (sum(parts) / (sum(DOCUMENTS) - len(DOCUMENTS))).detach()) < limit(family)


REFUSED_WHEN_PACKED = {
    "layers that mix": ("glm5_next", {}, r"one sequence in each row, got 2 packed .* layers do not"),
    "padding": ("kimi_linear", dict(attention_mask=(torch.arange(9) < 8)[None]), "attention_mask must be None with"),
    "a cache": ("kimi_linear", dict(use_cache=True), "use_cache unset or False with 2 packed"),
}


def test_packed_documents_are_refused_where_stock_layers_are_left() -> None:
    model = build("kimi_linear")
    swap_attention(model, [0])
    with pytest.raises(
        ValueError, match=r"every linear-attention layer .* 2 packed .* stock layers at layers\.2\.self"
    ):
        model(ids(1, 9), cu_seq_lens_q=torch.tensor([0, 4, 9]))


@pytest.mark.parametrize("case", REFUSED_WHEN_PACKED)
def test_what_cannot_be_packed_is_refused(case: str) -> None:
    family, arguments, message = REFUSED_WHEN_PACKED[case]
    _, swapped = both(family)
    with pytest.raises(ValueError, match=message):
        swapped(ids(1, 9), cu_seq_lens_q=torch.tensor([0, 4, 9]), **arguments)


def test_glm_masks_its_kda_layers_only_where_something_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stock forward hands every layer a mask, which costs our layers time where nothing is padded."""
    _, swapped = both("glm5_next")
    masks, compute = [], KDAForward.compute

    def spy(self: Any, x: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
        masks.append(mask)
        return compute(self, x, mask, *rest)

    monkeypatch.setattr(KDAForward, "compute", spy)
    tokens, ones = ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    swapped.generate(tokens, attention_mask=ones, max_new_tokens=3, do_sample=False)
    swapped(inputs_embeds=swapped.get_input_embeddings()(tokens))
    assert masks
    assert all(m is None for m in masks)
    masks.clear()
    ones[0, :2] = 0
    swapped(tokens, attention_mask=ones)
    assert masks
    assert all(torch.equal(m, ones.bool()) for m in masks)


@every_family
def test_right_padding_leaves_the_state_alone(family: str) -> None:
    """After a right-padded turn, states and the next turn's logits are those of the row alone; stock's states decay."""
    stock, swapped = both(family)
    tokens, more = ids(2, 9), ids(2, 3, seed=5)
    mask = torch.ones_like(tokens)
    tokens[1, 5:], mask[1, 5:] = 0, 0
    states: dict[str, Tensor] = {}
    for name, model in (("stock", stock), ("swapped", swapped)):
        with torch.no_grad():
            alone = model(tokens[1:, :5], use_cache=True)
            padded = model(tokens, attention_mask=mask, use_cache=True)
        at = next(i for i, kind in enumerate(model.config.get_text_config().layer_types) if kind == "linear_attention")
        of = [out.past_key_values.layers[at].recurrent_states[0] for out in (padded, alone)]
        states[name] = torch.tensor(error(of[0][1:], of[1]))
    assert states["swapped"] < limit(family)
    assert states["stock"] > 1e-2
    if family == "kimi_linear":  # no positions: the row goes on as if alone
        with torch.no_grad():
            got = swapped(
                more, attention_mask=torch.cat((mask, torch.ones_like(more)), 1), past_key_values=padded.past_key_values
            ).logits[1:]
            assert error(got, swapped(more[1:], past_key_values=alone.past_key_values).logits) < limit(family)


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("how", ["prompt lookup", "exact draft", "other draft"])
def test_speculative_decoding_is_greedy_decoding(family: str, how: str) -> None:
    stock, swapped = both(family)
    draft = copy.deepcopy(swapped)
    if how == "other draft":
        torch.manual_seed(1)
        with torch.no_grad():
            for p in draft.parameters():
                p.add_(0.02 * p.std(correction=0) * torch.randn_like(p))
    guess: dict[str, Any] = dict(prompt_lookup_num_tokens=4, max_matching_ngram_size=1)
    if how != "prompt lookup":
        guess = dict(assistant_model=draft)
    with pytest.raises(ValueError, match="stateful"):
        swapped.generate(ids(1, 9), **GREEDY, **guess)
    enable_speculative_decoding(swapped)
    enable_speculative_decoding(draft)
    calls = []
    swapped.register_forward_hook(lambda *_: calls.append(1))
    fewer = 0
    for seed in range(4):
        prompt = ids(1, 24, seed=seed, high=7)
        want = stock.generate(prompt, **FEW)
        calls.clear()
        got = swapped.generate(prompt, **FEW, **guess)
        assert torch.equal(got, want)
        fewer += len(calls) < FEW["max_new_tokens"]
    assert fewer, "no guess was right"


@every_family
def test_stock_layers_forced_to_speculate_are_wrong_or_refused(family: str) -> None:
    stock, _ = both(family)
    stock._is_stateful = False
    wrong = 0
    for seed in range(4):
        prompt, guess = ids(1, 24, seed=seed, high=7), dict(prompt_lookup_num_tokens=4, max_matching_ngram_size=1)
        want = stock.generate(prompt, **FEW)
        try:
            wrong += not torch.equal(stock.generate(prompt, **FEW, **guess), want)
        # "A cache that can be cropped" since transformers 5.24; before, Qwen4 crops what it has not yet.
        except (RuntimeError, TypeError, ValueError):
            wrong += 1
    assert wrong


def test_a_users_stock_cache_is_upgraded_or_refused() -> None:
    stock, swapped = both("kimi_linear")
    enable_speculative_decoding(swapped)
    prompt = ids(1, 24, high=7)
    guess = dict(prompt_lookup_num_tokens=4, max_matching_ngram_size=1)
    want = stock.generate(prompt, **GREEDY)
    empty = DynamicCache(config=swapped.config)
    assert torch.equal(swapped.generate(prompt, past_key_values=empty, **GREEDY, **guess), want)
    with torch.no_grad():
        filled = stock(prompt[:, :20], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"cache .*records its past"):
        swapped.generate(prompt, past_key_values=filled, **GREEDY, **guess)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f == "kimi_linear"])
def test_gates_of_a_bf16_load(family: str, tmp_path: Path, device: torch.device) -> None:
    """Stock rounds A_log of a Kimi-Linear, and before transformers 5.24 dt_bias; load_pretrained keeps them."""
    model = build(family)
    model.save_pretrained(tmp_path)
    stock = type(model).from_pretrained(tmp_path, dtype=BF16)
    ours = load_pretrained(tmp_path, dtype=BF16)
    assert isinstance(ours, type(stock))
    assert type(ours).__name__ == type(stock).__name__
    stock, ours, wanted, names = stock.to(device), ours.to(device), dict(model.named_parameters()), []
    for (name, p), (_, q) in zip(stock.named_parameters(), ours.named_parameters(), strict=True):
        if name.endswith(("A_log", "dt_bias")):
            names.append(name)
            kept = RENAMED and name.endswith("dt_bias")
            assert (p.dtype, q.dtype) == (FP32 if kept else BF16, FP32)
            assert torch.equal(q, wanted[name])
            assert torch.equal(p.float(), wanted[name]) == kept
        else:
            assert q.dtype == p.dtype
            assert torch.equal(p, q)
    assert len(names) == 2 * len(swapped_layers_of(model))
    assert all(type(m).__name__.startswith("Fast") for m in swapped_layers_of(ours).values())
    assert logits(ours, ids(2, 9)).isfinite().all()


def test_load_pretrained_of_other_families(tmp_path: Path, device: torch.device) -> None:
    for family in IN_PLACE:
        model = build(family)
        model.save_pretrained(tmp_path / family)
        ours = load_pretrained(tmp_path / family, dtype=FP32).to(device).eval()
        assert error(logits(ours, ids(2, 9)), logits(model, ids(2, 9))) < limit(family)


def test_swapping_a_bf16_gate_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="kda_layers"):
        swap_attention(build("kimi_linear").to(BF16))
    assert "A_log and dt_bias of KimiLinearForCausalLM were rounded to bfloat16" in caplog.text


STUB = """
import sys, types
def only_on_a_gpu(q, k, v, g, beta, **kwargs):
    raise RuntimeError("0 active drivers ([]). There should only be one.")
fla, ops, kda, gdn = (types.ModuleType(n) for n in ("fla", "fla.ops", "fla.ops.kda", "fla.ops.gated_delta_rule"))
fla.__version__, fla.__path__, ops.__path__ = "0.6.0", [], []
kda.chunk_kda = kda.fused_recurrent_kda = only_on_a_gpu
gdn.chunk_gated_delta_rule = gdn.fused_recurrent_gated_delta_rule = only_on_a_gpu
fla.ops, ops.kda, ops.gated_delta_rule = ops, kda, gdn
sys.modules.update({"fla": fla, "fla.ops": ops, "fla.ops.kda": kda, "fla.ops.gated_delta_rule": gdn})
"""


@pytest.mark.slow
def test_with_flash_linear_attention_installed_on_a_cpu() -> None:
    """Stock layers take its GPU kernels whatever the device (a stand-in that fails as Triton does); ours do not."""
    code = f"""{STUB if "fla" not in sys.modules and not _has_fla() else ""}
import torch
from kda_layers import swap_attention
from tests.modeling.stock_models import FAMILIES, build
for family in FAMILIES:
    model, tokens = build(family), torch.arange(3, 12)[None]
    try:
        model(tokens)
        raise SystemExit("the stock model ran: " + family)
    except RuntimeError as error:
        assert "0 active drivers" in str(error), (family, error)
    swap_attention(model)
    assert model(tokens).logits.isfinite().all(), family
    print(family, model.generate(tokens, max_new_tokens=3, do_sample=False).shape[1])
"""
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{family} 12" for family in FAMILIES]


def _has_fla() -> bool:
    import importlib.util

    return importlib.util.find_spec("fla") is not None


# ---------------------------------------------------------------- what is changed, and undone


@every_family_in_place
def test_paths_subsets_and_restoring(family: str) -> None:
    stock = build(family)
    model, paths = copy.deepcopy(stock), list(swapped_layers_of(stock))
    before = {p: type(m) for p, m in model.named_modules()}
    attributes = {p: set(vars(m)) for p, m in model.named_modules()}
    parameters = dict(model.named_parameters())
    first = next(iter(swapped_layers_of(model).values())).layer_idx
    itself = {""} if family in FAMILIES else set()  # the loop of its `generate`
    assert swap_attention(model, [first]) == paths[:1]
    assert {p for p, m in model.named_modules() if type(m) is not before[p]} == {*paths[:1], *itself}
    assert error(logits(model, ids(2, 9)), logits(stock, ids(2, 9))) < limit(family)
    if family in FAMILIES:  # transformers lets Doge draft as it is
        with pytest.raises(ValueError, match=r"every .* must be swapped before"):
            enable_speculative_decoding(model)
    with pytest.raises(ValueError, match="swapped already"):
        swap_attention(model)
    assert swap_attention(model, [swapped_layers_of(model)[p].layer_idx for p in paths[1:]]) == paths[1:]
    enable_speculative_decoding(model)
    assert {p for p, m in model.named_modules() if type(m) is not before[p]} == {*paths, *itself}
    assert all(isinstance(m, before[p]) for p, m in model.named_modules())
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert restore_attention(model) == paths
    assert {p: type(m) for p, m in model.named_modules()} == before
    assert {p: set(vars(m)) for p, m in model.named_modules()} == attributes
    assert not any(m._forward_pre_hooks or m._forward_pre_hooks_with_kwargs for m in model.modules())
    assert torch.equal(logits(model, ids(2, 9)), logits(stock, ids(2, 9)))
    with pytest.raises(ValueError, match="swapped layers to restore"):
        restore_attention(model)


def test_other_models_are_not_touched() -> None:
    stock, swapped = both("kimi_linear")
    fresh = build("kimi_linear")
    assert {type(m).__name__ for m in swapped_layers_of(fresh).values()} == {"KimiLinearDeltaAttention"}
    assert {type(m).__name__ for m in swapped_layers_of(stock).values()} == {"KimiLinearDeltaAttention"}
    assert {type(m).__name__ for m in swapped_layers_of(swapped).values()} == {"FastKimiLinearDeltaAttention"}


def test_the_backend_is_passed_on() -> None:
    model = build("kimi_linear")
    swap_attention(model, backend="eager")
    assert {m.kda_options["backend"] for m in swapped_layers_of(model).values()} == {"eager"}


@pytest.mark.parametrize("family", ["kimi_linear"])
def test_a_base_model_and_all_kda_models(family: str) -> None:
    """A base model alone is swapped, too; in a model of KDA layers only a cache works, which stock refuses."""
    model = build("kimi_linear", linear_only=True)
    tokens = ids(2, 9)
    with pytest.raises(ValueError, match="LinearAttention layers"):
        model(tokens[:, :5], use_cache=True)
    assert swap_attention(model.model) == [p.removeprefix("model.") for p in swapped_layers_of(model)]
    want = logits(model, tokens, use_cache=False)
    with torch.no_grad():
        first = model(tokens[:, :5], use_cache=True)
        second = model(tokens[:, 5:], past_key_values=first.past_key_values)
    assert error(torch.cat((first.logits, second.logits), 1), want) < limit(family)


def hooked() -> PreTrainedModel:
    model = build("kimi_linear")
    layer = next(iter(swapped_layers_of(model).values()))
    layer.forward = lambda *args, **kwargs: None
    return model


def changed(**attributes: Any) -> PreTrainedModel:
    model = build("glm5_next")
    layer = next(iter(swapped_layers_of(model).values()))
    for name, value in attributes.items():
        setattr(layer if hasattr(layer, name) else layer.forget_gate, name, value)
    return model


def tiny_kda() -> KDAForCausalLM:
    return KDAForCausalLM(KDAConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, linear_num_heads=1))


def gpt2() -> PreTrainedModel:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1))


ERRORS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no model": (lambda: torch.nn.Linear(1, 1), {}, TypeError, "model must be a transformers PreTrainedModel, got Lin"),
    "another family": (gpt2, {}, ValueError, "GPT2LMHeadModel .*kimi_linear.*llama.*got model_type 'gpt2'"),
    "our own": (tiny_kda, {}, ValueError, "of this package already"),
    "beyond": (lambda: build("kimi_linear"), dict(layers=[3]), ValueError, r"layers must be in \[-3, 3\) .* got \[3\]"),
    "not KDA": (lambda: build("kimi_linear"), dict(layers=[1]), ValueError, r"\[0, 2\], got 1, .*full_attention"),
    "twice": (lambda: build("kimi_linear"), dict(layers=[0, -3]), ValueError, r"each layer once, got \[0, -3\]"),
    "none": (lambda: build("kimi_linear"), dict(layers=[]), ValueError, "got none"),
    "no integer": (lambda: build("kimi_linear"), dict(layers=[0.0]), TypeError, "layers .*integer, got 0.0"),
    "a pattern": (lambda: build("kimi_linear"), dict(layers="3:1"), ValueError, "layers must be None, .*got '3:1'"),
    "configured": (lambda: build("kimi_linear"), dict(linear_num_heads=2), TypeError, "linear_num_heads"),
    "a backend": (lambda: build("kimi_linear"), dict(backend="nope"), ValueError, "backend must be one of .*'nope'"),
    "recompute": (
        lambda: build("kimi_linear"),
        dict(recompute="yes"),
        ValueError,
        "recompute must be 'auto', 'always' or 'never', got 'yes'",
    ),
    "recompute of Doge": (lambda: build("doge"), dict(recompute="never"), ValueError, "recompute must be 'auto'"),
    "replaced forward": (hooked, {}, ValueError, "forward must be the class's own"),
    "another activation": (lambda: changed(activation="gelu"), {}, ValueError, "activation must be 'silu', got 'gelu'"),
    "a steeper bound": (lambda: changed(safe_gate_lower_bound=-6.0), {}, ValueError, r"lower_bound .*\[-5, 0\)"),
    "no KDA layer": (
        lambda: build("kimi_linear", layer_types=["full_attention"] * 3),
        {},
        ValueError,
        "must have a KDA layer to swap",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_leave_the_model_as_it_was(case: str) -> None:
    make, arguments, error_type, message = ERRORS[case]
    model = make()
    before = {p: (type(m), set(vars(m))) for p, m in model.named_modules()}
    with pytest.raises(error_type, match=message):
        swap_attention(model, **arguments)
    assert {p: (type(m), set(vars(m))) for p, m in model.named_modules()} == before
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_errors_of_loading(tmp_path: Path) -> None:
    tiny_kda().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type 'kda_lm'"):
        load_pretrained(tmp_path)
