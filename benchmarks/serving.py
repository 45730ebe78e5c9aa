"""Answering many requests: `python -m benchmarks.serving`, on a GPU.

A model of the 120M configuration over bytes is trained in bf16 on Python's reference documentation, so that it is sure
of most bytes, and the same with softmax attention in every layer for as many steps. Then prompts of random lengths from
the held-out text are continued greedily in two ways, which take turns:

* `static`: `generate` of all prompts as one batch, padded on the left to the longest.
* `continuous`: transformers' continuous batching (`generate_batch`), with chunked prefill; the engine and its CUDA
  graphs are made once, before the turns.

tokens/s counts new tokens, MiB is the peak memory above the parameters, in continuous batching mostly the cache that it
was given. `differ` counts the prompts whose tokens are not those of `generate` of that prompt alone: matrix products of
another shape round otherwise, so that two logits that are nearly equal may change places. `gap` is the largest
difference of two that did, at a prompt's first other token; more than twice `noise` is an error. `noise` is the largest
difference of a logit between the steps of `generate` and a prefill of the same tokens, over all prompts and tokens. On
a CPU, a small model, to rehearse.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks import report, timing
from benchmarks.gpu.layer import to_bf16
from kda_layers import KDAConfig, KDAForCausalLM
from kda_layers.serving import enable_continuous_batching
from kda_layers.training import CapturedStep

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from common.text import BYTES, load_text, training_batch

TITLE = "Answering many requests: a static batch and continuous batching"
COLUMNS = ["contender", "way", "prompts", "new", "wall ms", "tokens/s", "MiB", "differ", "gap", "noise"]
CONTENDERS = ("ours", "softmax")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES: dict[str, dict[str, Any]] = {
    "cuda": dict(hidden_size=768, num_hidden_layers=12, heads=6, head_dim=128, intermediate_size=2048),
    "cpu": dict(hidden_size=64, num_hidden_layers=2, heads=2, head_dim=32, intermediate_size=128),
}
CACHE = {"cuda": 0.2, "cpu": 0.05}  # share of the memory, for continuous batching: masks of 8192 tokens must fit
SEED = 0
T = TypeVar("T")


def build(contender: str) -> Any:
    """The model on the device with random weights, in bf16 but for the gates' parameters."""
    fields = dict(SIZES[DEVICE])
    heads, head_dim = fields.pop("heads"), fields.pop("head_dim")
    kind = "linear_attention" if contender == "ours" else "full_attention"
    torch.manual_seed(SEED)
    config = KDAConfig(
        **fields, vocab_size=BYTES, linear_num_heads=heads, linear_head_dim=head_dim, num_attention_heads=heads,
        layer_types=[kind] * fields["num_hidden_layers"], bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.device(DEVICE):
        model = KDAForCausalLM(config)
    return to_bf16(model) if DEVICE == "cuda" else model


def train(model: Any, tokens: Tensor, steps: int, length: int, batch: int) -> float:
    """Train by AdamW, whose step is captured on a GPU; return the last loss."""
    on_gpu = DEVICE == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, capturable=on_gpu)
    captured = CapturedStep(model, optimizer, max_norm=1.0) if on_gpu else None
    loss = torch.zeros(())
    for step in tqdm(range(steps), desc="training", disable=None):
        ids = training_batch(tokens, batch, length, SEED, step).to(DEVICE)
        given = dict(input_ids=ids, labels=ids, use_cache=False)
        if captured is not None:
            loss = captured(given)
            continue
        optimizer.zero_grad()
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def draw_prompts(text: Tensor, count: int, longest: int) -> list[list[int]]:
    """Prompts of 1 to `longest` bytes, log-uniform, among them one of each."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = (torch.rand(count, generator=generator) * math.log(longest)).exp().int().clamp(1, longest)
    lengths[:2] = torch.tensor([1, longest])
    starts = (torch.rand(count, generator=generator) * (len(text) - longest)).int()
    return [text[a : a + n].tolist() for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)]


def static_batch(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """`generate` of all prompts at once; the new tokens of each."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=DEVICE)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=DEVICE)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[:, longest:].tolist()


def continuous(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """transformers' continuous batching; the new tokens of each prompt."""
    generation = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1)
    config = ContinuousBatchingConfig(max_memory_percent=CACHE[DEVICE])
    outputs = model.generate_batch(prompts, generation, continuous_batching_config=config, persistent_manager=True)
    failed = [out.error for out in outputs.values() if out.error]
    if failed:
        raise RuntimeError(f"a request failed: {failed[0]}")
    return [out.generated_tokens for out in outputs.values()]


WAYS: dict[str, Callable[[Any, list[list[int]], int], list[list[int]]]] = {
    "static": static_batch, "continuous": continuous,
}  # fmt: skip


class Alone(NamedTuple):
    """The tokens that `generate` adds to one prompt."""

    tokens: list[int]
    noise: float  # the largest difference of a logit between its steps and a prefill of the same tokens


