"""Every model as transformers uses it: generation, caches, padding, packing, training, saving, compiling.

Tokens are compared in fp64, where two ways of computing the same logits cannot disagree about the largest one (angles
of rotary embeddings are fp32 in transformers, but the same ones both ways). What is special to one kind of model is in
test_model.py, test_variants.py, test_swap_stock.py and test_doge.py.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy, log_softmax
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, CompileConfig, DynamicCache, StaticCache

from kda_layers import KimiDeltaAttention
from kda_layers.modeling.layer.cache import KDACacheLayer, KDAOnlyCacheLayer
from kda_layers.modeling.seams import installed
from kda_layers.serving import enable_speculative_decoding
from tests.kernels.cases import BF16, FP32, FP64, FP64_LIMIT, budget, error
from tests.modeling.common import same
from tests.modeling.models import (
    ALL_KDA,
    CACHES,
    CONVERTED,
    DOCUMENTS,
    GUESSES,
    HOW_PACKED,
    KDA_LM,
    OURS,
    SEARCHES,
    SWAPPED,
    attention_layers,
    build,
    every_attention,
    every_model,
    every_model_and_swapped,
    generate,
    guessable,
    ids,
    left_padded,
    model,
    packing,
)

ROOT = pathlib.Path(__file__).parents[2]
HYBRIDS = [name for name in OURS if name not in ALL_KDA]
OLDEST = installed("transformers") < (5, 20)

# ---------------------------------------------------------------- generation


@every_model_and_swapped
def test_greedy_is_the_largest_logit_of_a_whole_pass(name: str) -> None:
    m, want = model(name), ids(3, 9)
    with torch.no_grad():
        for _ in range(10):
            want = torch.cat((want, m(want, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(generate(m, ids(3, 9)), want)
    rows = [set(row.tolist()) for row in want[:, 9:]]
    varied = all(len(row) >= 5 for row in rows) if name in KDA_LM else len(set.union(*rows)) >= 5
    assert varied, "the output is too uniform to show an error"


def skip_what_stock_cannot(name: str, how: str) -> None:
    if name == "swapped qwen3_5_moe" and "prefill_chunk_size" in CACHES.get(how, {}) and OLDEST:
        pytest.skip("this transformers cannot read the prompt of a model with images in chunks")


@every_model_and_swapped
@pytest.mark.parametrize("how", CACHES)
def test_caches_change_nothing(name: str, how: str) -> None:
    skip_what_stock_cannot(name, how)
    m = model(name)
    for tokens in (ids(3, 9), ids(1, 70, seed=2)):  # the second call uses the static cache of the first again
        assert torch.equal(generate(m, tokens, **CACHES[how]), generate(m, tokens))


@every_model
@pytest.mark.parametrize("how", SEARCHES)
def test_searches_with_and_without_a_cache(name: str, how: str) -> None:
    """The same seed gives the same tokens whatever keeps the past, and reordered beams take their states along."""
    m, got = model(name), []
    for cache in ({}, CACHES["none"], CACHES["static"]):
        torch.manual_seed(3)
        got.append(generate(m, ids(2, 6), **SEARCHES[how], **cache))
    assert len(got[0]) == 2 * SEARCHES[how].get("num_return_sequences", 1)
    assert len(set(map(tuple, got[0].tolist()))) == len(got[0]), "returned sequences are equal"
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])
    if name in KDA_LM:  # in one of the others a greedy token is nearly certain
        assert not torch.equal(got[0][:2], generate(m, ids(2, 6))), "the search did not search"


@every_model_and_swapped
@pytest.mark.parametrize("how", ["dynamic", "none", "static", "beams", "chunked prefill"])
def test_left_padded_rows_are_as_alone(name: str, how: str) -> None:
    skip_what_stock_cannot(name, how)
    m, rows = model(name), [ids(n, seed=n) for n in (9, 6, 2)]
    tokens, mask = left_padded(rows)
    options = {"dynamic": {}, "beams": dict(num_beams=2)}.get(how) or CACHES.get(how, {})
    got = generate(m, tokens, attention_mask=mask, **options)
    options = dict(num_beams=2) if how == "beams" else {}
    for row, out in zip(rows, got, strict=True):
        assert torch.equal(out[9:], generate(m, row[None], **options)[0, len(row) :])


@every_model_and_swapped
@pytest.mark.parametrize("use_cache", [True, False])
def test_one_left_padded_row(name: str, use_cache: bool) -> None:
    m, row = model(name), ids(6, seed=6)
    tokens, mask = torch.cat((row.new_full((3,), 3), row))[None], torch.tensor([[0] * 3 + [1] * 6])
    got = generate(m, tokens, attention_mask=mask, use_cache=use_cache)
    assert torch.equal(got[0, 9:], generate(m, row[None])[0, 6:])


@every_model
@pytest.mark.parametrize("kind", ["returned", "copied", "dynamic", "static"])
def test_a_cache_goes_on(name: str, kind: str) -> None:
    """Generate, append tokens of a second turn, go on with the cache or a copy of it: as if from scratch."""
    m, options = model(name), dict(return_dict_in_generate=True)
    if kind == "dynamic":
        options["past_key_values"] = DynamicCache(config=m.config)
    if kind == "static":
        options["past_key_values"] = StaticCache(config=m.config, max_cache_len=40)
    first = generate(m, ids(2, 6), **options)
    assert "past_key_values" not in options or first.past_key_values is options["past_key_values"]
    turn = torch.cat((first.sequences, ids(2, 4, seed=2)), 1)
    cache = first.past_key_values
    if kind == "copied":
        cache = copy.deepcopy(cache)
        generate(m, turn.flip(0), past_key_values=first.past_key_values)  # moves the original on, not the copy
    assert torch.equal(generate(m, turn, past_key_values=cache), generate(m, turn))


@pytest.mark.slow
@every_model
@pytest.mark.parametrize("how", GUESSES)
def test_guessed_tokens_change_nothing(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt lookup and assisted generation give the greedy tokens in fewer passes, some guesses being taken back."""
    if (name, how) == ("windows", "draft") and transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 cannot draft with sliding windows, with stock models neither")
    m, draft = guessable(name)
    forward, crop, passes, removed = m.model.forward, KDACacheLayer.crop, [], []
    monkeypatch.setattr(KDACacheLayer, "crop", lambda self, n: removed.append(abs(int(n))) or crop(self, n))
    monkeypatch.setattr(m.model, "forward", lambda **kwargs: passes.append(1) or forward(**kwargs))
    new, saved = 20, 0
    for seed in range(3):
        tokens = ids(1, 12, seed=seed, high=7)
        want = generate(m, tokens, max_new_tokens=new)
        passes.clear()
        assert torch.equal(generate(m, tokens, max_new_tokens=new, **GUESSES[how](draft)), want)
        saved += new - len(passes)
    assert saved > 0, "no guess was right"
    assert any(removed), "no guess was wrong"


