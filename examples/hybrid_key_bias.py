"""Trains a tiny hybrid of KDA and softmax attention on English text, with a learned bias for each key and without.

Both models start from the same weights and see the same excerpts; the bias starts equal for all keys, so that it does
nothing at first. Prints the held-out loss of both before and after, and what A, which scales the bias, has become. One
seed of so short a run says little: --seeds 5 trains five pairs and prints how far their differences scatter. At the
default size they differ by nothing: A has hardly moved from 0.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from checkpoint import as_device
from command import exit_status
from settings import Settings, flag, option
from text_data import BYTES, InputError, Text, load_text, training_batch
from tqdm import tqdm
from train_tiny_lm import build_optimizer, evaluate, learning_rate, precision
from transformers import PreTrainedModel

from kda_layers import KDAConfig, KDAForCausalLM

BIASES = ("none", "key")


@dataclass(frozen=True)
class BiasSettings(Settings):
    """Settings of each of the two models, and how many pairs of them."""

    steps: int = option(400, "optimizer steps of each model")
    hidden_size: int = option(64, "width of the model")
    layers: int = option(2, "layers of the model, every second one of softmax attention")
    heads: int = option(2, "heads of each layer, 32 wide")
    seq_len: int = option(128, "tokens per training excerpt")
    seeds: int = option(1, "pairs of models, of the seeds from --seed on")


def build_models(s: BiasSettings, device: torch.device) -> dict[str, PreTrainedModel]:
    """A model for each kind of bias, with equal weights in all that they share."""
    models: dict[str, Any] = {}
    for bias in BIASES:
        torch.manual_seed(s.seed)
        config = KDAConfig(
            vocab_size=BYTES,
            hidden_size=s.hidden_size,
            num_hidden_layers=s.layers,
            linear_num_heads=s.heads,
            linear_head_dim=32,
            full_attention_interval=2,
            num_attention_heads=s.heads,
            head_dim=32,
            attention_bias=bias,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
        models[bias] = KDAForCausalLM(config).to(device)
    models["key"].load_state_dict(models["none"].state_dict(), strict=False)
    return models


def train(model: PreTrainedModel, text: Text, s: BiasSettings, name: str) -> float:
    """Trains on excerpts that depend on the seed and the step alone; returns held-out bits per byte."""
    optimizer = build_optimizer(model)
    model.train()
    with tqdm(range(s.steps), unit="step", desc=name) as bar:
        for step in bar:
            batch = training_batch(text.train, s.batch_size, s.seq_len, s.seed, step).to(model.device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, s)
            with precision(model, s):
                loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            bar.set_postfix_str(f"loss {loss.item():.3f} nats/byte", refresh=False)
    return evaluate(model, text, s)


def run_pair(text: Text, s: BiasSettings, device: torch.device) -> float:
    """Trains both models and prints their losses; returns by how many bits per byte the biased one is better."""
    models = build_models(s, device)
    before = {bias: evaluate(model, text, s) for bias, model in models.items()}
    after = {bias: train(model, text, s, f"seed {s.seed}, attention_bias {bias}") for bias, model in models.items()}
    for bias in BIASES:
        parameters = sum(p.numel() for p in models[bias].parameters())
        print(
            f"seed {s.seed}, attention_bias {bias + ',':5} {parameters:,} parameters: held-out bits per byte "
            f"{before[bias]:.4f} before, {after[bias]:.4f} after {s.steps} steps"
        )
    A = torch.cat([p.detach() for name, p in models["key"].named_parameters() if name.endswith(".A")])
    print(f"A, which was 0, lies between {A.min():+.3f} and {A.max():+.3f} in the {len(A)} heads with a bias")
    return after["none"] - after["key"]


def run_example(args: argparse.Namespace) -> int:
    s = BiasSettings(**{f.name: getattr(args, f.name) for f in fields(BiasSettings)})
    torch.set_num_threads(s.threads)
    device = as_device(args.device)
    text = load_text(args.data, s.seq_len)
    if s.layers < 2:
        raise InputError(f"--layers {s.layers}: expected at least 2, of which the second has softmax attention")
    began = time.perf_counter()
    gains = [run_pair(text, replace(s, seed=s.seed + i), device) for i in range(s.seeds)]
    gain = statistics.mean(gains)
    words = f"{abs(gain):.4f} bits per byte {'better' if gain > 0 else 'worse'} with the bias than without"
    if s.seeds == 1:
        print(f"{words}, of one seed: no evidence for either before --seeds says how far this scatters")
    else:
        print(
            f"on average {words}; the differences of {s.seeds} seeds have a deviation of {statistics.stdev(gains):.4f}"
        )
    print(f"{time.perf_counter() - began:.0f} s")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", metavar="FILE", help="text to train on (Python's reference documentation)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    for f in fields(BiasSettings):
        parser.add_argument(flag(f.name), type=type(f.default), default=f.default, **f.metadata)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return exit_status("hybrid_key_bias.py", lambda: run_example(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
