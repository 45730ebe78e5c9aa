"""transformers' Trainer with our models, converted ones and swapped stock ones: resuming, best model, loss, decay."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kda_layers
from kda_layers import load_pretrained, restore_attention, swap_attention
from kda_layers.modeling.models import VARIANTS
from kda_layers.modeling.models.variant import language_model
from kda_layers.training import parameter_groups
from tests.kernels.cases import FP32
from tests.modeling import models, stock_models
from tests.modeling.stock_models import IN_PLACE

STEPS, SAVED = 8, 4  # steps of a run, and that of its first checkpoint


def swapped(family: str, seed: int = 0) -> Any:
    model = stock_models.build(family, seed=seed)
    swap_attention(model)
    return model.train()


def converted(seed: int = 0) -> Any:
    return models.build("llama", FP32, seed=seed + 1).train()


MODELS: dict[str, Callable[[int], Any]] = {
    **{f"swapped {family}": lambda seed, family=family: swapped(family, seed) for family in IN_PLACE},
    "converted llama": converted,
}  # fmt: skip

RENAMED = [f for f in stock_models.FAMILIES if f not in ("qwen3_5", "olmo_hybrid")]  # weights have other names in files


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))


def rows(count: int = 32, length: int = 12) -> list[dict[str, Tensor]]:
    """Random tokens of every model here."""
    tokens = torch.randint(3, 29, (count, length), generator=torch.Generator().manual_seed(0))
    return [dict(input_ids=row, labels=row) for row in tokens]


def trainer_of(model: Any, folder: Path, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    arguments = dict(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True,
        logging_steps=1, save_steps=SAVED, report_to=[], disable_tqdm=True, seed=0,
    )  # fmt: skip
    args = TrainingArguments(**arguments | options)
    args._n_gpu = min(args.n_gpu, 1)  # of several, Trainer would take all, by DataParallel
    return kind(model, args, train_dataset=rows(), eval_dataset=rows(4))


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_same(got: nn.Module, want: nn.Module) -> None:
    parameters = dict(want.named_parameters())
    assert dict(got.named_parameters()).keys() == parameters.keys()
    assert [n for n, p in got.named_parameters() if not torch.equal(p, parameters[n])] == []


# ---------------------------------------------------------------- resuming, and the best model

BEST: dict[str, Any] = dict(  # the first checkpoint: its loss is the higher one
    eval_strategy="steps", eval_steps=SAVED, load_best_model_at_end=True, metric_for_best_model="loss",
    greater_is_better=True,
)  # fmt: skip


def loaded(checkpoint: Path, like: Any) -> Any:
    return type(like).from_pretrained(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shards"),
    [*((name, False) for name in MODELS), *((f"swapped {family}", True) for family in RENAMED)],
)
def test_a_resumed_run_ends_as_one_that_was_not_stopped(
    name: str, shards: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer_of(MODELS[name](0), tmp_path)
    whole.train()
    checkpoint = tmp_path / f"checkpoint-{SAVED}"
    if shards:  # of a few weights each, so that parts of merged ones are apart
        monkeypatch.setattr(gc, "collect", int)  # which transformers calls after each shard
        saved = loaded(checkpoint, whole.model)
        (checkpoint / "model.safetensors").unlink()
        saved.save_pretrained(checkpoint, max_shard_size="10KB")
        index = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
        files = {(name.partition(".experts.")[0], file) for name, file in index.items() if ".experts." in name}
        assert len(files) > len({layer for layer, _ in files})
    resumed = trainer_of(MODELS[name](1), tmp_path / "resumed")  # other weights, which the checkpoint replaces
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed) == losses(whole)
    assert len(losses(whole)) == STEPS
    assert_same(resumed.model, whole.model)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_best_model_is_restored_whole(name: str, tmp_path: Path) -> None:
    trainer = trainer_of(MODELS[name](0), tmp_path, **BEST)
    trainer.train()
    checkpoint = tmp_path / f"checkpoint-{SAVED}"
    assert trainer.state.best_model_checkpoint == str(checkpoint)
    assert_same(trainer.model, loaded(checkpoint, trainer.model))


@pytest.mark.slow
def test_adapters_are_resumed_and_the_best_ones_restored(tmp_path: Path) -> None:
    whole = trainer_of(adapted(swapped("kimi_linear")), tmp_path, **BEST | dict(load_best_model_at_end=False))
    whole.train()
    checkpoint = tmp_path / f"checkpoint-{SAVED}"
    resumed = trainer_of(adapted(swapped("kimi_linear")), tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed) == losses(whole)
    assert_same(resumed.model, whole.model)
    best = trainer_of(adapted(swapped("kimi_linear")), tmp_path / "best", **BEST)
    best.train()
    saved = load_file(checkpoint / "adapter_model.safetensors")
    restored = {n: p for n, p in best.model.named_parameters() if "lora" in n}
    assert len(saved) == len(restored)
    assert all(torch.equal(restored[n.replace(".weight", ".default.weight")], p) for n, p in saved.items())


# ---------------------------------------------------------------- state dicts in saved names


def saved_weights(model: Any, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() != model.state_dict().keys()
    return weights


class Wrapper(nn.Module):
    """As DDP holds a model."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("family", RENAMED)
