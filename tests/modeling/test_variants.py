"""Tests of Llama, Qwen2, Qwen3 and Mistral with KDA layers alone, and of converting the stock models.

What every model must do, generation, packing, saving and so on, test_models.py asks of them, too.
"""

from __future__ import annotations

import copy
import functools
import json
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
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import kda_layers
from kda_layers import KimiDeltaAttention
from kda_layers import convert_attention as convert
from kda_layers.modeling.models import VARIANTS, variant_config
from tests.kernels.cases import BF16, FP32, FP64
from tests.modeling.common import same
from tests.modeling.models import STOCK, TINY_STOCK, build, generate, ids, stock

every_family = pytest.mark.parametrize("family", VARIANTS)


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


# ---------------------------------------------------------------- training


def trainer(m: PreTrainedModel, folder: pathlib.Path, steps: int) -> Trainer:
    data = [dict(input_ids=row, labels=row) for row in ids(16, 12)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=4, learning_rate=1e-2,
        lr_scheduler_type="constant", report_to=[], disable_tqdm=True, use_cpu=True, save_total_limit=3,
    )  # fmt: skip
    return Trainer(model=m, args=arguments, train_dataset=data)


@pytest.mark.slow
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


# ---------------------------------------------------------------- conversion


@every_family
@pytest.mark.parametrize("training", [True, False])
def test_what_is_not_swapped_is_copied(family: str, training: bool) -> None:
    """Bit by bit, on memory of its own, in the same dtypes and mode; the original stays as it is."""
    m = stock(family, BF16).train(training)
    m.generation_config.temperature = 0.7
    m.config.name_or_path = "someone/a-model"
    before, config = copy.deepcopy(m.state_dict()), copy.deepcopy(m.config.to_dict())
    new = kda_layers.convert_attention(m, layers=[1])
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
    assert (new.num_heads, new.num_value_heads, new.head_dim, new.value_head_dim) == (H, Hq, d, d)

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


def test_dropped_biases_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Softmax layers keep the biases of Qwen2; KDA layers have none."""
    m = stock("qwen2", FP32)
    with caplog.at_level("WARNING", "kda_layers"):
        new = convert(m, [0, 2])
    assert (
        "k_proj.bias, q_proj.bias, v_proj.bias of the 2 converted layers of Qwen2ForCausalLM are dropped" in caplog.text
    )
    assert [n for n, _ in new.named_parameters() if n.endswith(".bias")] == [
        f"model.layers.1.self_attn.{n}_proj.bias" for n in "qkv"
    ]
    caplog.clear()
    convert(stock("llama", FP32), [0])
    assert "dropped" not in caplog.text


def test_the_width_of_a_head_is_carried_over() -> None:
    """Qwen2's configuration has no field for it, but reads it."""
    m = stock("qwen2", FP32, head_dim=16)
    assert convert(m, [0]).config.head_dim == 16


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


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Gemma2", "Gemma3Text"])
def test_other_families_are_refused_with_the_supported_ones(kind: str) -> None:
    config_class = getattr(transformers, f"{kind}Config")
    m = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config_class(**TINY_STOCK))
    message = rf"{type(m).__name__} must be of a supported family .*_attention: llama, mistral, qwen2, qwen3\), got"
    with pytest.raises(ValueError, match=message):
        convert(m, "all")


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


@every_family
def test_config_defaults_follow_the_softmax_layers(family: str) -> None:
    more = dict(sliding_window=None) if family == "mistral" else {}
    config = variant_config(family)(
        num_hidden_layers=8, hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=16, **more
    )
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert (config.linear_num_heads, config.linear_num_value_heads) == (8, 8)
    assert (config.linear_head_dim, config.linear_value_head_dim, config.linear_gate_rank) == (16, 16, 16)


@every_family
def test_default_config(family: str) -> None:
    config = variant_config(family)()
    kind = "sliding_attention" if family == "mistral" else "full_attention"  # Mistral's default has a window
    assert set(config.layer_types) == {"linear_attention", kind}
    assert config.base_model_tp_plan["layers.*.self_attn.A_log"] == "colwise"
    assert config.base_model_tp_plan.items() >= type(config).base_model_tp_plan.items() > set()


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
        variant_config(family)(**(TINY_STOCK | fields))


# ---------------------------------------------------------------- a new family


NEW_FAMILY = """
import torch, kda_layers
from transformers import ArceeConfig, ArceeForCausalLM, AutoModelForCausalLM
sizes = dict(vocab_size=31, hidden_size=16, intermediate_size=24, num_attention_heads=2, head_dim=8)
stock = ArceeForCausalLM(ArceeConfig(num_hidden_layers=4, **sizes))
model = kda_layers.convert_attention(stock, "3:1")
model.save_pretrained("saved")
ids = torch.arange(1, 21).view(2, 10)
assert torch.equal(AutoModelForCausalLM.from_pretrained("saved")(ids).logits, model.eval()(ids).logits)
print(type(model).__name__, model.config.layer_types.count("linear_attention"))
"""


@pytest.mark.slow
def test_a_new_family_is_one_configuration(tmp_path: pathlib.Path) -> None:
    """In a copy of the package with the configuration of Arcee, which is Llama's under other names."""
    package = pathlib.Path(kda_layers.__file__).parent
    shutil.copytree(package, tmp_path / "kda_layers", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "configuration_variants.py"):
        file = tmp_path / "kda_layers" / "modeling" / "models" / name
        file.write_text(file.read_text().replace("Llama", "Arcee").replace("llama", "arcee"))
    done = subprocess.run([sys.executable, "-c", NEW_FAMILY], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["KDAArceeForCausalLM", "3"]
