"""The training loop of train_lm.py: reads losses from the device every few steps only, times itself, can be resumed."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from common.checkpoint import checkpoint_of, load_state
from common.cli import InputError, first_line
from common.corpus import Corpus, unigram_nats
from common.optimization import build_optimizer, heldout_nats, precision, rate_factor, set_rate
from common.settings import FIRST_STEPS, LMSettings
from common.text import training_batch
from common.throughput import Clock
from common.trigram import Trigram
from kda_layers.training import CapturedStep

MAX_NORM = 1.0  # of the gradients of a step
EVALUATED_AT_ONCE = 4096  # tokens on a CPU, eight times as many on a GPU
STATE = {
    "settings", "data", "data_sha256", "step", "losses", "heldout", "windows", "first_steps_seconds", "optimizer",
}  # fmt: skip
TRIGRAM_BYTES = 20_000_000  # of training text at most: the counts take eight bytes each, and there are copies


def load_run(directory: Path) -> dict[str, Any]:
    """Load the state of a run to resume; raise an InputError unless it is what `Training.state` makes."""
    state = load_state(checkpoint_of(directory))
    found = STATE ^ state.keys() or {f.name for f in fields(LMSettings)} ^ state["settings"].keys()
    if found:
        reason = f"missing or unknown {', '.join(sorted(found))}"
        raise InputError(f"{directory}: expected a checkpoint of this version of train_lm.py, got: {reason}")
    return state


class Training:
    """A run and its progress: `run` trains, `state` is what a checkpoint keeps, `common.report` what run.json keeps."""

    def __init__(
        self,
        settings: LMSettings,
        model: PreTrainedModel,
        corpus: Corpus,
        compiled: bool,
        resumed: dict[str, Any] | None = None,
        cuda_graph: bool = False,
    ) -> None:
        self.settings, self.model, self.corpus = settings, model.train(), corpus
        self.optimizer = build_optimizer(model, cuda_graph)
        self.device, self.status = model.device, "running"
        self.unigram, self.trigram = unigram_nats(corpus, model.config.vocab_size), None
        if settings.vocab == "byte" and len(corpus.train) <= TRIGRAM_BYTES:
            text, heldout = corpus.train.long(), corpus.heldout.long()
            self.trigram = Trigram(text).bits_per_byte(text, heldout)
        progress = resumed or {"step": 0, "losses": [], "heldout": [], "windows": [], "first_steps_seconds": None}
        self.step: int = progress["step"]
        self.losses: list[float] = progress["losses"]  # of each step, in nats per token
        self.heldout: list[dict[str, float]] = progress["heldout"]
        self.first_steps_seconds: float | None = progress["first_steps_seconds"]
        self.clock = Clock(progress["windows"])
        if resumed:
            self.optimizer.load_state_dict(resumed["optimizer"])
            for group in self.optimizer.param_groups:
                group["capturable"] = cuda_graph  # not what the earlier process was told
        self._first, self._unread = self.step, list[Tensor]()  # of this process; losses on the device

        def loss_of(batch: Tensor) -> Tensor:
            return model(input_ids=batch, labels=batch, use_cache=False).loss

        # Compiled with the loss, so that the logits are not an output that has to be kept in float32.
        self._loss_of = torch.compile(loss_of, fullgraph=True, dynamic=False) if compiled else loss_of
        self._captured = None
        if cuda_graph:
            self._captured = CapturedStep(model, self.optimizer, loss_of=self._loss, max_norm=MAX_NORM)

    def fraction(self) -> float:
        """Part of the run that is done."""
        s = self.settings
        return self.step / s.steps if s.steps else self.clock.seconds() / (60 * s.minutes)

    def run(self, signals: Sequence[int], on_evaluation: Callable[[], Any]) -> None:
        """Train to the end, until a signal arrives, or until the loss is not finite."""
        s = self.settings
        slow, self._began = 0.2 if sys.stderr.isatty() else 15, time.perf_counter()
        with tqdm(total=s.steps or None, initial=self.step, unit="step", desc="training", mininterval=slow) as bar:
            while not signals and self.fraction() < 1:
                self._take_step()
                if self.step >= FIRST_STEPS and (self.step - FIRST_STEPS) % s.log_every == 0:
                    if not self._read_losses():
                        break
                    bar.set_postfix_str(self._progress(), refresh=False)
                    if 1 + len(self.heldout) <= min(self.fraction() * s.evaluations, s.evaluations - 1):
                        with self.clock.paused():
                            self._evaluate()
                            on_evaluation()
                bar.update()
        if not self._read_losses():
            self.status = f"stopped: the loss of step {len(self.losses) + 1} is not finite"
        elif signals:
            self.status = f"stopped by signal {signals[0]} at step {self.step}"
        else:
            if not self.heldout or self.heldout[-1]["step"] < self.step:
                self._evaluate()
            self.status = "finished"

    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def state(self, data: str | None) -> dict[str, Any]:
        """Everything that a resumed run needs besides the model; `data` is the path of the text."""
        return {
            "data": data,
            "settings": asdict(self.settings),
            "data_sha256": self.corpus.facts["sha256"],
            "step": self.step,
            "losses": self.losses,
            "heldout": self.heldout,
            "windows": self.clock.windows,
            "first_steps_seconds": self.first_steps_seconds,
            "optimizer": self.optimizer.state_dict(),
        }

    def _batch(self) -> Tensor:
        """[batch_size, seq_len] int64, possibly still being copied to the device, from pinned memory."""
        s = self.settings
        batch = training_batch(self.corpus.train, s.batch_size, s.seq_len, s.seed, self.step)
        if self.device.type == "cuda":
            batch = batch.pin_memory()
        return batch.to(self.device, non_blocking=True).long()

    def _take_step(self) -> None:
        set_rate(self.optimizer, self.settings.lr * rate_factor(self.fraction(), self.settings.schedule))
        if self._captured is not None:
            loss = self._captured({"batch": self._batch()})
        else:
            loss = self._loss(self._batch())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._unread.append(loss.detach())
        self.step += 1

    def _loss(self, batch: Tensor) -> Tensor:
        with precision(self.device, self.settings):
            return self._loss_of(batch)

    def _read_losses(self) -> bool:
        """Wait for the device and keep the losses before the first one that is not finite; True if there is none."""
        if self._unread:
            self.losses += itertools.takewhile(math.isfinite, torch.stack(self._unread).tolist())
            self._unread.clear()
            self.clock.end_window(self.step)
        if self.step - self._first >= FIRST_STEPS and not self.clock.started:
            self.first_steps_seconds = self.first_steps_seconds or time.perf_counter() - self._began
            self.clock.start(self.step)
        return len(self.losses) == self.step

    def _evaluate(self) -> None:
        train, heldout = self.corpus.train[-self.settings.seq_len :].long(), self.corpus.heldout.long()
        at_once = EVALUATED_AT_ONCE * (8 if self.device.type == "cuda" else 1)
        nats = heldout_nats(self.model, train, heldout, self.settings, at_once)
        self.model.train()
        self.heldout.append(
            {
                "step": self.step,
                "seconds": self.clock.seconds_in_windows(),
                "nats_per_token": nats / len(heldout),
                "bits_per_byte": nats / self.corpus.heldout_bytes / math.log(2),
            }
        )

    def _progress(self) -> str:
        rates = self.clock.rates(self.settings.batch_size * self.settings.seq_len)
        speed = f", {rates['median']:,.0f} tokens/s" if rates else ""
        return f"loss {self.losses[-1]:.3f} nats/token{speed}, {self.clock.seconds() / 60:.1f} min"


def start(
    settings: LMSettings, model: Any, corpus: Corpus, compiled: bool, resumed: Any, cuda_graph: bool, backend: str
) -> Training:
    """Return the `Training`; an input error where --cuda-graph cannot be."""
    if cuda_graph and model.device.type == "cuda" and backend == "eager":
        raise InputError(
            "--cuda-graph: expected a backend with CUDA kernels, got eager, which copies from the host in each step"
        )
    try:
        return Training(settings, model, corpus, compiled, resumed, cuda_graph)
    except ValueError as error:
        if not cuda_graph:
            raise
        raise InputError(f"--cuda-graph: {first_line(error)}") from error
