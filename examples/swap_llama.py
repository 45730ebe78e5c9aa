"""Swaps attention layers of a Llama for KDA and distils them from the original.

Pre-trains a small byte-level Llama on English text (in practice: a checkpoint), swaps three of four attention layers
for KDA, and distils the new model from the original: first each KDA layer to the output of the layer that it replaces,
then the model to the original's next-byte probabilities. Prints perplexity after each phase, and the memory and
time of decoding at a short and at a long context.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import cli
from common.decoding import decoding_cost
from common.distillation import distil_layers, distil_logits
from common.optimization import evaluate, fit, precision
from common.plots import plot_phases
from common.settings import ModelSettings
from common.text import BYTES, load_text
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import kda_layers

LOSSES = {
    "original": "cross-entropy, nats per byte",
    "layers": "relative squared error of a layer's output",
    "logits": "KL divergence, nats per byte",
}


@dataclass(frozen=True)
class SwapSettings(ModelSettings):
    """Settings of the model, its pre-training and the swap."""

    steps: int = cli.option(500, "optimizer steps of pre-training")
    heads: int = cli.option(4, "query heads of each layer")
    kv_heads: int = cli.option(2, "key / value heads of each layer")
    swap: str = cli.option("3:1", "layers to swap: a pattern, all, or indices such as 0,2")
    linear_heads: int = cli.option(4, "query / key heads of each KDA layer, kv_heads or more")
    layer_steps: int = cli.option(150, "steps in which each KDA layer learns the output of the layer it replaces")
    logit_steps: int = cli.option(150, "steps in which the new model learns the original's probabilities")
    contexts: str = cli.option("512,8192", "bytes in the cache when decoding is measured")
    decode: int = cli.option(64, "bytes to decode for that")

    def __post_init__(self) -> None:
        super().__post_init__()
        for context in cli.integers(self.contexts, "contexts"):
            cli.check_range("contexts", context, 1)


def build_original(s: SwapSettings, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(s.seed)
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=s.hidden_size,
        intermediate_size=3 * s.hidden_size,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        max_position_embeddings=max(cli.integers(s.contexts, "contexts")) + s.decode,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(device)


def swapped(model: PreTrainedModel, s: SwapSettings) -> PreTrainedModel:
    layers: Any = s.swap if ":" in s.swap or s.swap == "all" else cli.integers(s.swap, "swap")
    return kda_layers.convert_attention(model, layers=layers, linear_num_heads=s.linear_heads)


def run_example(args: argparse.Namespace) -> int:
    s = SwapSettings(**cli.given(args, SwapSettings))
    torch.set_num_threads(s.threads)
    device = cli.as_device(args.device)
    text = load_text(args.data, s.seq_len)
    cli.check_writable(args.output)
    try:
        original = build_original(s, device)
        swapped(original, s)  # shows a mistake now, not after pre-training
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise cli.InputError(cli.first_line(error)) from error
    perplexity, began = {}, time.perf_counter()

    def measure(model: PreTrainedModel, when: str) -> None:
        perplexity[when] = 2 ** evaluate(model, text, s)
        print(f"held-out perplexity per byte, {when + ':':<35} {perplexity[when]:.3f}")

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return original(batch, labels=batch).loss

    losses = {"original": fit(original.train(), loss_of, text, s, s.steps, device, "training the original")}
    original.eval().requires_grad_(False)
    measure(original, "original")
    model = swapped(original, s)
    measure(model, "right after the swap")
    losses["layers"] = distil_layers(original, model, text, s, s.layer_steps)
    measure(model, "layers distilled")
    losses["logits"] = distil_logits(original, model, text, replace(s, lr=s.lr / 2), s.logit_steps)
    measure(model, "logits distilled")
    ratio = perplexity["logits distilled"] / perplexity["original"]
    print(f"{ratio:.3f} times the original's, after {time.perf_counter() - began:.0f} s")
    costs: dict[str, list[dict[str, float]]] = {"original": [], "swapped": []}
    for (name, rows), m in zip(costs.items(), (original, model), strict=True):
        for context in cli.integers(s.contexts, "contexts"):
            with precision(device, s):
                rows.append(row := decoding_cost(m, text.train, context, s.decode))
            print(
                f"{name:<9} after {context:6,} bytes: cache {row['cache_bytes']:10,} bytes, "
                f"{row['tokens_per_s']:7,.0f} bytes/s"
            )
    model.save_pretrained(args.output)
    report: dict[str, Any] = {
        "settings": asdict(s),
        "device": str(device),
        "data_sha256": text.sha256,
        "losses": losses,
    }
    report |= {"perplexity": perplexity, "ratio": ratio, "decoding": costs}
    (args.output / "report.json").write_text(json.dumps(report, indent=1))
    plot_phases(losses, LOSSES, args.output / "losses.png")
    print(f"the swapped model, report.json and losses.png are in {args.output}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_data_option(parser)
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("runs/swap_llama"), help="(%(default)s)")
    cli.add_device_option(parser)
    cli.add_options(parser, SwapSettings)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return cli.exit_status("swap_llama.py", lambda: run_example(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
