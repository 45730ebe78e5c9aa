"""Tests of the KDA language model alone: guesses, turns, initialisation, config files. The rest: test_models.py."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
)

from kda_layers import KDAConfig, KDAForCausalLM, KimiDeltaAttention
from tests.kernels.cases import BF16, FP32, FP64, budget, error
from tests.modeling.common import same
from tests.modeling.models import (
    DOCUMENTS,
    GUESSES,
    KDA_LM,
    TINY,
    build,
    generate,
    guessable,
    ids,
    left_padded,
    model,
    packing,
)

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "kda_layers" / "configs").glob("*.json"))
every_model = pytest.mark.parametrize("name", KDA_LM)
kda_and_hybrid = pytest.mark.parametrize("name", ["kda", "hybrid"])


# ---------------------------------------------------------------- generation


@every_model
def test_padding_in_a_second_turn(name: str) -> None:
    """Rows with other numbers of padding tokens in each turn, then decoding: each row as if they were not there."""
    m = model(name)
    turns = [
        left_padded([ids(n, seed=10 * turn + n) for n in lengths]) for turn, lengths in enumerate(((7, 4), (1, 5)))
    ]
    turns.append((ids(2, 1, seed=9), torch.ones(2, 1, dtype=torch.long)))
    with torch.no_grad():
        out, got = None, []
        for turn in range(3):
            mask = torch.cat([m for _, m in turns[: turn + 1]], 1)
            out = m(turns[turn][0], attention_mask=mask, past_key_values=out and out.past_key_values)
            got.append(out.logits)
        tokens, mask = (torch.cat(parts, 1) for parts in zip(*turns, strict=True))
        for row in range(2):
            real = mask[row] == 1
            same((torch.cat(got, 1)[row, real],), (m(tokens[row : row + 1, real]).logits[0],))


@kda_and_hybrid
@pytest.mark.parametrize("how", ["prompt lookup", "draft"])
def test_guesses_on_a_given_cache(name: str, how: str) -> None:
    """A user's own empty cache, which afterwards goes on without guesses."""
    m, draft = guessable(name)
    tokens, cache = ids(1, 12, seed=5, high=7), DynamicCache(config=m.config)
    got = generate(m, tokens, past_key_values=cache, max_new_tokens=20, **GUESSES[how](draft))
    want = generate(m, tokens, max_new_tokens=30)
    assert torch.equal(got, want[:, :32])
    assert torch.equal(generate(m, got, past_key_values=cache), want)


def test_a_draft_of_another_kind() -> None:
    """An all-KDA draft for a hybrid target and the reverse, both unrelated to their target: mostly wrong guesses."""
    for target, draft in itertools.permutations(("kda", "hybrid")):
        m, other = guessable(target)[0], build(draft, vocab_size=7, pad_token_id=None, seed=5)
        tokens = ids(1, 8, high=7)
        assert torch.equal(generate(m, tokens, assistant_model=other), generate(m, tokens))


# ---------------------------------------------------------------- caches and masks in forward


@kda_and_hybrid
def test_prepared_masks(name: str) -> None:
    """A dict of masks by layer type, which generate passes with a static cache, means the same as the 2D mask."""
    m, tokens, T = model(name), ids(2, 5), 5
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    causal = (torch.ones(T, T).tril() * mask[:, None]).bool()[:, None]
    masks = {"linear_attention": mask, "full_attention": causal}
    with torch.no_grad():
        got, want = (m(tokens, attention_mask=each).logits[mask == 1] for each in (masks, mask))
    same((got,), (want,))


def test_inputs_embeds_and_errors() -> None:
    m, tokens = model("hybrid"), ids(2, 5)
    embeds = m.model.embed_tokens(tokens)
    assert torch.equal(m(inputs_embeds=embeds).logits, m(tokens).logits)
    for arguments in ({}, dict(input_ids=tokens, inputs_embeds=embeds)):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            m(**arguments)
    assert torch.equal(generate(m, tokens), torch.cat((tokens, m.generate(inputs_embeds=embeds, max_new_tokens=10)), 1))


