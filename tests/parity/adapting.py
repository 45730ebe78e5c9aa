"""PEFT, TRL, heads, quantisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)

from tests.parity.calls import Refusal, calls_of
from tests.parity.subjects import OURS, SHORT, TEXT, Subject, assert_close, greedy, logits, scratch
from tests.parity.training import keys, losses, rows, trained, trainer

call = calls_of("Heads, adapters, preferences, quantisation")
NO_HEAD = dict(kimi=Refusal("Unrecognized configuration class", "transformers has no such class for Kimi-Linear"))
NO_PREFIX = Refusal(
    "must have a linear-attention layer", "a prefix is keys and values, which KDA layers do not have; tune a prompt"
)

# ---------------------------------------------------------------- heads


def with_head(on: Subject, auto: Any, **options: Any) -> Any:
    """Return a model with a new head on the saved one."""
    return auto.from_pretrained(on.folder, **options)


def assert_head_trains(m: Any, inputs: dict[str, Any], **labels: Any) -> Any:
    """Train some steps; return the shapes of the outputs."""
    optimizer, found = torch.optim.AdamW(m.train().parameters(), lr=3e-3), []
    for _ in range(4):
        loss = m(**inputs, **labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    assert found[-1] < found[0]
    out = m.eval()(**inputs)
    return {name: tuple(value.shape) for name, value in out.items() if name.endswith("logits")}


@call(
    "`AutoModelForSequenceClassification.from_pretrained(folder)`, trained, saved, in a pipeline",
    refused=NO_HEAD,
)
def sequence_classification(on: Subject) -> Any:
    m = with_head(on, AutoModelForSequenceClassification, num_labels=3)
    assert torch.equal(m.model.embed_tokens.weight, on.shared.model.embed_tokens.weight)
    inputs = on.tokens(TEXT, SHORT)
    shapes = assert_head_trains(m, inputs, labels=torch.tensor([0, 2]))
    again = AutoModelForSequenceClassification.from_pretrained(on.save(m))
    assert_close(again(**inputs).logits, m(**inputs).logits)
    for i, text in enumerate((TEXT, SHORT)):
        assert_close(m(**on.tokens(text)).logits[0], m(**inputs).logits[i])
    found = pipeline("text-classification", model=again, tokenizer=on.tokenizer)([TEXT, SHORT])
    return shapes, [sorted(f) for f in found]


@call("`AutoModelForTokenClassification.from_pretrained(folder)`, trained, in a pipeline", refused=NO_HEAD)
def token_classification(on: Subject) -> Any:
    m = with_head(on, AutoModelForTokenClassification, num_labels=3)
    inputs = on.tokens(TEXT, SHORT)
    shapes = assert_head_trains(m, inputs, labels=inputs["input_ids"] % 3)
    again = AutoModelForTokenClassification.from_pretrained(on.save(m))
    assert_close(again(**inputs).logits, m(**inputs).logits)
    found = pipeline("token-classification", model=again, tokenizer=on.tokenizer)(SHORT)
    return shapes, len(found)


@call("`AutoModelForQuestionAnswering.from_pretrained(folder)`, trained", refused=NO_HEAD)
def question_answering(on: Subject) -> Any:
    m = with_head(on, AutoModelForQuestionAnswering)
    at = torch.tensor([3, 4])
    return assert_head_trains(m, on.tokens(TEXT, SHORT), start_positions=at, end_positions=at + 1)


@call("`Trainer` of a sequence classifier", refused=NO_HEAD)
def trained_classifier(on: Subject) -> Any:
    data = [dict(input_ids=row["input_ids"], label=1) for row in rows(on)]
    return keys(trained(on, with_head(on, AutoModelForSequenceClassification, num_labels=2), data))


# ---------------------------------------------------------------- PEFT


def assert_adapts(on: Subject, config: Any, model: Any = None) -> Any:
    """Train an adapter, save and load it; return the model with it."""
    from peft import PeftModel, get_peft_model

    m = get_peft_model(on.model() if model is None else model, config)
    t = trained(on, m, learning_rate=2e-2)
    trainable = {n for n, p in m.named_parameters() if p.requires_grad}
    assert trainable
    base = dict(on.shared.named_parameters())
    for name, p in m.base_model.named_parameters():  # nothing else changed
        clean = name.removeprefix("model.").replace(".base_layer", "")
        if clean in base and not p.requires_grad:
            assert torch.equal(p, base[clean]), name
    folder = scratch()
    m.save_pretrained(str(folder))
    again = PeftModel.from_pretrained(on.model(), str(folder))
    inputs = on.tokens()
    adapted = logits(m.eval(), inputs)
    assert_close(logits(again.eval(), inputs), adapted)
    assert (adapted[:, -1] - logits(on.shared, inputs)[:, -1]).abs().max() > 1e-4
    assert torch.equal(greedy(again, inputs), greedy(m, inputs))
    return m, keys(t)


QV = ["q_proj", "o_proj"]  # every kind of layer has these


@call("PEFT: `LoraConfig`, trained, saved, loaded, `merge_and_unload()`, `disable_adapter()`")
def lora(on: Subject) -> Any:
    from peft import LoraConfig

    m, logged = assert_adapts(on, LoraConfig(r=4, target_modules=QV))
    inputs = on.tokens()
    with m.disable_adapter():
        assert_close(logits(m, inputs), logits(on.shared, inputs))
    adapted = logits(m, inputs)
    merged = m.merge_and_unload()
    assert_close(logits(merged, inputs), adapted)
    assert_close(logits(on.load(on.save(merged)), inputs), adapted)
    return type(merged) is type(on.shared), logged


@call('PEFT: `LoraConfig(target_modules="all-linear")`, `modules_to_save=["lm_head"]`', heavy=True)
def lora_everywhere(on: Subject) -> Any:
    from peft import LoraConfig

    _, logged = assert_adapts(
        on, LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    )
    return logged


@call("PEFT: `LoraConfig(use_dora=True)`")
def dora(on: Subject) -> Any:
    from peft import LoraConfig

    return assert_adapts(on, LoraConfig(r=4, target_modules=QV, use_dora=True))[1]


@call("PEFT: `IA3Config`")
def ia3(on: Subject) -> Any:
    from peft import IA3Config

    config = IA3Config(target_modules=["v_proj", "o_proj", "down_proj"], feedforward_modules=["down_proj"])
    if on.name == "kimi":  # latent attention has no v_proj, experts no down_proj that is a layer
        config = IA3Config(target_modules=["o_proj"], feedforward_modules=[])
    return assert_adapts(on, config)[1]


@call("PEFT: `PromptTuningConfig`")
def prompt_tuning(on: Subject) -> Any:
    from peft import PromptTuningConfig

    return assert_adapts(on, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))[1]


@call("PEFT: `PrefixTuningConfig`", refused=dict.fromkeys(OURS, NO_PREFIX))
def prefix_tuning(on: Subject) -> Any:
    from peft import PrefixTuningConfig

    config = PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, num_layers=3, token_dim=32, num_attention_heads=4
    )
    return assert_adapts(on, config)[1]


@call("PEFT with `gradient_checkpointing=True`, `bf16=True`, `enable_input_require_grads()`")
def lora_checkpointed(on: Subject) -> Any:
    from peft import LoraConfig, get_peft_model

    m = get_peft_model(on.model(), LoraConfig(r=4, target_modules=QV))
    m.enable_input_require_grads()
    t = trained(on, m, gradient_checkpointing=True, bf16=True, learning_rate=2e-2)
    return keys(t)


@call("`label_smoothing_factor=0.1` of a PEFT model: of the next token")
def lora_label_smoothing(on: Subject) -> Any:
    from peft import LoraConfig, get_peft_model

    m = get_peft_model(on.model(), LoraConfig(r=4, target_modules=QV))
    a = trainer(on, m, label_smoothing_factor=0.1, max_steps=1)
    b = trainer(on, label_smoothing_factor=0.1, max_steps=1)
    a.train()
    b.train()
    assert_close(torch.tensor(losses(a)), torch.tensor(losses(b)), 1e-3)


@call("`model.add_adapter(LoraConfig(...))`, `save_pretrained`, `load_adapter`")
def add_adapter(on: Subject) -> Any:
    from transformers.integrations.peft import MIN_PEFT_VERSION

    LoraConfig = pytest.importorskip("peft", MIN_PEFT_VERSION).LoraConfig  # 5.24 asks for one that is not released yet
    m = on.model()
    m.add_adapter(LoraConfig(r=4, target_modules=QV, init_lora_weights=False))
    inputs = on.tokens()
    folder = scratch()
    m.save_pretrained(folder)
    again = on.model()
    again.load_adapter(str(folder))
    assert_close(logits(again, inputs), logits(m, inputs))
    assert (logits(m, inputs) - logits(on.shared, inputs)).abs().max() > 1e-4
    m.disable_adapters()
    assert_close(logits(m, inputs), logits(on.shared, inputs))
    return sorted(file.name for file in folder.iterdir() if file.name.startswith("adapter"))


@call("`from_pretrained(folder of an adapter)`")
def adapter_folder(on: Subject) -> Any:
    from peft import LoraConfig, get_peft_model

    m = get_peft_model(on.load(), LoraConfig(r=4, target_modules=QV, init_lora_weights=False))
    folder = scratch()
    m.save_pretrained(str(folder))
    assert_close(logits(on.load(folder), on.tokens()), logits(m, on.tokens()))


@call("a wrapped model is named: `swap_attention(get_peft_model(...))`")
def swap_wrapped(on: Subject) -> Any:
    from peft import LoraConfig, get_peft_model

    from kda_layers import swap_attention

    m = get_peft_model(on.model(), LoraConfig(r=4, target_modules=QV))
    try:
        swap_attention(m, "all")
    except TypeError as error:
        return "PeftModel" in str(error)
    raise AssertionError("a wrapper was swapped")


# ---------------------------------------------------------------- TRL

TRL = dict(
    max_steps=3, per_device_train_batch_size=2, learning_rate=3e-3, logging_steps=1, report_to="none", use_cpu=True,
    save_strategy="no", disable_tqdm=True, bf16=False, seed=0,
)  # fmt: skip


def dataset(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def assert_tuned(t: Any) -> Any:
    """Train; return the logged names."""
    t.train()
    found = losses(t)
    assert all(torch.tensor(found).isfinite())
    return keys(t)


def sft(on: Subject, model: Any = None, data: Any = None, **options: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    peft_config = options.pop("peft_config", None)
    arguments = SFTConfig(output_dir=str(scratch()), **(TRL | dict(max_length=64) | options))
    t = SFTTrainer(
        on.model() if model is None else model, arguments, train_dataset=dataset(data or [dict(text=TEXT)] * 8),
        processing_class=on.tokenizer, peft_config=peft_config,
    )  # fmt: skip
    logged = assert_tuned(t)
    assert losses(t)[-1] < losses(t)[0]
    return logged


@call("TRL: `SFTTrainer` of texts", heavy=True)
def sft_text(on: Subject) -> Any:
    return sft(on)


@call("TRL: `SFTTrainer` of chats, with LoRA", heavy=True)
def sft_chat(on: Subject) -> Any:
    from peft import LoraConfig

    messages = [dict(role="user", content="a cat?"), dict(role="assistant", content="no, a dog.")]
    config = LoraConfig(r=4, target_modules=QV, task_type="CAUSAL_LM")
    return sft(on, data=[dict(messages=messages)] * 8, peft_config=config, learning_rate=2e-2)


@call("TRL: `SFTTrainer` with `packing=True`, `gradient_checkpointing=True`", heavy=True)
def sft_packing(on: Subject) -> Any:
    return sft(on, packing=True, gradient_checkpointing=True)


PAIRS = [dict(prompt="a cat?", chosen=" a cat.", rejected=" no dog.")] * 8


@call("TRL: `DPOTrainer`", heavy=True)
def dpo(on: Subject) -> Any:
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(output_dir=str(scratch()), **TRL, max_length=64)
    t = DPOTrainer(on.load(), None, arguments, train_dataset=dataset(PAIRS), processing_class=on.tokenizer)
    logged = assert_tuned(t)
    assert losses(t)[-1] < losses(t)[0]
    return logged


@call("TRL: `GRPOTrainer`", heavy=True)
def grpo(on: Subject) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(output_dir=str(scratch()), **TRL, num_generations=2, max_completion_length=6)
    t = GRPOTrainer(
        on.model(), reward_funcs=lambda completions, **_: [float(c.count("a")) for c in completions], args=arguments,
        train_dataset=dataset([dict(prompt="a cat?")] * 8), processing_class=on.tokenizer,
    )  # fmt: skip
    return assert_tuned(t)


@call("TRL: `RewardTrainer` of a sequence classifier", heavy=True, refused=NO_HEAD)
def reward(on: Subject) -> Any:
    from trl import RewardConfig, RewardTrainer

    arguments = RewardConfig(output_dir=str(scratch()), **TRL, max_length=64)
    m = with_head(on, AutoModelForSequenceClassification, num_labels=1)
    t = RewardTrainer(m, arguments, train_dataset=dataset(PAIRS), processing_class=on.tokenizer)
    return assert_tuned(t)


# ---------------------------------------------------------------- quantisation


@call("`torchao.quantization.quantize_(model, Int8WeightOnlyConfig())`, then `generate`")
def torchao_quantize(on: Subject) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    m = on.model()
    quantize_(m, Int8WeightOnlyConfig())
    error = (logits(m, on.tokens()) - logits(on.shared, on.tokens())).abs().mean()
    assert 0 < error < 0.2 * logits(on.shared, on.tokens()).abs().mean()
    return greedy(m, on.tokens()).shape


@call("`from_pretrained(folder, quantization_config=TorchAoConfig(...))`, then `generate`")
def torchao_config(on: Subject) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    m = on.load(quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    error = (logits(m, on.tokens()).float() - logits(on.shared, on.tokens())).abs().mean()
    assert 0 < error < 0.2 * logits(on.shared, on.tokens()).abs().mean()
    return greedy(m, on.tokens()).shape


@call("`torchao.float8.convert_to_float8_training(model)`, then training")
def torchao_float8(on: Subject) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    m, emulated = on.model(), Float8LinearConfig(emulate=True)  # on a CPU
    convert_to_float8_training(m, config=emulated, module_filter_fn=lambda _, name: "lm_head" not in name)
    assert any(type(module).__name__ == "Float8Linear" for module in m.modules())
    return keys(trained(on, m))


@call("LoRA over a model quantised by torchao")
def lora_over_int8(on: Subject) -> Any:
    from peft import LoraConfig, get_peft_model
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    m = on.load(quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    return keys(trained(on, get_peft_model(m, LoraConfig(r=4, target_modules=QV)), learning_rate=2e-2))
