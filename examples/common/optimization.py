"""Optimizer, learning rate, precision and held-out loss of every training loop of the examples."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from tqdm import tqdm
from transformers import PreTrainedModel

import kda_layers
from common.settings import TrainingSettings
from common.text import Text, heldout_windows, training_batch

WARM_UP, COOL_DOWN = 0.05, 0.2  # parts of the run in which the learning rate rises, and falls with "wsd"


def build_optimizer(model: nn.Module, capturable: bool = False) -> AdamW:
    """AdamW that decays matrices only. With `capturable`, a CUDA graph can hold its steps."""
    groups = kda_layers.training.parameter_groups(model, weight_decay=0.1)
    return AdamW(groups, betas=(0.9, 0.95), fused=True, capturable=capturable)


def rate_factor(fraction: float, schedule: str = "cosine") -> float:
    """Learning rate relative to its peak after this fraction of the run; never 0, so that no step is lost."""
    rising = min(1.0, 0.01 + fraction / WARM_UP)
    if schedule == "wsd":
        return rising * max(1e-3, min(1.0, (1 - fraction) / COOL_DOWN))
    return rising * (0.55 + 0.45 * math.cos(math.pi * min(1.0, fraction)))


def set_rate(optimizer: AdamW, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def precision(device: torch.device, s: TrainingSettings) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=s.dtype == "bfloat16")


def fit(
    module: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    text: Text,
    s: TrainingSettings,
    steps: int,
    device: torch.device,
    name: str,
) -> list[float]:
    """Train `module` on excerpts of a text that depend on the seed and the step alone; return the losses.

    Args:
        loss_of: loss of a batch of tokens [batch_size, seq_len].
        name: label of the progress bar.
    """
    optimizer = build_optimizer(module)
    losses = []
    with tqdm(range(steps), unit="step", desc=name) as bar:
        for step in bar:
            batch = training_batch(text.train, s.batch_size, s.seq_len, s.seed, step).to(device)
            set_rate(optimizer, s.lr * rate_factor(step / steps))
            with precision(device, s):
                loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    return losses


@torch.no_grad()
def heldout_nats(
    model: PreTrainedModel, train: Tensor, heldout: Tensor, s: TrainingSettings, tokens: int = 4096
) -> float:
    """Negative log-likelihood in nats of all of `heldout`, which follows `train`; `tokens` are computed at once."""
    model.eval()
    nats = 0.0
    windows = heldout_windows(train, heldout, s.seq_len)
    for inputs, labels in zip(*(w.to(model.device).split(max(1, tokens // s.seq_len)) for w in windows), strict=True):
        with precision(model.device, s):
            logits = model(input_ids=inputs, use_cache=False).logits
        logits, targets = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        nats += nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    return nats


def evaluate(model: PreTrainedModel, text: Text, s: TrainingSettings) -> float:
    """Bits per held-out byte of a byte-level model."""
    return heldout_nats(model, text.train, text.heldout, s) / len(text.heldout) / math.log(2)