@pytest.mark.parametrize("name", ["hybrid", "grouped"])
@pytest.mark.parametrize("padding", [0, 3])
def test_eager_attention_is_sdpa(name: str, padding: int) -> None:
    """Eager's logits are as right as those of sdpa, and the generated tokens are the same. In fp32: with fp64 inputs
    the softmax, which is in fp32 as everywhere in transformers, is not finite where all is masked."""
    tokens, mask = ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :padding] = 0
    m = build(name, FP32)
    truth = copy.deepcopy(m).double()(tokens, attention_mask=mask).logits[mask == 1].detach()
    errors, generated = [], []
    for attention in ("sdpa", "eager"):
        m.set_attn_implementation(attention)
        errors.append(error(m(tokens, attention_mask=mask).logits[mask == 1].detach(), truth))
        generated.append(generate(m, tokens, attention_mask=mask))
    assert errors[1] <= budget(errors[0], FP32)
    assert torch.equal(*generated)


# ---------------------------------------------------------------- packed documents


@pytest.mark.parametrize("name", ["kda", "softplus_tied"])
def test_packed_prefill_of_the_model(name: str) -> None:
    """All KDA: the cache of packed documents goes on as a batch of them."""
    m, batch, step = model(name), packing("cu_seqlens"), ids(len(DOCUMENTS), 1, seed=9)
    with torch.no_grad():
        cache = m(**batch, use_cache=True).past_key_values
        got = m(step, past_key_values=cache).logits
        for row, part in enumerate(batch["input_ids"].split(DOCUMENTS, 1)):
            same((got[row],), (m(torch.cat((part, step[row : row + 1]), 1)).logits[0, -1:],))


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("name", ["kda", "hybrid"])
def test_training_is_reproducible(name: str) -> None:
    """Two steps from the same seed give a held-out loss of the same bits; they also learn."""

    def train(seed: int, steps: int = 2) -> float:
        m = build(name, FP32, seed).train()
        optimizer = torch.optim.AdamW(m.parameters(), lr=3e-3)
        for step in range(steps):
            tokens = ids(2, 40, seed=step, high=5)
            m(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            held_out = ids(2, 40, seed=99, high=5)
            return float(m.eval()(held_out, labels=held_out).loss)

    assert train(0) == train(0)
    assert train(0) != train(1)
    assert train(0) < train(0, steps=0)


@every_model
def test_autocast(name: str) -> None:
    """A fp32 model under bf16 autocast is as wrong as the bf16 model, and its gradients arrive in fp32."""
    m, tokens = build(name, FP32), ids(2, 9)
    truth = copy.deepcopy(m).double()(tokens).logits.detach()
    yardstick = error(copy.deepcopy(m).bfloat16()(tokens).logits.detach(), truth)
    with torch.autocast("cpu", BF16):
        out = m(tokens, labels=tokens)
    out.loss.backward()
    assert error(out.logits.detach(), truth) <= budget(yardstick, BF16)
    assert all(p.grad.dtype == FP32 and p.grad.isfinite().all() for p in m.parameters())


# ---------------------------------------------------------------- parameters


def test_loaded_gates_keep_the_optimizers_mark(tmp_path: pathlib.Path) -> None:
    build("hybrid", FP32).save_pretrained(tmp_path)
    loaded = KDAForCausalLM.from_pretrained(tmp_path)
    marked = {n.split(".")[-1] for n, p in loaded.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"A_log", "dt_bias"}


@every_model
def test_initialisation(name: str) -> None:
    """Linear and embedding weights of the configured spread, norms at one, the padding row at zero, gates as the
    layer's own, biases that are equal; building it again from the config, also through the meta device, is the same
    model."""
    torch.manual_seed(1)
    m = KDAForCausalLM(KDAConfig(**(TINY | KDA_LM[name])))
    for n, p in m.named_parameters():
        if n.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight")) and p.numel() > 500:
            assert abs(p.std() / 0.4 - 1) < 5 / math.sqrt(2 * p.numel()) + 0.02, n  # 5 sigma, and the zero row
        elif "norm" in n:
            assert (p == 1).all(), n
        elif n.endswith(".A"):
            assert (p == 0).all(), n
    assert (m.model.embed_tokens.weight[0] == 0).all()
    for layer in m.modules():
        if isinstance(layer, KimiDeltaAttention):
            dt = torch.nn.functional.softplus(layer.dt_bias)
            assert 0.99e-3 < dt.min() < dt.max() < 1.01e-1
            rate = layer.A_log.exp()
            assert (rate == 1).all() if name != "softplus_tied" else 1 <= rate.min() < rate.max() <= 16
    torch.manual_seed(1)
    again = AutoModelForCausalLM.from_config(m.config)
    assert type(again) is KDAForCausalLM
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), m.parameters(), strict=True))