@torch.no_grad()
def alone(model: Any, prompt: list[int], new: int) -> Alone:
    ids = torch.tensor([prompt], device=DEVICE)
    out = model.generate(
        ids, max_new_tokens=new, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    again = model(out.sequences[:, :-1], use_cache=False, logits_to_keep=new).logits[0].float()
    noise = (torch.cat(out.logits).float() - again).abs().max()
    return Alone(out.sequences[0, len(prompt) :].tolist(), float(noise))


@torch.no_grad()
def last_logits(model: Any, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens], device=DEVICE), use_cache=False, logits_to_keep=1).logits[0, -1].float()


def judge(model: Any, prompts: list[list[int]], found: list[list[int]], truth: list[Alone]) -> list[float]:
    """Return by how much the first other token of each prompt lies below that of `generate`, in logits of its prefill.

    Of the prompts whose tokens differ only; inf if the tokens end early.
    """
    gaps = []
    for prompt, got, (want, _) in zip(prompts, found, truth, strict=True):
        if got == want:
            continue
        same = next(i for i, (a, b) in enumerate(itertools.zip_longest(got, want)) if a != b)
        if min(len(got), len(want)) <= same:
            gaps.append(math.inf)
            continue
        logits = last_logits(model, prompt + want[:same])
        gaps.append(float(logits[want[same]] - logits[got[same]]))
    return gaps


def measure(contender: str, args: argparse.Namespace, train_text: Tensor, heldout: Tensor) -> list[dict[str, Any]]:
    """A row for each way."""
    model = build(contender)
    loss = train(model, train_text, args.steps, args.seq_len, args.batch_size)
    model.eval()
    prompts = draw_prompts(heldout, args.prompts, args.longest)
    truth = [alone(model, p, args.new) for p in tqdm(prompts, desc=f"{contender}, alone", disable=None)]
    noise = max(t.noise for t in truth)
    rows = []
    for way, run in WAYS.items():
        found, memory = with_peak_mib(partial(run, model, prompts, args.new))  # the first run makes the engine
        gaps = judge(model, prompts, found, truth)
        if sure := [gap for gap in gaps if gap > 2 * noise]:
            raise RuntimeError(
                f"{way}, {contender}: of {len(prompts)} prompts {len(sure)} have another token whose logit is lower by "
                f"{max(sure):.3g}, where rounding explains {2 * noise:.3g}"
            )
        what = {"contender": contender, "way": way, "prompts": len(prompts), "new": args.new}
        rows.append(what | {"MiB": memory, "differ": len(gaps), "gap": max(gaps, default=0.0)})
        rows[-1] |= {"noise": noise, "loss": loss}
    synchronize = torch.cuda.synchronize if DEVICE == "cuda" else None
    times = timing.compare_ms(
        {way: partial(run, model, prompts, args.new) for way, run in WAYS.items()}, None, synchronize
    )
    for row in rows:
        row["wall"], row["wall ms"] = times[row["way"]], times[row["way"]]["median"]
        row["tokens/s"] = len(prompts) * args.new / row["wall ms"] * 1e3
    model.destroy_cached_continuous_batching_manager()
    return rows


def with_peak_mib(run: Callable[[], T]) -> tuple[T, float]:
    """Return what `run` does and the peak memory of that above what was held before it, in MiB; 0 on a CPU."""
    if DEVICE == "cpu":
        return run(), 0.0
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return run(), (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    on_gpu = DEVICE == "cuda"
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="%(default)s")
    parser.add_argument("--steps", type=int, default=1500 if on_gpu else 20, help="of training (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=1024 if on_gpu else 128, help="of training (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16 if on_gpu else 4, help="of training (%(default)s)")
    parser.add_argument("--prompts", type=int, default=64 if on_gpu else 8, help="%(default)s")
    parser.add_argument("--longest", type=int, default=2000 if on_gpu else 100, help="prompt (%(default)s)")
    parser.add_argument("--new", type=int, default=128 if on_gpu else 8, help="tokens of each (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="folder (%(default)s)")
    report.add_commit_option(parser)
    report.add_name_option(parser, "gpu-serving, cpu-serving")
    args = parser.parse_args()
    contenders = args.contenders.split(",")
    if unknown := sorted(set(contenders) - set(CONTENDERS)):
        parser.error(f"--contenders: expected some of {', '.join(CONTENDERS)}, got {', '.join(unknown)}")
    enable_continuous_batching()
    text = load_text(None, args.seq_len)
    name = args.name or ("gpu-serving" if on_gpu else "cpu-serving")
    rows: list[dict[str, Any]] = []
    for contender in contenders:
        rows += measure(contender, args, text.train, text.heldout)
        contents = report.document(name, TITLE, rows, COLUMNS, report.stamp(args.commit))
        print(report.text(contents))
        print(report.save(args.output, contents))


if __name__ == "__main__":
    main()
