"""`python -m benchmarks.decode_lengths`: ms of an eager decode step of hybrid models at lengths not decoded before.

Attention backends that build a plan for each length of the keys (cuDNN's) build one at every step of generation; a step
at a length decoded before finds it. Plans are kept per process, so every contender has lengths of its own: it decodes
STEPS tokens after a prompt that no other has, then the same lengths once more after a new prompt. Contenders take
turns, rotated, in two passes of different lengths, reversed in the second; all decode at a short length first. Each
model also runs with cuDNN's attention switched off (torch.backends.cuda.enable_cudnn_sdp).

On a GPU: models of 12 layers, hidden size 2048, 16 heads of 128, bf16, every fourth layer softmax attention: ours,
KDALlama, and transformers' Kimi-Linear before and after `swap_attention`. On a CPU (--device cpu): tiny models, to try
the script. It uses public names only and runs with older versions of the package.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tqdm import tqdm

from benchmarks import report, timing
from kda_layers import KDAConfig, KDAForCausalLM, swap_attention

SIZES: dict[str, dict[str, int]] = {
    "cpu": dict(hidden=32, heads=2, width=16, layers=4, mlp=64, vocab=64),
    "cuda": dict(hidden=2048, heads=16, width=128, layers=12, mlp=5632, vocab=32000),
}
CONTEXTS = {"cpu": (64,), "cuda": (512, 4096)}  # shortest prompts
STEPS = 8
TITLE = "An eager decode step of hybrid models at lengths not decoded before"
VISITS = ("new length", "same length again")
DEFAULT, WITHOUT_CUDNN = "default", "cuDNN attention off"
COLUMNS = ["model", "attention", "context", "visit", "ms", "p10", "p90", "first step ms", "passes agree"]


class Contender(NamedTuple):
    model: str
    attention: str


def models(device: str) -> dict[str, Any]:
    """The models with random weights, in bf16 on a GPU."""
    n = SIZES[device]
    layers, heads = n["layers"], n["heads"]
    no_ends: dict[str, Any] = dict(bos_token_id=None, eos_token_id=None)
    shared: dict[str, Any] = dict(
        vocab_size=n["vocab"], hidden_size=n["hidden"], intermediate_size=n["mlp"], num_hidden_layers=layers,
        num_attention_heads=heads, linear_num_heads=heads, **no_ends,
    )  # fmt: skip
    kinds = [("full_attention" if i % 4 == 3 else "linear_attention") for i in range(layers)]
    made: dict[str, Any] = {}
    torch.manual_seed(0)
    with torch.device(device):
        made["KDA"] = KDAForCausalLM(KDAConfig(**shared, linear_head_dim=n["width"], full_attention_interval=4))
        llama = transformers.AutoConfig.for_model(
            "kda_llama", **shared, linear_head_dim=n["width"], layer_types=kinds, num_key_value_heads=heads,
            max_position_embeddings=2 * max(CONTEXTS[device]) + 1024,
        )  # fmt: skip
        made["KDALlama"] = transformers.AutoModelForCausalLM.from_config(llama)
        kimi = transformers.KimiLinearConfig(
            **shared, mlp_layer_types=["dense"] * layers, linear_head_dim=n["width"], layer_types=kinds,
            num_key_value_heads=heads, kv_lora_rank=n["hidden"] // 4, pad_token_id=0,
        )  # fmt: skip
        made["Kimi-Linear, stock"] = transformers.KimiLinearForCausalLM(kimi)
    made = {name: m.to(torch.float32 if device == "cpu" else torch.bfloat16).eval() for name, m in made.items()}
    made["Kimi-Linear, swapped"] = copy.deepcopy(made["Kimi-Linear, stock"])
    swap_attention(made["Kimi-Linear, swapped"])
    return made


@torch.no_grad()
def decode(model: Any, attention: str, prompt: int, steps: int, synchronize: Callable[[], None]) -> list[float]:
    """Wall-clock ms of each step after a prompt of so many tokens, random ones."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled and attention == DEFAULT)
    try:
        tokens = torch.randint(model.config.vocab_size, (1, prompt), device=model.device)
        cache = model(tokens, use_cache=True, logits_to_keep=1).past_key_values
        token, times = tokens[:, -1:], []
        for _ in range(steps):
            synchronize()
            start = time.perf_counter()
            model(token, past_key_values=cache, use_cache=True)
            synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def measure(
    made: dict[str, Any],
    contexts: Sequence[int],
    synchronize: Callable[[], None],
    done: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Hand over a row for each contender, context and visit so far, whenever all have had a turn."""
    contenders = [Contender(name, attention) for name in made for attention in (DEFAULT, WITHOUT_CUDNN)]
    for c in contenders:
        decode(made[c.model], c.attention, 2 * STEPS, 3, synchronize)
    found: dict[tuple[Contender, int, str], list[list[float]]] = {}
    for pass_, (i, context) in tqdm(list(itertools.product(range(timing.PASSES), enumerate(contexts))), desc="turns"):
        for c in timing.order(contenders, i, pass_):
            # One step between neighbours, so that no prompt has a length that another one decodes to.
            place = pass_ * len(contenders) + contenders.index(c)
            prompt = context + place * (STEPS + 1)
            for visit in VISITS:
                times = decode(made[c.model], c.attention, prompt, STEPS, synchronize)
                found.setdefault((c, context, visit), []).append(times)
        done([row(*key, passes) for key, passes in found.items()])


def row(c: Contender, context: int, visit: str, passes: list[list[float]]) -> dict[str, Any]:
    """The result of one contender; the first step of a pass also pays for what follows a prompt, so it is separate."""
    times = timing.Times([p[1:] for p in passes]).summary()
    return {
        **c._asdict(), "context": context, "visit": visit, "ms": times["median"], "p10": times["p10"],
        "p90": times["p90"], "first step ms": statistics.median(p[0] for p in passes),
        "passes agree": "yes" if times["agree"] else "no", "times": times, "steps": passes,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    report.add_name_option(parser, "gpu-decode-lengths, on a CPU cpu-decode-lengths")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    report.add_commit_option(parser)
    timing.add_tuning_option(parser)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, and torch finds none here")
    name = args.name or ("cpu" if args.device == "cpu" else "gpu") + "-decode-lengths"
    synchronize: Callable[[], None] = torch.cuda.synchronize if args.device == "cuda" else lambda: None

    def write(rows: list[dict[str, Any]]) -> None:
        rows.sort(key=lambda r: (r["context"], r["model"], r["attention"] != DEFAULT, r["visit"]))
        report.save(args.output, report.document(name, TITLE, rows, COLUMNS, report.stamp(args.commit)))

    measure(models(args.device), CONTEXTS[args.device], synchronize, write)
    print(report.text(report.load(args.output / f"{name}.json")))


if __name__ == "__main__":
    main()
