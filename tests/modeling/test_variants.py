"""Llama, Qwen3 and Mistral with KDA layers as transformers uses them, and converting the stock models.

Tokens are compared in fp64, where two ways of computing the same logits cannot disagree about the largest one (angles
of the rotary embedding are fp32 in transformers, but the same ones both ways).
"""

from __future__ import annotations

import copy
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    CompileConfig,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    Trainer,
    TrainingArguments,
)

import kda_layers
from kda_layers import KimiDeltaAttention
from kda_layers import swap_attention as convert
from kda_layers.modeling.cache import KDACacheLayer, KDAOnlyCacheLayer
from kda_layers.modeling.families import CONVERTED, load
from tests.kernels.cases import BF16, FP32, FP64, FP64_LIMIT
from tests.modeling import test_model
from tests.modeling.common import same
from tests.modeling.test_model import (
    CACHES,
    DOCUMENTS,
    GUESSES,
    SEARCHES,
    generate,
    ids,
    left_padded,
    packing,
)

counter = test_model.counter  # a fixture
ROOT = pathlib.Path(__file__).parents[2]
TINY = dict(
    vocab_size=29, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, initializer_range=0.4, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
STOCK: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, dict(tie_word_embeddings=True)),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, dict(sliding_window=None)),
    "windows": (
        Qwen3Config, Qwen3ForCausalLM,
        dict(use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2,
             num_hidden_layers=4),
    ),
}  # fmt: skip
MODELS: dict[str, tuple[str, Any, dict[str, Any]]] = {  # family, layers, fields
    "llama": ("llama", "1:1", {}),
    "llama, all": ("llama", "all", dict(linear_num_heads=2)),
    "qwen3": ("qwen3", [1], dict(linear_gate_activation="softplus", linear_lower_bound=None, linear_gate_rank=0)),
    "windows": ("windows", [1], dict(linear_allow_neg_eigval=True)),
    "mistral": ("mistral", [0, -2], dict(linear_conv_kernel_dim=3)),
}
every_model = pytest.mark.parametrize("name", MODELS)
every_family = pytest.mark.parametrize("family", CONVERTED)


def stock(family: str, dtype: torch.dtype = FP64, seed: int = 1, **fields: Any) -> PreTrainedModel:
    """A random stock model; norms are random, too, so that one that is forgotten shows."""
    torch.manual_seed(seed)
    config, model_class, more = STOCK[family]
    m = model_class(config(**(TINY | more | fields)))
    with torch.no_grad():
        for name, p in m.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    return m.to(dtype).eval()


def build(name: str, dtype: torch.dtype = FP64, seed: int = 1, **fields: Any) -> PreTrainedModel:
    family, layers, options = MODELS[name]
    return convert(stock(family, dtype, seed, **fields), layers, **options)


@functools.cache
def model(name: str) -> PreTrainedModel:
    """A model that tests share and leave as it is."""
    return build(name)


# ---------------------------------------------------------------- generation


