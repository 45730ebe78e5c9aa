"""Swaps attention layers of a Llama for KDA and distils them from the original.

Pre-trains a small byte-level Llama on English text (its checkpoint could be any other), puts KDA in place of three of
four attention layers, and trains the new model to do what the original does: first each KDA layer by itself, to give
the output of the layer it replaces for the same input; then all of it, to give the original's next-byte probabilities.
Prints perplexity along the way, and what decoding costs in memory and time at a short and at a long context.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from checkpoint import as_device, check_writable
from command import exit_status, first_line
from huggingface_hub.errors import StrictDataclassError
from report import plot_phases
from settings import Settings, check_range, flag, option
from text_data import BYTES, InputError, Text, load_text, training_batch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax
from tqdm import tqdm
from train_tiny_lm import build_optimizer, evaluate, learning_rate, precision
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import kda_layers
from kda_layers.modeling.cache import cache_bytes


@dataclass(frozen=True)
class SwapSettings(Settings):
    """Settings of the model and of its pre-training, and those of the swap."""

    steps: int = option(500, "optimizer steps of pre-training")
    heads: int = option(4, "query heads of each layer")
    kv_heads: int = option(2, "key / value heads of each layer")
    swap: str = option("3:1", "layers to swap: a pattern, all, or indices such as 0,2")
    linear_heads: int = option(4, "query / key heads of each KDA layer, kv_heads or more")
    layer_steps: int = option(150, "steps in which each KDA layer learns the output of the layer it replaces")
    logit_steps: int = option(150, "steps in which the new model learns the original's probabilities")
    contexts: str = option("512,8192", "bytes in the cache when decoding is measured")
    decode: int = option(64, "bytes to decode for that")

    def __post_init__(self) -> None:
        super().__post_init__()
        for context in numbers(self.contexts, "contexts"):
            check_range("contexts", context, 1)


def numbers(text: str, name: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"{flag(name)} {text}: expected integers, separated by commas") from error


def build_original(s: SwapSettings, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(s.seed)
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=s.hidden_size,
        intermediate_size=3 * s.hidden_size,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        max_position_embeddings=max(numbers(s.contexts, "contexts")) + s.decode,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(device)


def swapped(model: PreTrainedModel, s: SwapSettings) -> PreTrainedModel:
    layers: Any = s.swap if ":" in s.swap or s.swap == "all" else numbers(s.swap, "swap")
    return kda_layers.swap_attention(model, layers=layers, linear_num_heads=s.linear_heads)


def fit(
    module: nn.Module, loss_of: Callable[[Tensor], Tensor], text: Text, s: SwapSettings, device: torch.device, name: str
) -> list[float]:
    """Trains `module` for s.steps on excerpts of the text; returns the losses."""
    optimizer = build_optimizer(module)
    losses = []
    with tqdm(range(s.steps), unit="step", desc=name) as bar:
        for step in bar:
            batch = training_batch(text.train, s.batch_size, s.seq_len, s.seed, step).to(device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, s)
            with torch.autocast(device.type, torch.bfloat16, enabled=s.dtype == "bfloat16"):
                loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    return losses


def distil_layers(teacher: PreTrainedModel, student: PreTrainedModel, text: Text, s: SwapSettings) -> list[float]:
    """Each KDA layer learns the output of the softmax layer in its place, for the input that layer has in `teacher`.

    The loss is the squared error relative to the square of the output, averaged over layers. All layers learn at once,
    from one pass of the teacher.
    """
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    learners = nn.ModuleList()
    hooks = []
    indices = [i for i, kind in enumerate(student.config.layer_types) if kind == "linear_attention"]
    for i in indices:

        def see(_: Any, args: Any, kwargs: Any, output: Any, i: int = i) -> None:
            seen[i] = kwargs["hidden_states"], output[0]

        hooks.append(teacher.model.layers[i].self_attn.register_forward_hook(see, with_kwargs=True))
        learners.append(student.model.layers[i].self_attn)

    def loss_of(batch: Tensor) -> Tensor:
        with torch.no_grad():
            teacher(batch, use_cache=False)
        loss = torch.zeros((), device=batch.device)
        for learner, i in zip(learners, indices, strict=True):
            x, want = (t.float() for t in seen[i])
            got, _ = learner(hidden_states=x)
            loss = loss + (got.float() - want).square().mean() / want.square().mean()
        return loss / len(indices)

    try:
        return fit(learners, loss_of, text, replace(s, steps=s.layer_steps), teacher.device, "distilling layers")
    finally:
        for hook in hooks:
            hook.remove()


def distil_logits(teacher: PreTrainedModel, student: PreTrainedModel, text: Text, s: SwapSettings) -> list[float]:
    """All of `student` learns the teacher's next-byte probabilities: KL divergence in nats per byte."""

    def loss_of(batch: Tensor) -> Tensor:
        with torch.no_grad():
            want = log_softmax(teacher(batch, use_cache=False).logits.float(), -1)
        got = log_softmax(student(batch, use_cache=False).logits.float(), -1)
        return kl_div(got.flatten(0, 1), want.flatten(0, 1), reduction="batchmean", log_target=True)

    settings = replace(s, steps=s.logit_steps, lr=s.lr / 2)
    return fit(student.train(), loss_of, text, settings, teacher.device, "distilling logits")


