"""The training loop of train_lm.py: it never waits for the device but every few steps, and knows what it timed."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from lm_data import Corpus, unigram_nats
from settings import TrainingSettings, option
from text_data import BYTES, InputError, training_batch
from throughput import FORMULA, Clock, flops_per_token
from torch import Tensor
from tqdm import tqdm
from train_tiny_lm import build_optimizer, heldout_nats, precision
from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parents[1]
FIRST_STEPS = 5  # of the run: compilation and autotuning, not timed
WARM_UP, COOL_DOWN = 0.05, 0.2  # parts of the run in which the learning rate rises, and falls with "wsd"
EVALUATED_AT_ONCE = 32768  # tokens


@dataclass(frozen=True)
class LMSettings(TrainingSettings):
    """What fixes the loss curve of a run, besides its text, its backend and, with minutes, the speed of its machine."""

    least: ClassVar = dict(seed=0, seq_len=8, lr=0.0, steps=0, minutes=0.001, vocab_size=0, max_mb=0.001)

    config: str = field(
        default=str(ROOT / "configs" / "120m.json"),
        metadata={"help": "configuration of the model (configs/120m.json)", "metavar": "FILE"},
    )
    minutes: float = option(5.0, "of training, after the first steps")
    steps: int = option(0, "optimizer steps; 0: by --minutes")
    dtype: str = option("bfloat16", "bfloat16: autocast, with float32 parameters", choices=("float32", "bfloat16"))
    seq_len: int = option(8192, "tokens per training excerpt")
    lr: float = option(1e-3, "peak learning rate")
    schedule: str = option(
        "cosine", "after a warm-up: cosine to a tenth, or constant, then linear to zero", choices=("cosine", "wsd")
    )
    vocab: str = option("bpe", "tokens: of a byte-level BPE trained on the text, or bytes", choices=("bpe", "byte"))
    vocab_size: int = option(0, "tokens of the BPE; 0: as the configuration says")
    max_mb: float = option(200.0, "megabytes of text at most")
    heldout_kb: int = option(2000, "kilobytes of it at most that are held out, and a tenth at most")
    log_every: int = option(10, "steps between two readings of loss and time, which wait for the device")
    evaluations: int = option(5, "on the held-out text, evenly over the run")

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.steps <= FIRST_STEPS:
            raise InputError(f"--steps {self.steps}: expected more than the {FIRST_STEPS} that are not timed")
        if 0 < self.vocab_size <= BYTES:
            raise InputError(f"--vocab-size {self.vocab_size}: expected more than the {BYTES} bytes, or 0")


def rate_factor(fraction: float, schedule: str) -> float:
    """Learning rate relative to its peak after this fraction of the run; never 0, so that no step is lost."""
    rising = min(1.0, 0.01 + fraction / WARM_UP)
    if schedule == "wsd":
        return rising * max(1e-3, min(1.0, (1 - fraction) / COOL_DOWN))
    return rising * (0.55 + 0.45 * math.cos(math.pi * min(1.0, fraction)))


class Training:
    """A run, and how far it came."""

    def __init__(self, settings: LMSettings, model: PreTrainedModel, corpus: Corpus, compiled: bool) -> None:
        self.settings, self.model, self.corpus = settings, model.train(), corpus
        self.optimizer = build_optimizer(model)
        self.device, self.clock, self.step, self.status = model.device, Clock(), 0, "running"
        self.unigram = unigram_nats(corpus, model.config.vocab_size)
        self.losses: list[float] = []  # of each step, in nats per token
        self.heldout: list[dict[str, float]] = []
        self.first_steps_seconds: float | None = None
        self._unread: list[Tensor] = []  # losses of the last steps, on the device

        def loss_of(batch: Tensor) -> Tensor:
            return model(input_ids=batch, labels=batch, use_cache=False).loss

        # Compiled with the loss, so that the logits are not a result that has to be kept in float32.
        self._loss_of = torch.compile(loss_of, fullgraph=True, dynamic=False) if compiled else loss_of

    def fraction(self) -> float:
        """How much of the run is done."""
        s = self.settings
        return self.step / s.steps if s.steps else self.clock.seconds() / (60 * s.minutes)

    def run(self, signals: Sequence[int], on_evaluation: Callable[[], Any]) -> None:
        """Trains to the end, until a signal arrives, or until the loss is no number."""
        s = self.settings
        terminal, self._began = sys.stderr.isatty(), time.perf_counter()
        with tqdm(total=s.steps or None, unit="step", desc="training", mininterval=0.2 if terminal else 15) as bar:
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
            self._evaluate()
            self.status = "finished"

    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def report(self, peak_tflops: float | None) -> dict[str, Any]:
        """What is known now, in numbers that JSON can hold."""
        s, tokens = self.settings, self.step * self._tokens_per_step()
        flops, rates = flops_per_token(self.model, s.seq_len), self.clock.rates(self._tokens_per_step())
        mfu = rates["median"] * flops["total"] / (peak_tflops * 1e12) if rates and peak_tflops else None
        settings = asdict(s) | {"config": Path(s.config).name} | ({"minutes": None} if s.steps else {"steps": None})
        return {
            "status": self.status,
            "settings": settings,
            "learning_rate_follows": "steps" if s.steps else "the clock: steps and losses depend on the machine",
            "corpus": self.corpus.facts,
            "parameters": self.parameters(),
            "steps": self.step,
            "tokens": tokens,
            "epochs": tokens / len(self.corpus.train),
            "tokens_per_s": rates,
            "mfu": mfu,
            "flops_per_token": flops | {"formula": FORMULA},
            "timed": f"windows of {s.log_every} steps, without the first {FIRST_STEPS} of the run and evaluations",
            "first_steps_seconds": self.first_steps_seconds,
            "training_seconds": self.clock.seconds_in_windows(),
            "peak_memory_gib": self._peak_memory_gib(),
            "unigram_nats_per_token": self.unigram,
            "heldout": self.heldout,
            "windows": self.clock.windows,
            "losses": self.losses,
        }

    def _peak_memory_gib(self) -> float | None:
        return torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None

    def _tokens_per_step(self) -> int:
        return self.settings.batch_size * self.settings.seq_len

    def _batch(self) -> Tensor:
        """[batch_size, seq_len] int64, on its way to the device; the rows alone are copied, from pinned memory."""
        s = self.settings
        batch = training_batch(self.corpus.train, s.batch_size, s.seq_len, s.seed, self.step)
        if self.device.type == "cuda":
            batch = batch.pin_memory()
        return batch.to(self.device, non_blocking=True).long()

    def _take_step(self) -> None:
        s = self.settings
        rate = s.lr * rate_factor(self.fraction(), s.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with precision(self.model, s):
            loss = self._loss_of(self._batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._unread.append(loss.detach())
        self.step += 1

    def _read_losses(self) -> bool:
        """Waits for the device; whether all losses are finite, of which only those before another kind are kept."""
        if self._unread:
            self.losses += itertools.takewhile(math.isfinite, torch.stack(self._unread).tolist())
            self._unread.clear()
            self.clock.end_window(self.step)
        if self.step >= FIRST_STEPS and not self.clock.started:
            self.first_steps_seconds = time.perf_counter() - self._began
            self.clock.start(self.step)
        return len(self.losses) == self.step

    def _evaluate(self) -> None:
        train, heldout = self.corpus.train[-self.settings.seq_len :].long(), self.corpus.heldout.long()
        nats = heldout_nats(self.model, train, heldout, self.settings, EVALUATED_AT_ONCE)
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
        rates = self.clock.rates(self._tokens_per_step())
        speed = f", {rates['median']:,.0f} tokens/s" if rates else ""
        return f"loss {self.losses[-1]:.3f} nats/token{speed}, {self.clock.seconds() / 60:.1f} min"
