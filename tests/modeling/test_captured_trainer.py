"""CapturedTrainer trains as transformers' Trainer does, bit for bit: on a tape on the CPU, in a CUDA graph on a GPU."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from kda_layers.modeling.cuda_graphs import trainer as captured_trainer
from kda_layers.modeling.cuda_graphs import training_step
from kda_layers.training import CapturedTrainer
from tests.kernels.cases import DEVICES
from tests.modeling import captures
from tests.modeling.captures import Reads
from tests.modeling.taped_graphs import TapedGraphs
from tests.modeling.test_trainer import SAVED, STEPS, assert_same, losses, trainer_of


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        monkeypatch.setattr(training_step, "CudaGraphs", TapedGraphs)
        monkeypatch.setattr(captured_trainer, "DEVICES", ("cpu",))
    return request.param


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Lines that the trainer logs, added while the test runs."""
    found: list[str] = []

    class Collects(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.module == captured_trainer.__name__.rpartition(".")[2]:
                found.append(record.getMessage())

    logger, handler = logging.getLogger("kda_layers"), Collects()
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def build(device: str, seed: int = 1) -> Any:
    """On a GPU as its kernels want it: the plain operator, which copies from the host, cannot be captured."""
    return captures.build("hybrid", device, seed=seed).train()


def trained(kind: type[Trainer], model: Any, folder: Path, device: str, **options: Any) -> Trainer:
    of_trainer = {name: options.pop(name) for name in ("callbacks", "optimizer_cls_and_kwargs") if name in options}
    kind_with = functools.partial(kind, **of_trainer)
    run = trainer_of(model, folder / kind.__name__, kind_with, **dict(use_cpu=device == "cpu") | options)
    run.train()
    return run


def check_like_trainer(make: Any, folder: Path, device: str, captured: bool = True, **options: Any) -> CapturedTrainer:
    """Train by both; fail unless losses, norms and parameters have the same bits, and capturing went as expected."""
    ours = trained(CapturedTrainer, make(device), folder, device, **options)
    stock = trained(Trainer, make(device), folder, device, **options)
    assert losses(ours) == losses(stock)
    assert_same(ours.model, stock.model)
    norms = [[e["grad_norm"] for e in run.state.log_history if "grad_norm" in e] for run in (ours, stock)]
    assert norms[0] == norms[1] != []
    assert (ours._step is not None and ours._step.captured) == captured
    return ours


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no clipping": dict(max_grad_norm=0.0),
    "accumulated": dict(gradient_accumulation_steps=3, max_steps=6),
    "smoothed": dict(label_smoothing_factor=0.1),
    "scheduled": dict(lr_scheduler_type="cosine", warmup_steps=2),
    "autocast": dict(bf16=True),
}


@pytest.mark.parametrize("name", [n if n in ("plain", "accumulated") else slow(n) for n in OPTIONS])
def test_the_bits_of_trainer(name: str, device: str, tmp_path: Path, said: list[str]) -> None:
    check_like_trainer(build, tmp_path, device, **OPTIONS[name])
    assert said == []


def test_replays_run_no_python_of_the_model(device: str, tmp_path: Path) -> None:
    calls: list[int] = []
    model = build(device)
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    trained(CapturedTrainer, model, tmp_path, device)
    assert len(calls) == 3 + 1 < STEPS


@pytest.mark.slow
def test_resuming(device: str, tmp_path: Path) -> None:
    whole = trained(CapturedTrainer, build(device), tmp_path, device)
    again = trainer_of(build(device, seed=3), tmp_path, CapturedTrainer, use_cpu=device == "cpu")
    again.train(resume_from_checkpoint=str(tmp_path / "CapturedTrainer" / f"checkpoint-{SAVED}"))
    assert losses(again) == losses(whole)
    assert_same(again.model, whole.model)


@pytest.mark.slow
def test_evaluation_and_the_best_model(device: str, tmp_path: Path) -> None:
    options = dict(
        eval_strategy="steps", eval_steps=SAVED, load_best_model_at_end=True, metric_for_best_model="loss"
    )  # fmt: skip
    check_like_trainer(build, tmp_path, device, **options)