@every_model_and_swapped
def test_early_exits_change_nothing(name: str) -> None:
    """The first layers draft tokens, wrong ones are taken back, and the model is whole again afterwards."""
    if name == "swapped glm5_next":
        pytest.skip("the configuration of a vision-language model has no num_hidden_layers for generate to change")
    if name in ("qwen3", "windows") and transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 cannot crop the empty cache of a softmax layer, with stock models neither")
    m = build(name)
    if name in SWAPPED:
        enable_speculative_decoding(m)
    layers, tokens = len(attention_layers(m)), ids(1, 9)
    want = generate(m, tokens)
    # transformers cannot start the cache of a swapped model whose first layers are all KDA.
    for k in range(3 if name in SWAPPED else 1, layers + 1):
        assert torch.equal(generate(m, tokens, assistant_early_exit=k), want)
        assert torch.equal(generate(m, tokens), want)
        assert m.config.num_hidden_layers == layers


@every_model
def test_a_decoder_cut_to_its_first_layers(name: str, tmp_path: pathlib.Path) -> None:
    """Its greedy tokens are its largest logits, and it is saved once its configuration has been cut, too."""
    m, want = build(name), ids(2, 9)
    m.model.layers = m.model.layers[:1]
    assert generate(m, want).shape == (2, 19)
    m.config.num_hidden_layers = 1
    with torch.no_grad():
        for _ in range(10):
            want = torch.cat((want, m(want, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(generate(m, ids(2, 9)), want)
    with pytest.raises(StrictDataclassError, match=r"cut it, too, config\.layer_types = config\.layer_types\[:1\]"):
        m.save_pretrained(tmp_path)
    m.config.layer_types = m.config.layer_types[:1]
    if name == "key_bias":
        m.config.attention_bias = "none"
    m.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=FP64)
    assert torch.equal(generate(loaded, ids(2, 9)), want)


# ---------------------------------------------------------------- caches, masks and outputs of forward


@every_model_and_swapped
def test_cached_forward_equals_one_pass(name: str) -> None:
    m, tokens = model(name), ids(2, 12)
    with torch.no_grad():
        whole, out, logits = m(tokens), None, []
        for part in tokens.split((5, 1, 1, 4, 1), 1):
            out = m(part, past_key_values=None if out is None else out.past_key_values)
            logits.append(out.logits)
    limit = 1e-5 if name in SWAPPED else FP64_LIMIT  # stock norms are in fp32 whatever the model's dtype
    same((torch.cat(logits, 1),), (whole.logits,), limit)
    assert out.past_key_values.get_seq_length() == 12


@every_model
def test_default_of_use_cache(name: str) -> None:
    """A cache in evaluation if the config says so, none while training; an explicit choice wins."""
    m = build(name)
    cache = m(ids(1, 3)).past_key_values
    kind = KDAOnlyCacheLayer if name in ALL_KDA else KDACacheLayer
    linear = [c for c, t in zip(cache.layers, m.config.layer_types, strict=True) if t == "linear_attention"]
    assert linear
    assert all(type(layer) is kind for layer in linear)
    assert cache.get_seq_length() == 3
    assert m(ids(1, 3), use_cache=False).past_key_values is None
    m.train()
    assert m(ids(1, 3)).past_key_values is None
    assert m(ids(1, 3), use_cache=True).past_key_values is not None
    m.eval()
    m.config.use_cache = False
    assert m(ids(1, 3)).past_key_values is None


@pytest.mark.parametrize(
    ("name", "positions"), [(name, given) for name in OURS for given in (False, True) if given or name in KDA_LM]
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_logits(name: str, side: str, positions: bool) -> None:
    """Real tokens' logits are those of the row alone, whichever side the padding is on; positions, which only rotary
    embeddings need, change nothing."""
    m, T = model(name), 8
    for lengths in ((8, 5, 1), (5,)):
        mask = torch.stack([(torch.arange(T) < n).long() for n in lengths])
        mask = mask.flip(1) if side == "left" else mask
        tokens = ids(len(lengths), T)
        position_ids = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0) if positions else None
        with torch.no_grad():
            got = m(tokens, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
            for row, real, logits in zip(tokens, mask.bool(), got, strict=True):
                same((logits[real],), (m(row[None, real]).logits[0],))


@every_model
def test_logits_to_keep(name: str) -> None:
    m, tokens = model(name), ids(2, 7)
    want = m(tokens).logits
    for kept, index in ((0, slice(None)), (1, slice(-1, None)), (3, slice(-3, None)), (torch.tensor([0, 4]), [0, 4])):
        same((m(tokens, logits_to_keep=kept).logits,), (want[:, index],))


@pytest.mark.parametrize("name", [n for n in OURS if n != "key_bias"])  # whose layers have no weights to record
def test_recorded_outputs(name: str) -> None:
    """The input of every layer and the output of the model; the attention weights of the softmax layers."""
    m, tokens, B, T = model(name, "eager"), ids(2, 7), 2, 7
    out = m(tokens, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 1 + m.config.num_hidden_layers
    assert torch.equal(out.hidden_states[0], m.model.embed_tokens(tokens))
    assert torch.equal(out.hidden_states[-1], m.model(tokens).last_hidden_state)
    kinds = m.config.layer_types
    assert len(out.attentions or ()) == len(kinds) - kinds.count("linear_attention")
    for weights in out.attentions or ():
        assert weights.shape == (B, m.config.num_attention_heads, T, T)
        torch.testing.assert_close(weights.sum(-1), torch.ones(B, 4, T, dtype=FP64), rtol=0, atol=1e-6)  # fp32 softmax
        assert torch.equal(weights, weights.tril())
    plain = m(tokens)
    assert plain.hidden_states is None
    assert plain.attentions is None
    assert isinstance(m(tokens, return_dict=False), tuple)


EXPERTS = ("qwen3_5_moe", "qwen4_exp", "lara_mini")  # eager ones, which read values as indexers do
READ = [f"swapped {family}" for family in ("glm5_next", *EXPERTS)]


@pytest.mark.parametrize("name", [n for n in (*OURS, *SWAPPED) if n not in READ])
def test_the_meta_device(name: str) -> None:
    """Shapes without values, as stock models compute them: a pass, a decode step, a backward."""
    m, tokens = build(name, FP32).to("meta"), ids(2, 9).to("meta")
    out = m(tokens, use_cache=True)
    assert out.logits.shape == (2, 9, m.config.vocab_size)
    assert m(tokens[:, :1], past_key_values=out.past_key_values).logits.shape == (2, 1, m.config.vocab_size)
    loss = m.train()(tokens, labels=tokens).loss
    loss.backward()
    assert loss.is_meta
    assert all(p.grad.is_meta for p in m.parameters() if p.grad is not None)


# ---------------------------------------------------------------- packed documents


@every_model
@every_attention
@pytest.mark.parametrize("how", HOW_PACKED)
def test_packed_documents_are_as_alone(name: str, attention: str, how: str) -> None:
    """Logits, the loss, and its gradient."""
    m, batch = model(name, attention), packing(how)
    tokens = batch["input_ids"]
    labels = tokens.clone()
    labels[0, list(itertools.accumulate((0, *DOCUMENTS[:-1])))] = -100
    alone = [m(part, use_cache=False).logits for part in tokens.split(DOCUMENTS, 1)]
    out = m(**batch, labels=labels)
    limit = FP64_LIMIT
    if attention == "eager" and name in HYBRIDS:  # its softmax is in fp32: as wrong as that makes the documents alone
        exact = [model(name, "sdpa")(part, use_cache=False).logits for part in tokens.split(DOCUMENTS, 1)]
        limit = budget(error(torch.cat(alone, 1).detach(), torch.cat(exact, 1).detach()), FP32)
    same((out.logits,), (torch.cat(alone, 1),), limit)
    assert out.past_key_values is None
    parts = tokens.split(DOCUMENTS, 1)
    total = sum(cross_entropy(a[0, :-1], p[0, 1:], reduction="sum") for a, p in zip(alone, parts, strict=True))
    loss = total / (sum(DOCUMENTS) - len(DOCUMENTS))
    parameters = [m.model.layers[0].mlp.down_proj.weight, m.model.layers[-1].self_attn.k_proj.weight]
    got, want = ((each, *torch.autograd.grad(each, parameters)) for each in (out.loss, loss))
    same(got, want, 1e-5)  # transformers computes losses in fp32


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("how", HOW_PACKED)
def test_a_hybrid_caches_no_packed_documents(name: str, how: str) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must be None with a cache"):
        model(name)(**packing(how), use_cache=True)
    with pytest.raises(ValueError, match="cu_seqlens must be None with a cache"):
        model(name)(**packing("cu_seqlens"), past_key_values=DynamicCache(config=model(name).config))


# ---------------------------------------------------------------- training


@every_model
def test_loss(name: str) -> None:
    """Cross entropy of the next token over labels that are not -100; Trainer's num_items_in_batch divides instead."""
    m, tokens = model(name), ids(3, 9)
    labels = tokens.clone()
    labels[0, :4] = labels[1, -3:] = -100
    out = m(tokens, labels=labels)
    assert torch.equal(out.logits, m(tokens).logits)
    losses = -log_softmax(out.logits[:, :-1], -1).gather(2, labels[:, 1:, None].clamp(min=0))[..., 0]
    total, n = losses[labels[:, 1:] != -100].sum(), (labels[:, 1:] != -100).sum()
    # transformers computes losses in fp32
    torch.testing.assert_close(out.loss.double(), total / n, rtol=2**-20, atol=0)
    out = m(tokens, labels=labels, num_items_in_batch=torch.tensor(7))
    torch.testing.assert_close(out.loss.double(), total / 7, rtol=2**-20, atol=0)
    assert m(tokens).loss is None


@every_model_and_swapped
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradient_checkpointing(name: str, use_reentrant: bool) -> None:
    """Gradients are equal, layers run twice, and a cache is refused only while training."""
    m, tokens = build(name).train(), ids(2, 9)
    attentions = attention_layers(m)

    def gradients() -> tuple[dict[str, Tensor], int]:
        m.zero_grad()
        calls: list[int] = []
        hooks = [a.register_forward_hook(lambda *_: calls.append(1)) for a in attentions]
        m(tokens, labels=tokens).loss.backward()
        for hook in hooks:
            hook.remove()
        return {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}, len(calls)

    want, calls = gradients()
    m.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=use_reentrant))
    got, checkpointed = gradients()
    assert (calls, checkpointed) == (len(attentions), 2 * len(attentions))
    assert got.keys() == want.keys()
    assert [n for n, g in got.items() if not torch.equal(g, want[n])] == []
    if name in OURS:
        assert want.keys() == dict(m.named_parameters()).keys()
        assert all(g.abs().sum() > 0 for g in got.values())
    if name in KDA_LM:
        for arguments in (dict(use_cache=True), dict(past_key_values=DynamicCache(config=m.config))):
            with pytest.raises(ValueError, match="while training with gradient checkpointing"):
                m(tokens, **arguments)
    m.eval()
    assert m(tokens, use_cache=True).past_key_values is not None
    assert torch.equal(generate(m, tokens), generate(model(name), tokens))


# ---------------------------------------------------------------- saving, loading, resizing

FRESH = """
import sys, torch, kda_layers
from transformers import AutoModelForCausalLM
assert not any("modeling_llama" in name for name in sys.modules)
torch.set_num_threads(1)
classes = dict(hybrid="KDA", llama="KDALlama", qwen2="KDAQwen2", qwen3="KDAQwen3", mistral="KDAMistral")
for name, start in classes.items():
    path = f"{sys.argv[1]}/{name}"
    m, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    saved = torch.load(path + "/expected.pt")
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert type(m).__name__ == start + "ForCausalLM" and not m.training
    with torch.no_grad():
        assert torch.equal(m(saved["ids"]).logits, saved["logits"])
"""


@every_model
def test_save_and_load(name: str, tmp_path: pathlib.Path) -> None:
    """Every tensor and the config come back bit by bit, also as the base model."""
    m = build(name, FP32)
    m.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert type(loaded) is type(m)
    assert {n: p.dtype for n, p in loaded.named_parameters()} == {n: p.dtype for n, p in m.named_parameters()}
    for n, p in m.state_dict().items():
        assert torch.equal(loaded.state_dict()[n], p), n
    assert loaded.config.layer_types == m.config.layer_types
    assert torch.equal(loaded(ids(2, 5)).logits, m(ids(2, 5)).logits)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == m.config.tie_word_embeddings
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is type(m.model)
    assert torch.equal(base(ids(2, 5)).last_hidden_state, m.model(ids(2, 5)).last_hidden_state)


@pytest.mark.slow
def test_a_fresh_process_loads_them(tmp_path: pathlib.Path) -> None:
    """`import kda_layers` is all that another process needs; it does not itself import the families."""
    for name in ("hybrid", "llama", "qwen2", "qwen3", "mistral"):
        m, tokens = build(name, FP32), ids(2, 9)
        m.save_pretrained(tmp_path / name)
        with torch.no_grad():
            torch.save({"ids": tokens, "logits": m(tokens).logits}, tmp_path / name / "expected.pt")
    environment = os.environ | dict(
        PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""
    )
    command = [sys.executable, "-c", FRESH, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@every_model
def test_bf16_load_keeps_the_gate_in_fp32(name: str, tmp_path: pathlib.Path) -> None:
    m, tokens = build(name, FP32), ids(2, 9)
    m.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    for n, p in loaded.named_parameters():
        in_fp32 = n.endswith(("A_log", "dt_bias", ".A"))
        assert p.dtype == (FP32 if in_fp32 else BF16), n
        assert not in_fp32 or torch.equal(p, m.state_dict()[n])
    out = loaded(tokens, labels=tokens)
    if name in KDA_LM:
        truth = copy.deepcopy(loaded).double()(tokens).logits.detach()
        yardstick = error(copy.deepcopy(loaded).bfloat16()(tokens).logits.detach(), truth)  # the gate rounded as well
        assert error(out.logits.detach(), truth) <= budget(yardstick, BF16)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in loaded.parameters())
    assert generate(loaded, tokens).shape == (2, 19)


@pytest.mark.parametrize("name", ["hybrid", "llama", "qwen3", "mistral"])
@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_offloaded_weights(name: str, offload: str, tmp_path: pathlib.Path) -> None:
    """accelerate fetches weights module by module, so that none may be read from outside its module."""
    accelerate = pytest.importorskip("accelerate")
    m, tokens = build(name, FP32), ids(2, 9)
    want, generated = m(tokens).logits, generate(m, tokens)
    folder = (tmp_path,) if offload == "disk_offload" else ()
    getattr(accelerate, offload)(m, *folder, execution_device=torch.device("cpu"))
    assert next(m.parameters()).is_meta
    assert torch.equal(m(tokens).logits, want)
    assert torch.equal(generate(m, tokens), generated)


@pytest.mark.parametrize("name", ["softplus_tied", "llama", "qwen3", "mistral"])
def test_missing_gates_are_initialised(name: str, tmp_path: pathlib.Path) -> None:
    """A checkpoint without KDA layers' weights leaves no uninitialised memory behind."""
    m = build(name, FP32)
    m.save_pretrained(tmp_path, state_dict={n: p for n, p in m.state_dict().items() if "self_attn" not in n})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.embed_tokens.weight, m.model.embed_tokens.weight)
    layers = [layer for layer in attention_layers(loaded) if isinstance(layer, KimiDeltaAttention)]
    assert len(layers) == m.config.layer_types.count("linear_attention")
    softplus = m.config.linear_gate_activation == "softplus"
    for layer in layers:
        assert 0 <= layer.A_log.min() <= layer.A_log.max() <= math.log(16)
        assert (layer.A_log.min() < layer.A_log.max()) == softplus
        assert -7 < layer.dt_bias.min() < layer.dt_bias.max() < -2
        assert abs(layer.q_proj.weight.std() / 0.4 - 1) < 0.2
        assert (layer.o_norm.weight == 1).all()
        assert layer.conv1d.weight.isfinite().all()


@every_model
@pytest.mark.parametrize("size", [20, 37])
def test_resized_embeddings(name: str, size: int) -> None:
    """Kept tokens keep their logits; the loss and generation go on with the new vocabulary."""
    m, tokens = build(name, FP32), ids(2, 6, high=20)
    want, kept = m(tokens).logits, min(size, 29)
    m.resize_token_embeddings(size)
    assert m.config.vocab_size == m.get_input_embeddings().num_embeddings == m.get_output_embeddings().out_features
    got = m(tokens, labels=tokens)
    assert got.logits.shape == (2, 6, size)
    assert got.loss.isfinite()
    torch.testing.assert_close(got.logits[..., :kept], want[..., :kept])
    assert generate(m, tokens).max() < size


@every_model
def test_config_round_trip(name: str, tmp_path: pathlib.Path) -> None:
    config = copy.deepcopy(model(name).config)
    config.note = "kept"
    config.save_pretrained(tmp_path)
    on_disk = json.loads((tmp_path / "config.json").read_text())
    assert on_disk["model_type"] == config.model_type
    assert on_disk["layer_types"] == config.layer_types
    for loaded in (type(config).from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is type(config)
        assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}
        assert loaded.note == "kept"


# ---------------------------------------------------------------- compiled

COMPILED = [
    ("kda", "training"), *((name, case) for name in ("hybrid", "key_bias") for case in ("padded", "packed")),
    ("llama", "training"), ("windows", "padded"), ("mistral", "packed"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize(("name", "case"), COMPILED)
def test_compiled_model(name: str, case: str, counter: CompileCounterWithBackend) -> None:
    """One graph for every length, equal to the uncompiled model; also backward."""
    m = build(name)
    rotary = name in CONVERTED  # angles in fp32
    compiled = torch.compile(m, backend=counter, fullgraph=True, dynamic=True)
    parameters = list(m.parameters())
    with_gradients = case != "padded" and (name in KDA_LM or case == "training")
    for T in (70, 33, 129)[: 2 if rotary else 3]:
        tokens = ids(1 if case == "packed" else 3, T)
        arguments: dict[str, Any] = dict(use_cache=False)
        if case == "padded":
            arguments["attention_mask"] = (torch.arange(T) >= torch.tensor([[0], [2], [T - 1]])).long()
        if case == "packed":
            arguments["cu_seqlens"] = torch.tensor([0, 3, 3, T])
        if name in KDA_LM or with_gradients:
            arguments["labels"] = tokens
        with torch.set_grad_enabled("labels" in arguments):
            got, want = compiled(tokens, **arguments), m(tokens, **arguments)
        real = arguments.get("attention_mask", torch.ones_like(tokens)) == 1
        same((got.logits[real],), (want.logits[real],), limit=1e-6 if rotary else FP64_LIMIT)
        if with_gradients:  # of a loss in fp32
            gradients = (torch.autograd.grad(out.loss, parameters) for out in (got, want))
            same(*gradients, limit=1e-5 if rotary else 1e-6)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("name", ["kda", "hybrid", "key_bias", "llama", "qwen3", "mistral"])
def test_compiled_generation(name: str, counter: CompileCounterWithBackend) -> None:
    """With a static cache and a compile_config, transformers compiles the decode step; later calls do not recompile."""
    m = build(name)
    options = CompileConfig(fullgraph=True, dynamic=None, mode=None)
    options.backend = lambda graph, inputs: counter(graph, inputs)  # generate copies its options, but not functions
    options._compile_all_devices = True  # otherwise only accelerators compile
    graphs = []
    for seed, new in ((1, 8), (2, 5)):
        tokens, mask = ids(2, 9, seed=seed), torch.ones(2, 9, dtype=torch.long)
        mask[0, :3] = 0
        call = dict(attention_mask=mask, max_new_tokens=new)
        got = generate(m, tokens, cache_implementation="static", compile_config=options, **call)
        assert torch.equal(got, generate(m, tokens, **call))
        graphs.append(counter.frame_count)
    assert 0 < graphs[0] == graphs[1]
    assert name in CONVERTED or graphs == [1, 1]