@pytest.mark.parametrize("scratch", [True, False], ids=["new", "loaded"])
def test_saved_names_are_read_in_a_wrapper_too(family: str, scratch: bool, tmp_path: Path) -> None:
    want = swapped(family)
    weights = saved_weights(want, tmp_path)
    model = swapped(family, seed=1)
    if not scratch:
        model.save_pretrained(tmp_path / "other")
        model = load_pretrained(tmp_path / "other")
    result = Wrapper(model).load_state_dict({f"module.{name}": t for name, t in weights.items()})
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same(model, want)
    other = swapped(family, seed=2)
    assert other.load_state_dict(want.state_dict()).missing_keys == []  # names of the model are read as ever
    assert_same(other, want)


def test_a_base_model_reads_its_part(tmp_path: Path) -> None:
    want = stock_models.build("kimi_linear").model
    model = stock_models.build("kimi_linear", seed=1).model
    swap_attention(model)
    model.load_state_dict(saved_weights(want, tmp_path))
    assert_same(model, want)


def test_unknown_names_beside_saved_ones_are_refused(tmp_path: Path) -> None:
    model = swapped("kimi_linear")
    weights = saved_weights(model, tmp_path)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    weights = {n: t + 1 for n, t in weights.items()} | {"model.layers.7.self_attn.q_conv1d.weight": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"own names or in those .*got also model\.layers\.7\.self_attn\.q_conv1d"):
        model.load_state_dict(weights, strict=False)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    result = model.load_state_dict({"value_head.weight": torch.zeros(1)}, strict=False)  # nothing of a checkpoint
    assert result.unexpected_keys == ["value_head.weight"]


def test_a_forward_between_shards_is_refused(tmp_path: Path) -> None:
    want = swapped("kimi_linear")
    weights = saved_weights(want, tmp_path)
    first = {n: weights.pop(n) for n in list(weights) if "experts.1." in n or "k_conv1d" in n}
    model, tokens = swapped("kimi_linear", seed=1), rows(1)[0]["input_ids"][None]
    model.load_state_dict(first, strict=False)
    message = "must be loaded before it runs, but load_state_dict got only parts of model.layers.0.self_attn.conv1d"
    with pytest.raises(RuntimeError, match=message):
        model(tokens)
    model.load_state_dict(weights, strict=False)
    assert_same(model, want)
    assert model(tokens).logits.isfinite().all()
    model.load_state_dict(first, strict=False)
    model.load_state_dict(want.state_dict())  # makes the parts obsolete
    assert model(tokens).logits.isfinite().all()