@pytest.mark.slow
def test_adapters(device: str, tmp_path: Path) -> None:
    def adapted(device: str) -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(build(device), peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))

    check_like_trainer(adapted, tmp_path, device)


class OfLengths(torch.utils.data.Dataset):
    """Rows of eight tokens, and every third one of six."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = torch.arange(3, 3 + (6 if i % 3 == 2 else 8))
        return dict(input_ids=row, labels=row)


def test_batches_of_other_shapes(device: str, tmp_path: Path, said: list[str]) -> None:
    """They run eagerly between replays; the log says it once."""

    def run(kind: type[Trainer]) -> Trainer:
        found = trainer_of(
            build(device), tmp_path / kind.__name__, kind, per_device_train_batch_size=1, use_cpu=device == "cpu",
            max_steps=20,
        )  # fmt: skip
        found.train_dataset = OfLengths()
        found.train()
        return found

    ours, stock = run(CapturedTrainer), run(Trainer)
    assert ours._step is not None
    assert ours._step.captured
    assert losses(ours) == losses(stock)
    assert_same(ours.model, stock.model)
    (text,) = said
    assert text.startswith(
        "CapturedTrainer runs as Trainer, without a CUDA graph: of a batch, batches[0]['input_ids'] "
    )


def test_each_reason_is_logged(device: str, tmp_path: Path, said: list[str]) -> None:
    """Odd batches come before the capture that fails; later batches repeat neither."""
    model = build(device)
    model.model.layers[1].mlp = Reads(model.model.layers[1].mlp)
    run = trainer_of(
        model, tmp_path, CapturedTrainer, per_device_train_batch_size=1, use_cpu=device == "cpu", max_steps=20
    )
    run.train_dataset = OfLengths()
    run.train()
    assert len(said) == 2
    assert "of a batch, " in said[0]
    assert "cannot be captured in a CUDA graph" in said[1]


def test_a_model_that_reads_tensors(device: str, tmp_path: Path, said: list[str]) -> None:
    def reading(device: str) -> Any:
        model = build(device)
        model.model.layers[1].mlp = Reads(model.model.layers[1].mlp)
        return model

    check_like_trainer(reading, tmp_path, device, captured=False)
    (text,) = said
    assert "cannot be captured in a CUDA graph" in text


@pytest.mark.slow
def test_a_loss_of_its_own(device: str, tmp_path: Path) -> None:
    """A `compute_loss` that is overridden is captured, too."""

    class Twice:
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    ours = trained(type("Ours", (Twice, CapturedTrainer), {}), build(device), tmp_path, device)
    stock = trained(type("Stock", (Twice, Trainer), {}), build(device), tmp_path, device)
    assert losses(ours) == losses(stock)
    assert ours._step.captured


class Sometimes:
    """A loss that is NaN or infinite for some batches, and whose gradient is not."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, first = super().compute_loss(model, inputs, *args, **kwargs), inputs["input_ids"][0, 0]  # type: ignore[misc]
        spoilt = torch.where(first % 3 == 0, torch.nan, torch.where(first % 3 == 1, torch.inf, 0.0))
        return loss + spoilt.detach()


class Watches(TrainerCallback):
    """Notes the option that the trainer has between two batches."""

    def __init__(self) -> None:
        self.seen: set[bool] = set()

    def on_substep_end(self, args: Any, *_: Any, **__: Any) -> None:
        self.seen.add(args.logging_nan_inf_filter)

    on_step_end = on_pre_optimizer_step = on_substep_end


@pytest.mark.parametrize("filtered", [True, False])
def test_losses_that_are_not_finite(filtered: bool, device: str, tmp_path: Path) -> None:
    """They are logged as `Trainer` logs them, which looks at each; nothing else sees that it does not look here."""
    watches = Watches()
    options = dict(
        logging_nan_inf_filter=filtered, logging_steps=3, gradient_accumulation_steps=2, max_steps=12,
        per_device_train_batch_size=1, callbacks=[watches],
    )  # fmt: skip
    runs = [
        trained(type("Run", (Sometimes, kind), {}), build(device), tmp_path / kind.__name__, device, **options)
        for kind in (CapturedTrainer, Trainer)
    ]
    assert runs[0]._step.captured
    assert str(losses(runs[0])) == str(losses(runs[1]))  # NaN is not equal to itself
    assert all(map(math.isfinite, losses(runs[0]))) == filtered
    assert watches.seen == {filtered}
    assert_same(runs[0].model, runs[1].model)