def test_tied_embeddings(tmp_path: pathlib.Path) -> None:
    """They share storage: built, loaded, resized; the untied ones do not."""
    m = build("softplus_tied", FP32)
    m.save_pretrained(tmp_path)
    for each in (m, KDAForCausalLM.from_pretrained(tmp_path)):
        assert each.lm_head.weight is each.model.embed_tokens.weight
        each.resize_token_embeddings(31)
        assert each.lm_head.weight is each.model.embed_tokens.weight
        assert each(ids(1, 3)).logits.shape[-1] == 31
    assert build("kda").lm_head.weight is not build("kda").model.embed_tokens.weight


# ---------------------------------------------------------------- the config

BAD_FIELDS = [
    (dict(layer_types=["linear_attention", "sliding_attention"]), "layer_types must hold 2 of"),
    (dict(layer_types=["linear_attention"]), r"layer_types must hold 2 of .*got \['linear_attention'\]"),
    (dict(linear_num_value_heads=3), "linear_num_value_heads must be a multiple of linear_num_heads = 2, got 3"),
    (dict(num_key_value_heads=3), "num_attention_heads must be a multiple of num_key_value_heads = 3, got 4"),
    (dict(full_attention_interval=-1), "full_attention_interval must be 0 or more, got -1"),
    (dict(hidden_size=0), "hidden_size must be at least 1, got 0"),
    (dict(hidden_size=3), "head_dim must be at least 1, got 0"),
    (dict(linear_conv_kernel_dim=0), "linear_conv_kernel_dim must be at least 1, got 0"),
    (dict(linear_gate_activation="tanh"), "linear_gate_activation .*tanh"),
    (dict(linear_gate_activation="softplus"), "linear_lower_bound must be None with .*softplus"),
    (dict(linear_lower_bound=None), "linear_lower_bound must be given"),
    (dict(linear_lower_bound=-6.0), r"linear_lower_bound must be in \[-5, 0\), got -6"),
    (dict(attention_bias="value"), "attention_bias must be 'none' or 'key', got 'value'"),
    (dict(attention_bias="key"), "attention_bias must be 'none' without a layer of 'full_attention', got 'key'"),
    (
        dict(attention_bias="key", full_attention_interval=2, attention_dropout=0.1),
        "attention_dropout must be 0 with attention_bias = 'key', .* got 0.1",
    ),
]
WRONG_TYPES = [
    dict(vocab_size=2.5), dict(hidden_size="32"), dict(use_cache="no"), dict(linear_gate_activation=3),
    dict(num_attention_heads=True), dict(linear_allow_neg_eigval="yes"), dict(linear_head_dim=None),
    dict(full_attention_interval=2.0), dict(layer_types="linear_attention"), dict(rms_norm_eps="small"),
    dict(attention_bias=True),
]  # fmt: skip


@every_model
def test_config_files_hold_the_fields(name: str, tmp_path: pathlib.Path) -> None:
    """A file holds the given fields, and the JSON of a config that was built from a file has all that the file has."""
    config = KDAConfig(**(TINY | KDA_LM[name]), note="kept")
    config.save_pretrained(tmp_path)
    on_disk = json.loads((tmp_path / "config.json").read_text())
    loaded = KDAConfig.from_pretrained(tmp_path)
    assert loaded.to_diff_dict().items() >= dict(TINY | KDA_LM[name], model_type="kda_lm", note="kept").items()
    again = json.loads(KDAConfig(**on_disk).to_json_string())
    assert again.items() >= {n: v for n, v in on_disk.items() if n != "transformers_version"}.items()


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS, ids=[str(f) for f, _ in BAD_FIELDS])
def test_refused_configs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        KDAConfig(**(TINY | fields))


