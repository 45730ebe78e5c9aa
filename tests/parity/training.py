"""transformers' Trainer with its options, and training loops of one's own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.functional import log_softmax
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
)

import kda_layers
from tests.parity.calls import calls_of
from tests.parity.subjects import SHORT, TEXT, Subject, assert_close, logits, scratch

call = calls_of("Training")


def rows(on: Subject, n: int = 8) -> list[dict[str, Any]]:
    """Return n rows of the same text."""
    ids = on.tokens()["input_ids"][0].tolist()
    return [dict(input_ids=ids, labels=ids) for _ in range(n)]


def trainer(on: Subject, model: Any = None, data: Any = None, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    """Return a Trainer of four steps; `options` are of TrainingArguments, or of Trainer itself."""
    own = {
        name: options.pop(name)
        for name in ("eval_dataset", "data_collator", "compute_metrics", "callbacks")
        if name in options
    }
    arguments = dict(
        output_dir=str(scratch()), max_steps=4, per_device_train_batch_size=2, learning_rate=3e-3, logging_steps=1,
        report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, seed=0,
    )  # fmt: skip
    arguments = TrainingArguments(**(arguments | options))
    return kind(on.model() if model is None else model, arguments, train_dataset=data or rows(on), **own)


def losses(t: Trainer) -> list[float]:
    """Return the logged training losses."""
    return [entry["loss"] for entry in t.state.log_history if "loss" in entry]


def trained(on: Subject, *args: Any, **options: Any) -> Trainer:
    """Return the Trainer after training; the loss must have fallen, from that of the model."""
    t = trainer(on, *args, **options)
    t.train()
    found = losses(t)
    assert all(torch.tensor(found).isfinite())
    assert found[-1] < found[0]
    return t


def first_loss(on: Subject) -> float:
    """Return the loss of the model on the rows, by a forward pass."""
    inputs = on.tokens()
    with torch.no_grad():
        return float(on.shared(**inputs, labels=inputs["input_ids"]).loss)


def keys(t: Trainer) -> Any:
    """Return what the Trainer logged, by name."""
    return sorted({name for entry in t.state.log_history for name in entry})


@call("`Trainer(model, args, train_dataset).train()`, `save_model`")
def train(on: Subject) -> Any:
    t = trained(on)
    assert abs(losses(t)[0] - first_loss(on)) < 1e-3
    folder = scratch()
    t.save_model(str(folder))
    assert_close(logits(on.load(folder), on.tokens()), logits(t.model.eval(), on.tokens()))
    return keys(t), t.state.global_step


@call("`bf16=True`")
def bf16(on: Subject) -> Any:
    t = trained(on, bf16=True)
    assert abs(losses(t)[0] - first_loss(on)) < 0.1
    return keys(t), {p.dtype for p in t.model.parameters()}


@call("a model loaded in bf16")
def bf16_weights(on: Subject) -> Any:
    return keys(trained(on, on.load(dtype=torch.bfloat16)))


@call("`gradient_accumulation_steps=2`: the loss of the whole batch")
def gradient_accumulation(on: Subject) -> Any:
    data = two_lengths(on)
    options = dict(max_steps=2, data=data, data_collator=collator(on))
    whole, parts = (
        trained(on, per_device_train_batch_size=n, gradient_accumulation_steps=2 // n, **options) for n in (2, 1)
    )
    assert_close(torch.tensor(losses(whole)), torch.tensor(losses(parts)), 1e-3)
    return keys(parts)


def same_as_plain(on: Subject, **options: Any) -> Any:
    """Return keys of a training whose losses must be those without `options`."""
    t = trained(on, **options)
    assert_close(torch.tensor(losses(t)), torch.tensor(losses(trained(on))), 1e-3)
    return keys(t)


@call('`gradient_checkpointing=True` with `{"use_reentrant": False}`')
def checkpointing(on: Subject) -> Any:
    return same_as_plain(on, gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=False))


@call('`gradient_checkpointing=True` with `{"use_reentrant": True}`')
def reentrant_checkpointing(on: Subject) -> Any:
    return same_as_plain(on, gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=True))


@call("`label_smoothing_factor=0.1`: of the next token")
def label_smoothing(on: Subject) -> Any:
    t = trained(on, label_smoothing_factor=0.1)
    inputs = on.tokens()
    lp = log_softmax(logits(on.shared, inputs)[0, :-1], -1)
    expected = -0.9 * lp.gather(1, inputs["input_ids"][0, 1:, None]).mean() - 0.1 * lp.mean()
    assert_close(torch.tensor(losses(t)[0]), expected, 1e-3)
    return keys(t)


def two_lengths(on: Subject) -> list[dict[str, Any]]:
    """Return rows of two texts, which a collator pads or packs and gives labels."""
    return [dict(input_ids=on.tokens(text)["input_ids"][0].tolist()) for text in (TEXT, SHORT)] * 8


def collator(on: Subject) -> DataCollatorForLanguageModeling:
    """Return the collator that pads rows, on the right: on the left, the last padding predicts the first token."""
    tokenizer = copy.deepcopy(on.tokenizer)
    tokenizer.padding_side = "right"
    return DataCollatorForLanguageModeling(tokenizer, mlm=False)


@call('`train_sampling_strategy="group_by_length"` with a collator that pads')
def group_by_length(on: Subject) -> Any:
    t = trainer(on, data=two_lengths(on), train_sampling_strategy="group_by_length", data_collator=collator(on))
    t.train()
    assert all(torch.tensor(losses(t)).isfinite())
    return keys(t)


@call("packing: `DataCollatorWithFlattening` (the loss of the rows apart)")
def packing(on: Subject) -> Any:
    data = two_lengths(on)
    attention = dict(attn_implementation="eager") if on.name == "llama" else {}
    packed = trained(on, on.load(**attention), data, data_collator=DataCollatorWithFlattening(), max_steps=2)
    apart = trained(on, data=data, data_collator=collator(on), max_steps=2)
    assert_close(torch.tensor(losses(packed)), torch.tensor(losses(apart)), 1e-3)
    return keys(packed)


def saving(on: Subject, **options: Any) -> Trainer:
    """Return a Trainer of six steps that saves after every third one."""
    options = dict(max_steps=6, save_strategy="steps", save_steps=3) | options
    return trainer(on, **options)


@call("`train(resume_from_checkpoint=...)`: the losses of a run that was not stopped")
def resume(on: Subject) -> Any:
    whole = saving(on)
    whole.train()
    again = trainer(on, on.build(seed=2), max_steps=6)
    again.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-3")
    assert_close(torch.tensor(losses(again)[-3:]), torch.tensor(losses(whole)[-3:]), 1e-3)
    assert_close(logits(again.model.eval(), on.tokens()), logits(whole.model.eval(), on.tokens()), 1e-3)
    return len(losses(again))


@call("`load_best_model_at_end=True`")
def load_best(on: Subject) -> Any:
    options = dict(eval_strategy="steps", eval_steps=3, greater_is_better=True, metric_for_best_model="eval_loss")
    t = saving(on, load_best_model_at_end=True, eval_dataset=rows(on, 2), **options)
    t.train()  # the best is the worst here, and not the last
    assert t.state.best_model_checkpoint.endswith("checkpoint-3")
    assert abs(t.evaluate()["eval_loss"] - t.state.best_metric) < 1e-3


@call("`save_only_model=True`, `save_total_limit=1`")
def save_only_model(on: Subject) -> Any:
    t = saving(on, save_only_model=True, save_total_limit=1)
    t.train()
    m = on.load(f"{t.args.output_dir}/checkpoint-6")
    assert_close(logits(m, on.tokens()), logits(t.model.eval(), on.tokens()))


@call("`evaluate()`, `predict()` and `compute_metrics`")
def evaluate(on: Subject) -> Any:
    def accuracy(outputs: Any) -> dict[str, float]:
        return dict(accuracy=float((outputs.predictions[:, :-1].argmax(-1) == outputs.label_ids[:, 1:]).mean()))

    t = trained(on, eval_dataset=rows(on, 3), compute_metrics=accuracy, eval_strategy="steps", eval_steps=2)
    before = trainer(on, eval_dataset=rows(on, 3)).evaluate()["eval_loss"]
    assert abs(before - first_loss(on)) < 1e-3
    predicted = t.predict(rows(on, 3))
    return keys(t), predicted.predictions.shape, sorted(predicted.metrics)


@call("`EarlyStoppingCallback`", heavy=True)
def early_stopping(on: Subject) -> Any:
    options = dict(
        eval_strategy="steps", eval_steps=1, save_steps=1, greater_is_better=True, metric_for_best_model="eval_loss"
    )
    stop = EarlyStoppingCallback(early_stopping_patience=2)
    t = saving(on, load_best_model_at_end=True, eval_dataset=rows(on, 2), callbacks=[stop], **options)
    t.train()
    return t.state.global_step


def assert_decays_matrices(t: Trainer, spared: tuple[str, ...]) -> list[float]:
    """Raise unless projections are decayed and parameters with an ending in `spared` are not; return the decays."""
    decayed = set(t.get_decay_parameter_names(t.model))
    assert not [name for name in decayed if name.endswith(spared)]
    assert {name for name, _ in t.model.named_parameters() if "_proj." in name or "lm_head" in name} <= decayed
    assert sum(p.numel() for g in t.optimizer.param_groups for p in g["params"]) == t.model.num_parameters()
    return [g["weight_decay"] for g in t.optimizer.param_groups]


@call("`weight_decay=0.1` (transformers decays A_log and short convolutions, also of stock models: see the next row)")
def weight_decay(on: Subject) -> Any:
    return assert_decays_matrices(trained(on, weight_decay=0.1), ("dt_bias", "norm.weight", ".bias"))


@call("`weight_decay=0.1` of a Trainer with the names from `kda_layers.training.parameter_groups(model)`")
def parameter_groups(on: Subject) -> Any:
    class KDATrainer(Trainer):
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            decayed = {id(p) for p in kda_layers.training.parameter_groups(model)[0]["params"]}
            return [name for name, p in model.named_parameters() if id(p) in decayed]

    t = trained(on, weight_decay=0.1, kind=KDATrainer)
    return assert_decays_matrices(t, ("A_log", "dt_bias", "conv1d.weight", "norm.weight", ".bias"))


@call('`optim="adafactor"`, "sgd", "adamw_torch_fused"', heavy=True)
def optimizers(on: Subject) -> Any:
    return [keys(trained(on, optim=name)) for name in ("adafactor", "sgd", "adamw_torch_fused")]


@call("`max_grad_norm=0.1`, a cosine schedule, warm-up")
def schedule(on: Subject) -> Any:
    t = trained(on, max_grad_norm=0.1, lr_scheduler_type="cosine", warmup_steps=1)
    assert all(e["grad_norm"] > 0 for e in t.state.log_history if "grad_norm" in e)
    return [e["learning_rate"] for e in t.state.log_history if "learning_rate" in e]


@call("`neftune_noise_alpha=5`")
def neftune(on: Subject) -> Any:
    return keys(trained(on, neftune_noise_alpha=5.0))


@call("`auto_find_batch_size=True`", heavy=True)
def auto_find_batch_size(on: Subject) -> Any:
    return keys(trained(on, auto_find_batch_size=True))


@call("`include_num_input_tokens_seen`, `average_tokens_across_devices`")
def tokens_seen(on: Subject) -> Any:
    t = trained(on, include_num_input_tokens_seen="all")
    return keys(t), t.state.num_input_tokens_seen


@call("`bf16_full_eval=True`")
def bf16_full_eval(on: Subject) -> Any:
    t = trainer(on, bf16_full_eval=True, eval_dataset=rows(on, 2))
    assert abs(t.evaluate()["eval_loss"] - first_loss(on)) < 0.1


@call("`torch_compile=True`", heavy=True)
def torch_compile(on: Subject) -> Any:
    t = trained(on, torch_compile=True, torch_compile_backend="aot_eager", max_steps=3)
    assert abs(losses(t)[0] - first_loss(on)) < 1e-3
    return keys(t)


@call("a loop of one's own: AdamW, `clip_grad_norm_`, a schedule")
def own_loop(on: Subject) -> Any:
    m, inputs, found = on.model().train(), on.tokens(TEXT, SHORT), []
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(m.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for _ in range(5):
        loss = m(**inputs, labels=labels).loss
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in m.parameters())
        assert torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0) > 0
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        found.append(float(loss))
    assert found[-1] < found[0]


@call("accelerate: `prepare`, `backward`, `clip_grad_norm_`, `accumulate`")
def accelerate_prepare(on: Subject) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    inputs = on.tokens()
    batches = torch.utils.data.DataLoader([inputs["input_ids"][0]] * 8, batch_size=2)
    m, optimizer = on.model().train(), None
    optimizer = torch.optim.AdamW(m.parameters(), lr=3e-3)
    m, optimizer, batches = accelerator.prepare(m, optimizer, batches)
    found = []
    for ids in batches:
        with accelerator.accumulate(m):
            loss = m(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
    assert found[-1] < found[0]
    return type(accelerator.unwrap_model(m)) is type(on.shared)


@call("accelerate: `save_state`, `load_state`, `save_model`")
def accelerate_state(on: Subject) -> Any:
    from accelerate import Accelerator, load_checkpoint_in_model

    accelerator, folder = Accelerator(cpu=True), scratch()
    m = accelerator.prepare(on.model())
    accelerator.save_state(str(folder / "state"))
    accelerator.save_model(m, str(folder / "model"))
    with torch.no_grad():
        for p in m.parameters():
            p.zero_()
    accelerator.load_state(str(folder / "state"))
    assert_close(logits(m, on.tokens()), logits(on.shared, on.tokens()))
    other = on.build(seed=2)
    load_checkpoint_in_model(other, str(folder / "model"))
    assert_close(logits(other, on.tokens()), logits(on.shared, on.tokens()))