class Counts:
    """An own number of operations, as transformers advises, and a count of losses that are not finite."""

    spoilt = 0

    def floating_point_ops(self, inputs: Any) -> int:
        return 1

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.spoilt += not loss.isfinite()
        return loss


class Twice:
    """Two backwards in a step."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        super().training_step(*args, **kwargs)  # type: ignore[misc]
        return super().training_step(*args, **kwargs)  # type: ignore[misc]


class Clips(TrainerCallback):
    """Another norm at every step, or none."""

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        args.max_grad_norm = (0.05, 1e9, 0)[state.global_step % 3]


@pytest.mark.parametrize("own", [Counts, Twice, object])
def test_what_subclasses_and_callbacks_do(own: type, device: str, tmp_path: Path) -> None:
    """They see the losses and gradients of `Trainer`, and its options are read at every step."""
    bases = (own, Sometimes) if own is Counts else (own,) if own is Twice else ()
    runs: list[Any] = [
        trained(type("Run", (*bases, kind), {}), build(device), tmp_path / kind.__name__, device, callbacks=[Clips()])
        for kind in (CapturedTrainer, Trainer)
    ]
    assert runs[0]._step.captured
    assert str(losses(runs[0])) == str(losses(runs[1]))
    assert_same(runs[0].model, runs[1].model)
    assert runs[0].args.logging_nan_inf_filter
    if own is Counts:
        assert runs[0].spoilt == runs[1].spoilt > 0


class Replaces(nn.Module):
    """Counts its calls in a buffer that it replaces."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.inner(x)


def test_a_model_that_replaces_a_buffer(device: str, tmp_path: Path, said: list[str]) -> None:
    def replacing(device: str) -> Any:
        model = build(device)
        model.model.layers[1].mlp = Replaces(model.model.layers[1].mlp).to(device)
        return model

    check_like_trainer(replacing, tmp_path, device, captured=False)
    (text,) = said
    assert "model must update its buffers in place" in text


def test_a_model_on_two_devices(device: str, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("model and optimizer must have their parameters on one device, got cuda:0, cuda:1")

    monkeypatch.setattr(captured_trainer, "CapturedStep", refuses)
    check_like_trainer(build, tmp_path, device, captured=False)
    (text,) = said
    assert text.endswith("on one device, got cuda:0, cuda:1")


class Unfreezes(TrainerCallback):
    """Trains other parameters of the same shapes from the fifth step on."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight.requires_grad_(state.global_step >= 4)
            layer.mlp.up_proj.weight.requires_grad_(state.global_step < 4)


def test_parameters_that_are_frozen_on_the_way(device: str, tmp_path: Path) -> None:
    """Another step is captured for the new parameters."""
    ours = check_like_trainer(build, tmp_path, device, callbacks=[Unfreezes()], max_steps=10)
    assert ours._step is not None
    assert ours._step._calls == 6


class Switched(torch.optim.SGD):
    """An optimizer with modes, as schedule-free ones."""

    mode: str | None = None

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def step(self, closure: Any = None) -> None:
        assert self.mode == "train"
        super().step()


def test_optimizers_with_modes(device: str, tmp_path: Path) -> None:
    options = dict(optimizer_cls_and_kwargs=(Switched, dict(lr=0.1)), eval_strategy="steps", eval_steps=2)
    check_like_trainer(build, tmp_path, device, **options)


def test_options_that_work_between_the_backwards(device: str, tmp_path: Path, said: list[str]) -> None:
    trained(CapturedTrainer, build(device), tmp_path, device, torch_empty_cache_steps=2)
    assert said[0].endswith("torch_empty_cache_steps frees memory between steps")


def test_a_cpu(tmp_path: Path, said: list[str]) -> None:
    check_like_trainer(build, tmp_path, "cpu", captured=False)
    assert said == ["CapturedTrainer runs as Trainer, without a CUDA graph: the device is cpu"]