def test_a_restored_model_reads_as_stock_does(tmp_path: Path) -> None:
    model = swapped("kimi_linear")
    weights = saved_weights(model, tmp_path)
    hooks = len(model._load_state_dict_pre_hooks)
    swapped_again = swapped("kimi_linear")
    restore_attention(swapped_again)
    swap_attention(swapped_again, [0])
    swap_attention(swapped_again, [2])
    assert len(swapped_again._load_state_dict_pre_hooks) == hooks == 1
    restore_attention(model)
    assert not model._load_state_dict_pre_hooks
    assert not model._forward_pre_hooks
    assert model.load_state_dict(weights, strict=False).unexpected_keys


# ---------------------------------------------------------------- label smoothing

OURS = ("hybrid", "llama", "qwen3", "mistral")


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "LoRA"])
@pytest.mark.parametrize("name", OURS)
def test_label_smoothing_is_of_the_next_token(name: str, lora: bool, tmp_path: Path) -> None:
    model = models.build(name, FP32).train()
    trainer = trainer_of(adapted(model) if lora else model, tmp_path, label_smoothing_factor=0.1)
    tokens = torch.stack([row["input_ids"] for row in rows(2)])
    with torch.no_grad():
        got = trainer.compute_loss(trainer.model, dict(input_ids=tokens, labels=tokens.clone()))
        scores = log_softmax(trainer.model(input_ids=tokens).logits[:, :-1].flatten(0, 1), -1)
    want = 0.9 * cross_entropy(scores, tokens[:, 1:].flatten()) - 0.1 * scores.mean()
    same = 0.9 * cross_entropy(scores, tokens[:, :-1].flatten()) - 0.1 * scores.mean()
    assert abs(same - want) > 1e-3
    torch.testing.assert_close(got, want)


def test_every_language_model_is_in_the_table() -> None:
    classes = [*map(language_model, VARIANTS), kda_layers.KDAForCausalLM]
    assert len(classes) >= 4
    for cls in classes:
        assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.config_class.model_type] == cls.__name__


# ---------------------------------------------------------------- weight decay


class KDATrainer(Trainer):
    """As the docstring of `parameter_groups` says."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        decayed = set(map(id, parameter_groups(model)[0]["params"]))
        return [name for name, p in model.named_parameters() if id(p) in decayed]


@pytest.mark.parametrize("name", [*MODELS, "hybrid"])
def test_weight_decay_is_for_matrices(name: str, tmp_path: Path) -> None:
    model = models.build(name, FP32) if name == "hybrid" else MODELS[name](0)
    trainer = trainer_of(model, tmp_path, KDATrainer, weight_decay=0.1)
    groups = trainer.create_optimizer().param_groups
    names = {id(p): n for n, p in model.named_parameters()}
    decayed, rest = ([names[id(p)] for p in group["params"]] for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert len(decayed) + len(rest) == len(names)
    ends = ("A_log", "dt_bias", "conv1d.weight", "norm.weight", "layernorm.weight", "bias", "self_attn.A")
    for n in names.values():
        assert (n in rest) == (model.get_parameter(n).ndim < 2 or n.endswith(ends)), n
    assert any(n.endswith("down_proj") for n in decayed) == (name.removeprefix("swapped ") in RENAMED)  # of experts


def test_groups_of_adapters_and_of_tied_weights() -> None:
    model = models.build("softplus_tied", FP32)
    groups = parameter_groups(model)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    adapters = parameter_groups(adapted(model), 0.3)
    assert [len(group["params"]) for group in adapters] == [2 * 2 * 2, 0]
    assert adapters[0]["weight_decay"] == 0.3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("model",), TypeError, "model must be a torch.nn.Module, got str"),
        ((nn.Linear(1, 1), "0.1"), TypeError, "weight_decay must be a number, got str"),
        ((nn.Linear(1, 1), -0.1), ValueError, "weight_decay must be 0 or more, got -0.1"),
    ],
)
def test_errors_of_parameter_groups(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parameter_groups(*arguments)
