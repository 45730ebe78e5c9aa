"""Trains a tiny byte-level KDA language model on English text, next to a byte-trigram model of the same text.

Saves a checkpoint and a picture of the loss curve; Ctrl-C saves too, and --resume continues the same curve.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from checkpoint import as_device, check_replaceable, held_signals, load_model, load_state, save_checkpoint
from command import exit_status
from report import plot, sample
from settings import Run, Settings, TrainingSettings, flag
from text_data import BYTES, InputError, Text, Trigram, heldout_windows, load_text, training_batch
from torch import Tensor
from torch.optim import AdamW
from tqdm import tqdm
from transformers import PreTrainedModel

from kda_layers import KDAConfig, KDAForCausalLM

EVALUATIONS = 6  # on held-out text per run, each followed by a checkpoint
PROMPT, SAMPLE = b"The ", 300


def build_model(s: Settings, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(s.seed)
    config = KDAConfig(
        vocab_size=BYTES,
        hidden_size=s.hidden_size,
        num_hidden_layers=s.layers,
        linear_num_heads=s.heads,
        linear_head_dim=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = KDAForCausalLM(config)  # initialised on the CPU: the same on every device
    return model.to(device)


def build_optimizer(model: PreTrainedModel) -> AdamW:
    """AdamW that decays matrices only: not norms, gate parameters (A_log, dt_bias), biases or convolutions."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, s: Settings) -> float:
    """Linear warmup over a twentieth of the run, then a cosine down to a tenth of the peak."""
    warmup = max(1, s.steps // 20)
    if step < warmup:
        return s.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, s.steps - warmup)
    return s.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def precision(model: PreTrainedModel, s: TrainingSettings) -> torch.autocast:
    return torch.autocast(model.device.type, torch.bfloat16, enabled=s.dtype == "bfloat16")


@torch.no_grad()
def heldout_nats(
    model: PreTrainedModel, train: Tensor, heldout: Tensor, s: TrainingSettings, tokens: int = 4096
) -> float:
    """Negative log-likelihood of all of `heldout`, which follows `train`; some `tokens` are computed at once."""
    model.eval()
    nats = 0.0
    windows = heldout_windows(train, heldout, s.seq_len)
    for inputs, labels in zip(*(w.to(model.device).split(max(1, tokens // s.seq_len)) for w in windows), strict=True):
        with precision(model, s):
            logits = model(input_ids=inputs, use_cache=False).logits
        logits, targets = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        nats += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    return nats


def evaluate(model: PreTrainedModel, text: Text, s: Settings) -> float:
    """Bits per held-out byte."""
    return heldout_nats(model, text.train, text.heldout, s) / len(text.heldout) / math.log(2)


def train(run: Run, model: PreTrainedModel, optimizer: AdamW, text: Text, output: Path) -> int:
    """Trains from run.step to the end, or to a signal, and saves; returns the signal, or 0."""
    s = run.settings
    every = max(1, s.steps // EVALUATIONS)

    def save() -> None:
        save_checkpoint(output, model, {**asdict(run), "optimizer": optimizer.state_dict()})

    with held_signals() as received, tqdm(total=s.steps, initial=run.step, unit="step", desc="training") as bar:
        while run.step < s.steps and not received:
            batch = training_batch(text.train, s.batch_size, s.seq_len, s.seed, run.step).to(model.device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(run.step, s)
            model.train()
            with precision(model, s):
                loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run.step += 1
            run.losses.append(loss.item() / math.log(2))
            rate = (bar.format_dict["rate"] or 0) * batch.numel()
            bar.set_postfix_str(f"loss {run.losses[-1]:.3f} bits/byte, {rate:,.0f} tokens/s", refresh=False)
            bar.update()
            if run.step % every == 0 or run.step == s.steps:
                run.heldout.append((run.step, evaluate(model, text, s)))
                save()
        if received:
            save()
    return received[0] if received else 0


def start(args: argparse.Namespace) -> tuple[Run, PreTrainedModel, AdamW, Text]:
    """A new run, or the resumed one; an option that would bend a resumed run's curve is an InputError."""
    given = {f.name: value for f in fields(Settings) if (value := getattr(args, f.name)) is not None}
    device = as_device(args.device)
    if args.resume is None:
        settings = Settings(**given)
        text = load_text(args.data, settings.seq_len)
        run = Run(settings, args.data and str(Path(args.data).resolve()), text.sha256)
        model = build_model(run.settings, device)
        return run, model, build_optimizer(model), text
    state = load_state(args.resume)
    try:
        stored = state.pop("optimizer")
        run = Run(**state | {"settings": Settings(**state["settings"])})
    except (KeyError, TypeError) as error:
        raise InputError(f"{args.resume}: expected a checkpoint of this version of the script, got: {error}") from error
    for name, value in given.items():
        if value != getattr(run.settings, name):
            raise InputError(
                f"{flag(name)} {value}: expected {getattr(run.settings, name)} as in {args.resume}, or nothing: "
                "a resumed run continues the same loss curve"
            )
    text = load_text(args.data or run.data, run.settings.seq_len)
    if text.sha256 != run.data_sha256:
        raise InputError(
            f"--data {args.data or run.data or '(default)'}: expected the text that {args.resume} was trained on, "
            f"SHA-256 {run.data_sha256[:12]}..., got {text.sha256[:12]}..."
        )
    model = load_model(args.resume, device)
    optimizer = build_optimizer(model)
    optimizer.load_state_dict(stored)
    return run, model, optimizer, text


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", metavar="FILE", help="text to train on (Python's reference documentation)")
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="checkpoint to write (runs/tiny_lm, or that of --resume)"
    )
    parser.add_argument("--resume", metavar="DIR", type=Path, help="checkpoint to continue, with its settings and text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    for f in fields(Settings):
        parser.add_argument(flag(f.name), type=type(f.default), **f.metadata)
    args = parser.parse_args(argv)
    args.output = (args.output or args.resume or Path("runs/tiny_lm")).resolve()
    return args


def run_example(args: argparse.Namespace) -> int:
    run, model, optimizer, text = start(args)
    torch.set_num_threads(run.settings.threads)
    check_replaceable(args.output)
    trigram = Trigram(text.train).bits_per_byte(text.train, text.heldout)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(text.train):,} bytes to train on, {len(text.heldout):,} held out, {parameters:,} parameters")
    began = time.perf_counter()
    stopped = train(run, model, optimizer, text, args.output)
    plot(run.losses, run.heldout, trigram, args.output / "loss.png")
    if stopped:
        print(f"stopped at step {run.step} of {run.settings.steps}; to continue: --resume {args.output}")
        return 128 + stopped
    print(f"trained in {time.perf_counter() - began:.0f} s; checkpoint and loss.png are in {args.output}")
    model = load_model(args.output, model.device)
    print(
        f"held-out bits per byte: {evaluate(model, text, run.settings):.3f} KDA (reloaded), "
        f"{trigram:.3f} interpolated byte trigrams"
    )
    torch.manual_seed(run.settings.seed)
    sample(model, PROMPT, SAMPLE)
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_status("train_tiny_lm.py", lambda: run_example(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
