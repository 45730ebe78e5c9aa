"""Trains a tiny hybrid of KDA and softmax attention on English text, with a learned bias for each key and without.

Both models start from the same weights and see the same excerpts; the bias starts equal for all keys, where it has no
effect. Prints the held-out loss of both before and after, and the final A, which scales the bias. One seed of so short
a run says little: --seeds 5 trains five pairs and prints the deviation of their differences. At the default size the
models do not differ: A has hardly moved from 0.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import cli
from common.optimization import evaluate, fit
from common.settings import ModelSettings
from common.text import BYTES, Text, load_text
from transformers import PreTrainedModel

from kda_layers import KDAConfig, KDAForCausalLM

BIASES = ("none", "key")


@dataclass(frozen=True)
class BiasSettings(ModelSettings):
    """Settings of each of the two models, and the number of pairs."""

    steps: int = cli.option(400, "optimizer steps of each model")
    hidden_size: int = cli.option(64, "width of the model")
    layers: int = cli.option(2, "layers of the model, every second one of softmax attention")
    heads: int = cli.option(2, "heads of each layer, 32 wide")
    seq_len: int = cli.option(128, "tokens per training excerpt")
    seeds: int = cli.option(1, "pairs of models, of the seeds from --seed on")


def build_models(s: BiasSettings, device: torch.device) -> dict[str, PreTrainedModel]:
    """Build a model for each kind of bias, with equal weights in all that they share."""
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
    """Train a model; return its bits per held-out byte."""
    fit(model.train(), lambda batch: model(input_ids=batch, labels=batch).loss, text, s, s.steps, model.device, name)
    return evaluate(model, text, s)


def run_pair(text: Text, s: BiasSettings, device: torch.device) -> float:
    """Train both models and print their losses; return by how many bits per byte the biased one is better."""
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
    print(f"A, initially 0, lies between {A.min():+.3f} and {A.max():+.3f} in the {len(A)} heads with a bias")
    return after["none"] - after["key"]


def run_example(args: argparse.Namespace) -> int:
    s = BiasSettings(**cli.given(args, BiasSettings))
    torch.set_num_threads(s.threads)
    device = cli.as_device(args.device)
    text = load_text(args.data, s.seq_len)
    if s.layers < 2:
        raise cli.InputError(f"--layers {s.layers}: expected at least 2, since the second one has softmax attention")
    began = time.perf_counter()
    gains = [run_pair(text, replace(s, seed=s.seed + i), device) for i in range(s.seeds)]
    gain = statistics.mean(gains)
    words = f"{abs(gain):.4f} bits per byte {'better' if gain > 0 else 'worse'} with the bias than without"
    if s.seeds == 1:
        print(f"{words}, from one seed: --seeds 5 shows how much that scatters")
    else:
        print(f"on average {words}; standard deviation of the {s.seeds} differences {statistics.stdev(gains):.4f}")
    print(f"{time.perf_counter() - began:.0f} s")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add_data_option(parser)
    cli.add_device_option(parser)
    cli.add_options(parser, BiasSettings)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return cli.exit_status("hybrid_key_bias.py", lambda: run_example(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