@torch.no_grad()
def decoding_cost(model: PreTrainedModel, text: Text, context: int, s: SwapSettings) -> dict[str, float]:
    """Bytes of the cache after `context` bytes of text, and bytes decoded per second from there."""
    model.eval()
    tokens = text.train.repeat(-(-context // len(text.train)))[None, :context].to(model.device)
    with precision(model, s):
        out = model(tokens, use_cache=True, logits_to_keep=1)
        cache, size = out.past_key_values, cache_bytes(out.past_key_values)
        token = out.logits[:, -1:].argmax(-1)
        token.tolist()  # waits for the device
        began = time.perf_counter()
        for _ in range(s.decode):
            token = model(token, past_key_values=cache, use_cache=True).logits.argmax(-1)
        token.tolist()
    return {"context": context, "cache_bytes": size, "tokens_per_s": s.decode / (time.perf_counter() - began)}


def run_example(args: argparse.Namespace) -> int:
    s = SwapSettings(**{f.name: getattr(args, f.name) for f in fields(SwapSettings)})
    torch.set_num_threads(s.threads)
    device = as_device(args.device)
    text = load_text(args.data, s.seq_len)
    check_writable(args.output)
    try:
        original = build_original(s, device)
        swapped(original, s)  # so that a mistake shows now, not after pre-training
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise InputError(first_line(error)) from error
    report: dict[str, Any] = {"settings": asdict(s), "device": str(device), "data_sha256": text.sha256, "losses": {}}
    losses, perplexity = report["losses"], {}

    def measure(model: PreTrainedModel, when: str) -> None:
        perplexity[when] = 2 ** evaluate(model, text, s)
        print(f"held-out perplexity per byte, {when + ':':<35} {perplexity[when]:.3f}")

    began = time.perf_counter()
    original.train()
    losses["original"] = fit(
        original, lambda batch: original(batch, labels=batch).loss, text, s, device, "training the original"
    )
    original.eval().requires_grad_(False)
    measure(original, "original")
    model = swapped(original, s)
    measure(model, "right after the swap")
    losses["layers"] = distil_layers(original, model, text, s)
    measure(model, "layers distilled")
    losses["logits"] = distil_logits(original, model, text, s)
    measure(model, "logits distilled")
    ratio = perplexity["logits distilled"] / perplexity["original"]
    print(f"{ratio:.3f} times the original's, after {time.perf_counter() - began:.0f} s")
    costs = {
        name: [decoding_cost(m, text, context, s) for context in numbers(s.contexts, "contexts")]
        for name, m in (("original", original), ("swapped", model))
    }
    for name, rows in costs.items():
        for row in rows:
            print(
                f"{name:<9} after {row['context']:6,} bytes: cache {row['cache_bytes']:10,} bytes, "
                f"{row['tokens_per_s']:7,.0f} bytes/s"
            )
    model.save_pretrained(args.output)
    report |= {"perplexity": perplexity, "ratio": ratio, "decoding": costs}
    (args.output / "report.json").write_text(json.dumps(report, indent=1))
    labels = {
        "original": "cross-entropy, nats per byte",
        "layers": "relative squared error of a layer's output",
        "logits": "KL divergence, nats per byte",
    }
    plot_phases(losses, labels, args.output / "losses.png")
    print(f"the swapped model, report.json and losses.png are in {args.output}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE", help="text to train on (Python's reference documentation)")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("runs/swap_llama"), help="(%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    for f in fields(SwapSettings):
        parser.add_argument(flag(f.name), type=type(f.default), default=f.default, **f.metadata)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return exit_status("swap_llama.py", lambda: run_example(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