@pytest.mark.parametrize("fields", WRONG_TYPES, ids=str)
def test_wrong_types_in_a_config(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises((TypeError, StrictDataclassError), match=name):
        KDAConfig(**(TINY | fields))


def test_config_defaults() -> None:
    config = KDAConfig(num_hidden_layers=8, full_attention_interval=4, hidden_size=100, num_attention_heads=5)
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert (config.intermediate_size, config.head_dim, config.num_key_value_heads) == (320, 20, 5)
    assert (config.linear_num_value_heads, config.linear_value_head_dim) == (8, 128)
    assert set(KDAConfig().layer_types) == {"linear_attention"}


def parameter_count(c: dict[str, Any]) -> int:
    """From the fields of a config file: every matrix and vector of the architecture, counted by hand."""
    D, H, K, n = c["hidden_size"], c["linear_num_heads"], c["linear_head_dim"], c["num_hidden_layers"]
    HV, V = c.get("linear_num_value_heads", H), c.get("linear_value_head_dim", K)
    heads = c["num_attention_heads"]
    d = c.get("head_dim", D // heads)
    inner = c.get("intermediate_size", math.ceil(8 * D / 3 / 64) * 64)
    qkv = 2 * H * K + HV * V
    kda = D * qkv + qkv * c.get("linear_conv_kernel_dim", 4) + HV * V * D  # projections in, convolution, out
    kda += D * V + V * HV * K + HV + HV * K  # decay: two low-rank factors, A_log, dt_bias
    kda += D * HV + D * V + V * HV * V + V  # beta, output gate of low rank, its norm
    softmax = 2 * D * heads * d + 2 * D * c.get("num_key_value_heads", heads) * d
    interval = c.get("full_attention_interval", 0)
    full = n // interval if interval else 0
    shared = n * (3 * D * inner + 2 * D) + D
    embeddings = c["vocab_size"] * D * (1 if c["tie_word_embeddings"] else 2)
    return (n - full) * kda + full * softmax + shared + embeddings


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_parameter_counts(path: pathlib.Path) -> None:
    with torch.device("meta"):
        m = KDAForCausalLM(KDAConfig.from_json_file(path))
    count = sum(p.numel() for p in m.parameters())
    assert count == parameter_count(json.loads(path.read_text()))
    named = {"120m": 120e6, "1.3b": 1.3e9}.get(path.stem)
    assert named is None or abs(count / named - 1) < 0.1


def test_every_config_file_is_counted() -> None:
    assert {p.stem for p in CONFIGS} >= {"tiny", "reference", "120m", "1.3b"}


# ---------------------------------------------------------------- compiled


IN_A_FRESH_PROCESS = """
import torch
from kda_layers import KDAConfig, KDAForCausalLM

sizes = dict(linear_num_heads=2, linear_head_dim=16, num_attention_heads=2, intermediate_size=32)
model = KDAForCausalLM(KDAConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, **sizes))
ids = torch.arange(20)[None]
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
"""


@pytest.mark.slow
@pytest.mark.compiles
def test_compiled_first_of_all_in_a_fresh_process() -> None:
    """The trace finds the backends, which nothing has looked for yet."""
    done = subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("case", ["padded", "packed"])
def test_compiled_layer(case: str, counter: CompileCounterWithBackend) -> None:
    """Forward and backward in one graph for every length, equal to the uncompiled layer."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(16, 2, 6, num_value_heads=4, value_head_dim=8).double()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for T in (70, 33, 129):
        x = torch.randn(1 if case == "packed" else 3, T, 16, dtype=FP64, requires_grad=True)
        arguments: dict[str, Tensor] = {}
        if case == "padded":
            arguments["attention_mask"] = (torch.arange(T) >= torch.tensor([[0], [2], [T - 1]])).long()
        if case == "packed":
            arguments["cu_seqlens"] = torch.tensor([0, 3, 3, T])
        inputs = (x, *layer.parameters())
        got, want = compiled(x, **arguments), layer(x, **arguments)
        same((got,), (want,))
        weight = torch.randn_like(want)
        same(*(torch.autograd.grad((o * weight).sum(), inputs) for o in (got, want)))
    assert counter.frame_count == 1