@every_model
def test_greedy_is_the_largest_logit_of_a_whole_pass(name: str) -> None:
    m, want = model(name), ids(3, 9)
    with torch.no_grad():
        for _ in range(10):
            want = torch.cat((want, m(want, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(generate(m, ids(3, 9)), want)
    assert len(set(want[:, 9:].flatten().tolist())) >= 5, "the output is too uniform to show an error"


@every_model
@pytest.mark.parametrize("how", CACHES)
def test_caches_change_nothing(name: str, how: str) -> None:
    m = model(name)
    for tokens in (ids(3, 9), ids(1, 70, seed=2)):  # the second call uses the static cache of the first again
        assert torch.equal(generate(m, tokens, **CACHES[how]), generate(m, tokens))


@every_model
@pytest.mark.parametrize("how", SEARCHES)
def test_searches_with_and_without_a_cache(name: str, how: str) -> None:
    m, got = model(name), []
    for cache in ({}, CACHES["none"], CACHES["static"]):
        torch.manual_seed(3)
        got.append(generate(m, ids(2, 6), **SEARCHES[how], **cache))
    assert len(got[0]) == 2 * SEARCHES[how].get("num_return_sequences", 1)
    assert len(set(map(tuple, got[0].tolist()))) == len(got[0]), "returned sequences are equal"
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])


@every_model
@pytest.mark.parametrize("how", ["dynamic", "none", "static", "beams", "chunked prefill"])
def test_left_padded_rows_are_as_alone(name: str, how: str) -> None:
    m, rows = model(name), [ids(n, seed=n) for n in (9, 6, 2)]
    tokens, mask = left_padded(rows)
    options = {"dynamic": {}, "beams": dict(num_beams=2)}.get(how) or CACHES.get(how, {})
    got = generate(m, tokens, attention_mask=mask, **options)
    options = dict(num_beams=2) if how == "beams" else {}
    for row, out in zip(rows, got, strict=True):
        assert torch.equal(out[9:], generate(m, row[None], **options)[0, len(row) :])


@every_model
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_logits(name: str, side: str) -> None:
    """Real tokens' logits are those of the row alone, whichever side the padding is on."""
    m, T = model(name), 8
    mask = torch.stack([(torch.arange(T) < n).long() for n in (8, 5, 1)])
    mask = mask.flip(1) if side == "left" else mask
    tokens = ids(3, T)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        got = m(tokens, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
        for row, real, logits in zip(tokens, mask.bool(), got, strict=True):
            same((logits[real],), (m(row[None, real]).logits[0],))


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
    turn = torch.cat((first.sequences, ids(2, 4, seed=2)), 1)
    cache = first.past_key_values
    if kind == "copied":
        cache = copy.deepcopy(cache)
        generate(m, turn.flip(0), past_key_values=first.past_key_values)  # moves the original on, not the copy
    assert torch.equal(generate(m, turn, past_key_values=cache), generate(m, turn))


@every_model
@pytest.mark.parametrize("how", GUESSES)
def test_guessed_tokens_change_nothing(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt lookup and assisted generation give the greedy tokens in fewer passes, some guesses being taken back."""
    if (name, how) == ("windows", "draft") and transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 cannot draft with sliding windows, with stock models neither")
    m = build(name, vocab_size=7, pad_token_id=None)  # few tokens, so that a guess is often right
    draft = copy.deepcopy(m)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(0.15 * p.std(correction=0) * torch.randn_like(p))
    forward, crop, passes, removed = m.model.forward, KDACacheLayer.crop, [], []
    monkeypatch.setattr(KDACacheLayer, "crop", lambda self, n: removed.append(abs(int(n))) or crop(self, n))
    monkeypatch.setattr(m.model, "forward", lambda **kwargs: passes.append(1) or forward(**kwargs))
    saved = 0
    for seed in range(3):
        tokens = ids(1, 12, seed=seed, high=7)
        want = generate(m, tokens, max_new_tokens=20)
        passes.clear()
        assert torch.equal(generate(m, tokens, max_new_tokens=20, **GUESSES[how](draft)), want)
        saved += 20 - len(passes)
    assert saved > 0, "no guess was right"
    assert any(removed), "no guess was wrong"


@every_model
def test_default_of_use_cache(name: str) -> None:
    """The forward pass makes a cache whose layers can take tokens back; none while training."""
    m = build(name)
    cache = m(ids(1, 3)).past_key_values
    kind = KDAOnlyCacheLayer if name == "llama, all" else KDACacheLayer
    linear = [c for c, t in zip(cache.layers, m.config.layer_types, strict=True) if t == "linear_attention"]
    assert linear
    assert all(type(layer) is kind for layer in linear)
    assert cache.get_seq_length() == 3
    assert m.train()(ids(1, 3)).past_key_values is None


# ---------------------------------------------------------------- the stock models' own computation


@pytest.mark.parametrize("family", STOCK)
@pytest.mark.parametrize("padding", [0, 3])
def test_without_kda_layers_it_is_the_stock_model(family: str, padding: int) -> None:
    """Softmax layers, windows, positions and masks are those of the family, to the last bit."""
    m = stock(family, FP32, sliding_window=4) if family == "mistral" else stock(family, FP32)
    window = getattr(m.config, "sliding_window", None)
    kinds = ["full_attention" if window is None else "sliding_attention"] * m.config.num_hidden_layers
    kinds = getattr(m.config, "layer_types", None) or kinds
    stored = m.config.to_dict() | dict(model_type="kda_" + m.config.model_type, layer_types=kinds)
    variant = AutoModelForCausalLM.from_config(AutoConfig.for_model(**stored)).eval()
    variant.load_state_dict(m.state_dict())
    tokens, mask = ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :padding] = 0
    arguments = dict(attention_mask=mask, output_hidden_states=True)
    got, want = variant(tokens, **arguments), m(tokens, **arguments)
    for g, w in zip((got.logits, *got.hidden_states), (want.logits, *want.hidden_states), strict=True):
        assert torch.equal(g[mask == 1], w[mask == 1])
    assert torch.equal(generate(variant, tokens, attention_mask=mask), generate(m, tokens, attention_mask=mask))


@every_model
def test_recorded_outputs(name: str) -> None:
    """The input of every layer and the output of the model; the attention weights of the softmax layers."""
    m, tokens = build(name, FP32), ids(2, 7)
    m.set_attn_implementation("eager")
    out = m(tokens, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 1 + m.config.num_hidden_layers
    assert torch.equal(out.hidden_states[0], m.model.embed_tokens(tokens))
    assert torch.equal(out.hidden_states[-1], m.model(tokens).last_hidden_state)
    kinds = m.config.layer_types
    assert len(out.attentions or ()) == len(kinds) - kinds.count("linear_attention")


# ---------------------------------------------------------------- packed documents


@every_model
@pytest.mark.parametrize("how", ["cu_seqlens", "position_ids", "seq_idx", "flash"])
def test_packed_documents_are_as_alone(name: str, how: str) -> None:
    m, batch = model(name), packing(how)
    with torch.no_grad():
        alone = [m(part, use_cache=False).logits for part in batch["input_ids"].split(DOCUMENTS, 1)]
        out = m(**batch)
    same((out.logits,), (torch.cat(alone, 1),), FP64_LIMIT)
    assert out.past_key_values is None


@pytest.mark.parametrize("name", ["llama", "windows"])
def test_a_hybrid_caches_no_packed_documents(name: str) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must be None with a cache"):
        model(name)(**packing("cu_seqlens"), use_cache=True)


# ---------------------------------------------------------------- training


@every_model
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradient_checkpointing(name: str, use_reentrant: bool) -> None:
    """Gradients are equal, and layers run twice."""
    m, tokens = build(name).train(), ids(2, 9)

    def gradients() -> tuple[list[Tensor], int]:
        m.zero_grad()
        calls: list[int] = []
        hooks = [layer.self_attn.register_forward_hook(lambda *_: calls.append(1)) for layer in m.model.layers]
        m(tokens, labels=tokens).loss.backward()
        for hook in hooks:
            hook.remove()
        return [p.grad.clone() for p in m.parameters()], len(calls)

    want, calls = gradients()
    m.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=use_reentrant))
    got, checkpointed = gradients()
    assert (calls, checkpointed) == (len(m.model.layers), 2 * len(m.model.layers))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert all(g.abs().sum() > 0 for g in got)


def trainer(m: PreTrainedModel, folder: pathlib.Path, steps: int) -> Trainer:
    data = [dict(input_ids=row, labels=row) for row in ids(16, 12)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=4, learning_rate=1e-2,
        lr_scheduler_type="constant", report_to=[], disable_tqdm=True, use_cpu=True, save_total_limit=3,
    )  # fmt: skip
    return Trainer(model=m, args=arguments, train_dataset=data)


@every_family
def test_trainer_resumes(family: str, tmp_path: pathlib.Path) -> None:
    """Four steps, and two steps with two more from the checkpoint, end in the same weights; and they learn."""
    pytest.importorskip("accelerate")
    m = build(family, FP32)
    before, tokens = copy.deepcopy(m.state_dict()), ids(16, 12)
    loss = m(tokens, labels=tokens).loss
    trainer(m, tmp_path / "whole", 4).train()
    trainer(build(family, FP32), tmp_path / "parts", 2).train()
    resumed = AutoModelForCausalLM.from_pretrained(tmp_path / "parts" / "checkpoint-2")
    trainer(resumed, tmp_path / "parts", 4).train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    for name, tensor in m.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
        assert not torch.equal(before[name], tensor), name
    assert m.eval()(tokens, labels=tokens).loss < loss


@every_family
def test_lora_on_kda_layers(family: str) -> None:
    """Adapters on projections of the KDA layers train, change the output, and merge into the weights."""
    peft = pytest.importorskip("peft")
    m, tokens = build(family), ids(4, 12)
    linear = [i for i, kind in enumerate(m.config.layer_types) if kind == "linear_attention"]
    targets = ["q_proj", "k_proj", "v_proj", "b_proj", "o_proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, layers_to_transform=linear, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(m, config).double()
    names = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert len(names) == 2 * len(targets) * len(linear)
    assert all(f"layers.{i}.self_attn." in " ".join(names) for i in linear)
    before = adapted(tokens, labels=tokens)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        adapted(tokens, labels=tokens).loss.backward()
        optimizer.step()
    adapted.eval()
    after = adapted(tokens, labels=tokens)
    assert after.loss < before.loss
    merged = adapted.merge_and_unload()
    assert type(merged) is type(m)
    same((merged(tokens).logits,), (after.logits,))


# ---------------------------------------------------------------- saving and loading

FRESH = """
import sys, torch, kda_layers
from transformers import AutoModelForCausalLM
assert not any("modeling_llama" in name for name in sys.modules)
torch.set_num_threads(1)
for family, name in (("llama", "KDALlama"), ("qwen3", "KDAQwen3"), ("mistral", "KDAMistral")):
    path = f"{sys.argv[1]}/{family}"
    m, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    saved = torch.load(path + "/expected.pt")
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert type(m).__name__ == name + "ForCausalLM" and not m.training
    with torch.no_grad():
        assert torch.equal(m(saved["ids"]).logits, saved["logits"])
"""


@every_model
def test_save_and_load(name: str, tmp_path: pathlib.Path) -> None:
    m = build(name, FP32)
    m.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert type(loaded) is type(m)
    assert loaded.config.layer_types == m.config.layer_types
    for n, p in m.state_dict().items():
        assert torch.equal(loaded.state_dict()[n], p), n
    assert torch.equal(loaded(ids(2, 5)).logits, m(ids(2, 5)).logits)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == m.config.tie_word_embeddings
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is type(m.model)
    assert torch.equal(base(ids(2, 5)).last_hidden_state, m.model(ids(2, 5)).last_hidden_state)


def test_a_fresh_process_loads_them(tmp_path: pathlib.Path) -> None:
    """`import kda_layers` is all that another process needs; it does not itself import the families."""
    for family in ("llama", "qwen3", "mistral"):
        m, tokens = build(family, FP32), ids(2, 9)
        m.save_pretrained(tmp_path / family)
        with torch.no_grad():
            torch.save({"ids": tokens, "logits": m(tokens).logits}, tmp_path / family / "expected.pt")
    run_python(["-c", FRESH, str(tmp_path)], tmp_path)


def run_python(command: list[str], folder: pathlib.Path) -> None:
    environment = os.environ | dict(
        PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""
    )
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@every_model
def test_bf16_load_keeps_the_gate_in_fp32(name: str, tmp_path: pathlib.Path) -> None:
    m, tokens = build(name, FP32), ids(2, 9)
    m.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    for n, p in loaded.named_parameters():
        in_fp32 = n.endswith(("A_log", "dt_bias"))
        assert p.dtype == (FP32 if in_fp32 else BF16), n
        assert not in_fp32 or torch.equal(p, m.state_dict()[n])
    out = loaded(tokens, labels=tokens)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in loaded.parameters())
    assert generate(loaded, tokens).shape == (2, 19)


@every_family
def test_offloaded_weights(family: str) -> None:
    """accelerate fetches weights module by module, so that none may be read from outside its module."""
    accelerate = pytest.importorskip("accelerate")
    m, tokens = build(family, FP32), ids(2, 9)
    want, generated = m(tokens).logits, generate(m, tokens)
    accelerate.cpu_offload(m, execution_device=torch.device("cpu"))
    assert next(m.parameters()).is_meta
    assert torch.equal(m(tokens).logits, want)
    assert torch.equal(generate(m, tokens), generated)


PARALLEL = """
import sys, torch
torch.set_num_threads(1)
import kda_layers
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
m = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=DistributedConfig(tp_size=2))
saved = torch.load(sys.argv[1] + "/expected.pt")
sharded = {n for n, p in m.named_parameters() if hasattr(p, "to_local") and p.to_local().shape != p.shape}
assert any(".mlp." in n for n in sharded) and not any(".self_attn." in n for n in sharded), sharded
with torch.no_grad():
    torch.testing.assert_close(m(saved["ids"]).logits, saved["logits"])
    tokens = m.generate(saved["ids"], max_new_tokens=5, do_sample=False)
assert torch.equal(tokens, saved["tokens"])
"""


def test_tensor_parallel(tmp_path: pathlib.Path) -> None:
    """Two processes share the MLPs' columns and have all of the attention."""
    pytest.importorskip("accelerate")
    m, tokens = build("qwen3", FP32, vocab_size=30), ids(2, 9)  # transformers 5.17 needs an even vocabulary
    m.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = {"ids": tokens, "logits": m(tokens).logits, "tokens": generate(m, tokens, max_new_tokens=5)}
    torch.save(expected, tmp_path / "expected.pt")
    (tmp_path / "run.py").write_text(PARALLEL)
    run_python(
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "run.py", str(tmp_path)], tmp_path
    )


@every_family
def test_missing_gates_are_initialised(family: str, tmp_path: pathlib.Path) -> None:
    """A checkpoint without KDA layers' weights leaves no uninitialised memory behind."""
    m = build(family, FP32)
    m.save_pretrained(tmp_path, state_dict={n: p for n, p in m.state_dict().items() if "self_attn" not in n})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for kind, layer in zip(m.config.layer_types, loaded.model.layers, strict=True):
        if kind == "linear_attention":
            assert 0 <= layer.self_attn.A_log.min() <= layer.self_attn.A_log.max() <= 2.7726
            assert -7 < layer.self_attn.dt_bias.min() < layer.self_attn.dt_bias.max() < -2
            assert abs(layer.self_attn.q_proj.weight.std() / 0.4 - 1) < 0.3


# ---------------------------------------------------------------- conversion


@every_family
@pytest.mark.parametrize("training", [True, False])
def test_what_is_not_swapped_is_copied(family: str, training: bool) -> None:
    """Bit by bit, on memory of its own, in the same dtypes and mode; the original stays as it is."""
    m = stock(family, BF16).train(training)
    m.generation_config.temperature = 0.7
    m.config.name_or_path = "someone/a-model"
    before, config = copy.deepcopy(m.state_dict()), copy.deepcopy(m.config.to_dict())
    new = kda_layers.swap_attention(m, layers=[1])
    assert new.training is training
    assert new.dtype == BF16
    assert new.generation_config.temperature == 0.7
    assert new.generation_config is not m.generation_config
    assert (new.config.converted_from, new.config.name_or_path) == ("someone/a-model", "")
    assert new.config.layer_types == ["full_attention", "linear_attention", "full_attention"]
    state = new.state_dict()
    kept = [n for n in before if "layers.1.self_attn" not in n]
    assert set(kept) == {n for n in state if "layers.1.self_attn" not in n}
    for n in kept:
        assert torch.equal(state[n], before[n]), n
        assert state[n].dtype == BF16
    assert {n for n, p in new.named_parameters() if p.dtype == FP32} == {
        f"model.layers.1.self_attn.{n}" for n in ("A_log", "dt_bias")
    }
    assert (new.lm_head.weight is new.model.embed_tokens.weight) == m.config.tie_word_embeddings
    assert all(p.requires_grad for p in new.parameters())
    with torch.no_grad():
        for tensor in (*new.parameters(), *new.buffers()):
            tensor.fill_(3)
    for n, p in m.state_dict().items():
        assert torch.equal(p, before[n]), n
    assert m.config.to_dict() == config
    assert all(b.abs().sum() != 3 * b.numel() for b in m.buffers())


@every_family
@pytest.mark.parametrize("H", [2, 4, 8])
def test_the_rule_of_heads(family: str, H: int) -> None:
    """Each value head reads the q and k, and writes the v, that its query head had; shared q are averaged."""
    Hq, Hkv, d = 8, 2, 8
    m = stock(family, num_attention_heads=Hq, num_key_value_heads=Hkv, hidden_size=64)
    new = convert(m, [1], linear_num_heads=H).model.layers[1].self_attn
    old = m.model.layers[1].self_attn
    assert (new.num_heads, new.num_v_heads, new.head_dim, new.head_v_dim) == (H, Hq, d, d)

    def head(projection: Any, i: int, norm: Any = None) -> Tensor:
        rows = projection.weight[i * d : (i + 1) * d]
        return rows if norm is None else rows * norm.weight[:, None]

    q_norm, k_norm = getattr(old, "q_norm", None), getattr(old, "k_norm", None)
    for h in range(H):
        readers = [i for i in range(Hq) if i // (Hq // H) == h]
        q = sum(head(old.q_proj, i, q_norm) for i in readers) / len(readers)
        torch.testing.assert_close(head(new.q_proj, h), q)
        for i in readers:
            assert torch.equal(head(new.k_proj, h), head(old.k_proj, i * Hkv // Hq, k_norm))
            assert torch.equal(head(new.v_proj, i), head(old.v_proj, i * Hkv // Hq))
    assert torch.equal(new.o_proj.weight, old.o_proj.weight)


def test_norms_of_qwen3_are_in_the_projections() -> None:
    """With a q head for each query head, the normalised q and k are those of the stock layer before its rotation."""
    m, x, d = stock("qwen3"), torch.randn(2, 5, 32, dtype=FP64), 8
    new, old = convert(m, [0], linear_num_heads=4).model.layers[0].self_attn, m.model.layers[0].self_attn
    normalize = functools.partial(torch.nn.functional.normalize, dim=-1)
    for name, groups in (("q", 1), ("k", 2)):
        got = getattr(new, f"{name}_proj")(x).unflatten(-1, (-1, d))
        want = getattr(old, f"{name}_norm")(getattr(old, f"{name}_proj")(x).unflatten(-1, (-1, d)))
        torch.testing.assert_close(normalize(got), normalize(want).repeat_interleave(groups, 2), rtol=1e-6, atol=1e-6)


def test_new_parameters_start_as_in_any_kda_layer() -> None:
    m = convert(stock("llama", FP32, initializer_range=0.1, hidden_size=128), "all", linear_gate_rank=0)
    for layer in m.model.layers:
        attention = layer.self_attn
        assert (attention.A_log == 0).all()
        assert torch.nn.functional.softplus(attention.dt_bias).min() > 0.99e-3
        assert (attention.o_norm.weight == 1).all()
        for name in ("f_proj", "g_proj", "b_proj", "conv1d"):
            assert abs(getattr(attention, name).weight.std() / 0.1 - 1) < 0.2, name


@every_family
@pytest.mark.parametrize(
    ("layers", "chosen"),
    [("all", [0, 1, 2]), ("1:1", [0, 2]), ("2:1", [0, 1]), ("2:9", [0, 1]), ("1:9", [0]), ([-1], [2]),
     ((2, 0), [0, 2]), (range(2), [0, 1]), ([-3, -1], [0, 2])],
    ids=str,
)  # fmt: skip
def test_ways_to_choose_layers(family: str, layers: Any, chosen: list[int]) -> None:
    m = convert(stock(family, FP32), layers)
    found = [i for i, layer in enumerate(m.model.layers) if isinstance(layer.self_attn, KimiDeltaAttention)]
    assert found == chosen
    assert [i for i, kind in enumerate(m.config.layer_types) if kind == "linear_attention"] == chosen


def test_backend_and_attention_implementation() -> None:
    m = stock("llama", FP32)
    m.set_attn_implementation("eager")
    new = convert(m, [0], backend="eager")
    assert new.config._attn_implementation == "eager"
    assert new.model.layers[0].self_attn.kda_options["backend"] == "eager"
    assert "backend" not in json.dumps(new.config.to_dict())


REFUSED: list[tuple[str, dict[str, Any], Any, dict[str, Any], type[Exception], str]] = [
    # family, its fields, layers, fields of KDA, error, message
    ("llama", {}, [3], {}, ValueError, r"layers must be in \[-3, 3\) for a model of 3 layers, got \[3\]"),
    ("llama", {}, [0, -4], {}, ValueError, r"layers must be in \[-3, 3\) .* got \[-4\]"),
    ("llama", {}, [2, 0, -1], {}, ValueError, r"layers must name each layer once, got \[2, 0, -1\]"),
    ("llama", {}, [], {}, ValueError, "layers must hold at least one index"),
    ("llama", {}, ["0"], {}, TypeError, "every index in layers must be an integer, got '0'"),
    ("llama", {}, [True], {}, TypeError, "every index in layers must be an integer, got True"),
    ("llama", {}, None, {}, TypeError, "layers must be indices, .* got None"),
    ("llama", {}, 3, {}, TypeError, "layers must be indices, .* got 3"),
    *(("llama", {}, bad, {}, ValueError, f"layers must be indices, .*got '{bad}'")
      for bad in ("", "some", "3:0", "0:1", "3:1:1", "-1", "3")),
    ("windows", {}, [1, 2], {}, ValueError, r"no sliding window, got \[2\], with one of 4 tokens: KDA has no window"),
    ("mistral", dict(sliding_window=8), "all", {}, ValueError, r"got \[0, 1, 2\], with one of 8 tokens.*window=None"),
    ("llama", dict(attention_bias=True), [0], {}, ValueError, "attention_bias must be False"),
    ("qwen3", dict(attention_bias=True), [0], {}, ValueError, "attention_bias must be False"),
    ("llama", {}, [0], dict(num_heads=2), TypeError, "config keywords must be among linear_num_heads.*got num_heads"),
    ("llama", {}, [0], dict(layer_types=[]), TypeError, "config keywords must be .* got layer_types"),
    ("llama", {}, [0], dict(linear_head_dim=16), ValueError, "linear_head_dim must be 8, as projections .* got 16"),
    ("llama", {}, [0], dict(linear_value_head_dim=4), ValueError, "linear_value_head_dim must be 8, .* got 4"),
    ("llama", {}, [0], dict(linear_num_value_heads=8), ValueError, "linear_num_value_heads must be 4, .* got 8"),
    ("llama", {}, [0], dict(linear_num_heads=1), ValueError, "linear_num_heads must be a multiple of .* = 2 .* got 1"),
    ("llama", dict(num_attention_heads=8), [0], dict(linear_num_heads=6), ValueError,
     "linear_num_heads = 6, got 8"),
    ("llama", {}, [0], dict(linear_conv_kernel_dim="4"), TypeError, "linear_conv_kernel_dim"),
    ("llama", {}, [0], dict(linear_lower_bound=-9.0), ValueError, r"linear_lower_bound must be in \[-5, 0\)"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "fields", "layers", "options", "error", "message"), REFUSED)
def test_refused_conversions(
    family: str, fields: dict[str, Any], layers: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    m = stock(family, FP32, **fields)
    before, config = copy.deepcopy(m.state_dict()), copy.deepcopy(m.config.to_dict())
    with pytest.raises(error, match=message):
        convert(m, layers, **options)
    assert m.config.to_dict() == config
    assert all(torch.equal(p, before[n]) for n, p in m.state_dict().items())


def test_refused_models(tmp_path: pathlib.Path) -> None:
    """Other classes, also those near; weights that are not here, or not the class's own."""
    m = stock("llama", FP32)
    with pytest.raises(ValueError, match="model must be a LlamaForCausalLM to be converted, got a LlamaModel"):
        convert(m.model, "all")
    with pytest.raises(ValueError, match=r"KDALlamaForCausalLM must be of a supported family .* this package already"):
        convert(build("llama", FP32), "all")
    with torch.device("meta"):
        empty = LlamaForCausalLM(m.config)
    with pytest.raises(ValueError, match="LlamaForCausalLM on the meta device or dispatched by accelerate"):
        convert(empty, "all")
    adapted = copy.deepcopy(m)
    adapted.model.layers[0].self_attn.q_proj = torch.nn.Sequential(adapted.model.layers[0].self_attn.q_proj)
    with pytest.raises(ValueError, match=r"plain LlamaForCausalLM, got differences in .*q_proj.0.weight.*merge"):
        convert(adapted, [1])
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(m, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="dispatched by accelerate"):
        convert(m, "all")


# ---------------------------------------------------------------- the configurations

CONFIGS = {family: load(f"kda_{family}").config for family in CONVERTED}


@every_family
def test_config_defaults_follow_the_softmax_layers(family: str) -> None:
    more = dict(sliding_window=None) if family == "mistral" else {}
    config = CONFIGS[family](
        num_hidden_layers=8, hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=16, **more
    )
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert (config.linear_num_heads, config.linear_num_value_heads) == (8, 8)
    assert (config.linear_head_dim, config.linear_value_head_dim, config.linear_gate_rank) == (16, 16, 16)


@every_family
def test_default_config(family: str) -> None:
    config = CONFIGS[family]()
    kind = "sliding_attention" if family == "mistral" else "full_attention"  # Mistral's default has a window
    assert set(config.layer_types) == {"linear_attention", kind}
    assert not any(".self_attn." in name for name in config.base_model_tp_plan)
    assert any(".mlp." in name for name in config.base_model_tp_plan)


@every_model
def test_config_round_trip(name: str, tmp_path: pathlib.Path) -> None:
    config = model(name).config
    config.save_pretrained(tmp_path)
    on_disk = json.loads((tmp_path / "config.json").read_text())
    assert on_disk["model_type"] == config.model_type
    assert on_disk["layer_types"] == config.layer_types
    for loaded in (type(config).from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is type(config)
        assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", dict(layer_types=["sliding_attention"] * 3), "layer_types must hold 3 of"),
        ("llama", dict(layer_types=["linear_attention"]), "layer_types must hold 3 of"),
        ("qwen3", dict(layer_types=["sliding_attention"] * 3), "sliding_window must be given with layers of"),
        ("mistral", dict(layer_types=["full_attention"] * 3), "must hold 'sliding_attention', not 'full_attention'"),
        ("mistral", dict(linear_num_value_heads=3), "linear_num_value_heads must be a multiple of"),
        ("qwen3", dict(linear_gate_activation="tanh"), "linear_gate_activation .*tanh"),
        ("llama", dict(linear_head_dim="8"), "linear_head_dim"),
    ],
)
def test_refused_configs(family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrictDataclassError, match=message):
        CONFIGS[family](**(TINY | fields))


# ---------------------------------------------------------------- compiled


@pytest.mark.parametrize(("name", "case"), [("llama", "training"), ("windows", "padded"), ("mistral", "packed")])
def test_compiled_model(name: str, case: str, counter: CompileCounterWithBackend) -> None:
    """One graph for every length, equal to the uncompiled model; also backward."""
    m = build(name)
    compiled = torch.compile(m, backend=counter, fullgraph=True, dynamic=True)
    parameters = list(m.parameters())
    for T in (70, 33):
        tokens = ids(1 if case == "packed" else 3, T)
        arguments: dict[str, Any] = dict(use_cache=False)
        if case == "padded":
            arguments["attention_mask"] = (torch.arange(T) >= torch.tensor([[0], [2], [T - 1]])).long()
        if case == "packed":
            arguments["cu_seqlens"] = torch.tensor([0, 3, 3, T])
        if case == "training":
            arguments["labels"] = tokens
        with torch.set_grad_enabled(case == "training"):
            got, want = compiled(tokens, **arguments), m(tokens, **arguments)
        real = arguments.get("attention_mask", torch.ones_like(tokens)) == 1
        same((got.logits[real],), (want.logits[real],), limit=1e-6)  # angles of the rotary embedding are fp32
        if case == "training":
            same(*(torch.autograd.grad(out.loss, parameters) for out in (got, want)), limit=1e-5)  # a loss in fp32
    assert counter.frame_count == 1


@every_family
def test_compiled_generation(family: str, counter: CompileCounterWithBackend) -> None:
    """With a static cache transformers compiles the decoding step; neither its tokens nor later calls compile anew."""
    m = build(family)
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


NEW_FAMILY = """
import torch, kda_layers
from transformers import ArceeConfig, ArceeForCausalLM, AutoModelForCausalLM
sizes = dict(vocab_size=31, hidden_size=16, intermediate_size=24, num_attention_heads=2, head_dim=8)
stock = ArceeForCausalLM(ArceeConfig(num_hidden_layers=4, **sizes))
model = kda_layers.swap_attention(stock, "3:1")
model.save_pretrained("saved")
ids = torch.arange(1, 21).view(2, 10)
assert torch.equal(AutoModelForCausalLM.from_pretrained("saved")(ids).logits, model.eval()(ids).logits)
print(type(model).__name__, model.config.layer_types.count("linear_attention"))
"""


def test_a_new_family_is_one_file(tmp_path: pathlib.Path) -> None:
    """In a copy of the package with the file of Arcee, which is Llama's under other names."""
    package = pathlib.Path(kda_layers.__file__).parent
    shutil.copytree(package, tmp_path / "kda_layers", ignore=shutil.ignore_patterns("__pycache__"))
    families = tmp_path / "kda_layers" / "modeling" / "families"
    text = (families / "kda_llama.py").read_text()
    (families / "kda_arcee.py").write_text(text.replace("Llama", "Arcee").replace("llama", "arcee"))
    done = subprocess.run([sys.executable, "-c", NEW_FAMILY], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["KDAArceeForCausalLM", "3"]
