"""A training step as users take it: `python -m benchmarks.trainer --size 0.7b`, on a GPU.

transformers' Trainer with its defaults, CapturedTrainer with the same arguments, and a loop of `CapturedStep` with
clipping and fused AdamW, over our model of `benchmarks.lm` in bf16 and sequences of one length. A turn trains a new
trainer or step of the same model: its first steps, with the capture, are not timed. The time is that of the others
together, from one synchronisation to the next, as the host may run ahead of the GPU.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks import lm, report, timing
from kda_layers.training import CapturedStep, CapturedTrainer

TITLE = "A training step of a language model by Trainer, CapturedTrainer and CapturedStep"
COLUMNS = ["contender", "T", "wall ms", "tokens/s"]
WARMUP, STEPS = 6, 20  # of a turn: not timed, timed
ROUNDS = 2


class Random(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of random tokens, whose labels they are."""

    def __init__(self, vocabulary: int) -> None:
        self.tokens = torch.randint(vocabulary, (WARMUP + STEPS, lm.T))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(input_ids=self.tokens[index], labels=self.tokens[index])


class Clock(TrainerCallback):
    """The time of the steps after the first ones."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (WARMUP, WARMUP + STEPS):
            self.times.append(_now())


def by_trainer(trainer: type[Trainer], model: Any) -> list[float]:
    """Milliseconds of a step by a Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=1, max_steps=WARMUP + STEPS, report_to=[], save_strategy="no",
            disable_tqdm=True, use_cpu=lm.DEVICE == "cpu",
        )  # fmt: skip
        clock = Clock()
        trainer(model, arguments, train_dataset=Random(model.config.vocab_size), callbacks=[clock]).train()
    start, end = clock.times
    return [(end - start) / STEPS * 1e3]


def by_captured_step(model: Any) -> list[float]:
    """Milliseconds of a step by a loop over batches that are on the GPU."""
    data = Random(model.config.vocab_size).tokens[:, None].to(lm.DEVICE)
    step = CapturedStep(model.train(), lm.adamw(model), max_norm=1.0)
    times = []
    for i, tokens in enumerate(data, 1):
        step(dict(input_ids=tokens, labels=tokens, use_cache=False))
        if i in (WARMUP, WARMUP + STEPS):
            times.append(_now())
    return [(times[1] - times[0]) / STEPS * 1e3]


CONTENDERS: dict[str, Callable[[Any], list[float]]] = {
    "CapturedTrainer": partial(by_trainer, CapturedTrainer), "Trainer": partial(by_trainer, Trainer),
    "CapturedStep": by_captured_step,
}  # fmt: skip


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--size", choices=lm.SIZES, default="0.7b")
    report.add_name_option(parser, "gpu-trainer-<size>")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    report.add_commit_option(parser)
    args = parser.parse_args(argv)
    model = lm.build("ours", args.size)
    turns = tqdm(total=(len(CONTENDERS) + 1) * (1 + ROUNDS * timing.PASSES) - 1, unit="turn")

    def turn(name: str) -> list[float]:
        gc.collect()  # the graph of the last turn
        torch.cuda.empty_cache()
        times = CONTENDERS[name](model)
        turns.update()
        return times

    for name in CONTENDERS:  # who comes first compiles for all
        turn(name)
    found = timing.in_turns({name: partial(turn, name) for name in CONTENDERS}, ROUNDS)
    rows = []
    for name, times in found.items():
        if isinstance(times, Exception):
            raise times
        wall = times.summary()
        ms = wall["median"]
        rows.append({"contender": name, "T": lm.T, "wall": wall, "wall ms": ms, "tokens/s": lm.T / ms * 1e3})
    name = args.name or f"gpu-trainer-{args.size.replace('.', '')}"
    results = report.document(name, TITLE, rows, COLUMNS, report.stamp(args.commit))
    report.save(args.output, results)
    print(report.text(results))


if __name__ == "__main__":
    main()
