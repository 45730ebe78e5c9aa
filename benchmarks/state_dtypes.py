"""Task scores of recurrent states in fp32, bf16 and int8: `python -m benchmarks.state_dtypes --run runs/demo`.

* **text**: nats per token of a language model of examples/train_lm.py on its held-out text, decoded token by token
  through the cache, by position.
* **recall**: a model of the size of --recall is trained to recall: pairs of a key and a value, filler, then every key,
  whose value is to be predicted. The sequences are decoded token by token, too, with fillers longer than in training.

Beside the package's own int8 states (`quantize_state`: rounded up or down at random), two that it has not are emulated
by rounding an fp32 state after every token: int8 to the nearest, and int8 with error feedback, whose residual is kept
in 4 more bits. A score differs from that of fp32 by what the states lose: the same tokens, one after the other.

On a GPU the model and the decoding are in bf16, except for the states.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from benchmarks import report
from kda_layers import KDAConfig, KDAForCausalLM
from kda_layers.modeling.seams import CACHE

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from common.checkpoint import checkpoint_of, load_model
from common.corpus import load_corpus
from common.text import BYTES

TITLE = "Task scores of recurrent states in fp32, bf16 and int8"
COLUMNS = ["task", "states", "tokens", "nats", "more_nats", "standard_error", "each_differs_by", "accuracy"]
Rounding = Callable[[Tensor], Tensor]

BLOCK = 256  # tokens whose mean loss is one observation: those of neighbours depend on each other


class Recall(NamedTuple):
    """The recall task and its training, which begins with two pairs and no filler.

    Each step whose loss is less than half the loss of guessing adds a fiftieth of the pairs and of the filler.
    """

    config: dict[str, Any]
    kinds: int  # keys, and as many values and fillers
    pairs: int
    filler: int  # at most
    batch: int
    steps: int
    rate: float


RECALL = {
    "small": Recall(
        dict(hidden_size=64, num_hidden_layers=1, linear_num_heads=2, linear_head_dim=32, initializer_range=0.125),
        32, 24, 64, 32, 700, 5e-3,
    ),
    "120m": Recall(
        dict(hidden_size=768, num_hidden_layers=12, linear_num_heads=6, linear_head_dim=128, initializer_range=0.036),
        128, 64, 128, 64, 1000, 1e-3,
    ),
}  # fmt: skip


def nearest(levels: int, state: Tensor) -> Tensor:
    """Return a state [..., V, K] with each row rounded to multiples of its largest magnitude / `levels`."""
    scale = state.abs().amax(-1, keepdim=True).clamp(min=1e-30) / levels
    return (state / scale).round() * scale


STATES: dict[str, tuple[str, Rounding | None]] = {  # linear_state_dtype, and what is emulated
    "fp32": ("float32", None),
    "bf16": ("bfloat16", None),
    "int8": ("int8", None),
    "int8 to the nearest": ("float32", partial(nearest, 127)),
    "int8 and 4 bits of feedback": ("float32", partial(nearest, 127 * 16)),
}


@torch.inference_mode()
def decode(model: Any, tokens: Tensor, states: str) -> tuple[Tensor, Tensor]:
    """Feed tokens [B, T] one by one through a cache; return losses of tokens 1.. and whether each was the likeliest."""
    model.config.linear_state_dtype, emulated = STATES[states]
    cache = DynamicCache(config=model.config)
    losses, right = [], []
    for t in range(tokens.shape[1] - 1):
        logits = model(tokens[:, t : t + 1], use_cache=True, **{CACHE: cache}).logits[:, -1].float()
        if emulated is not None:
            for layer in cache.layers:
                layer.recurrent_states[0].copy_(emulated(layer.recurrent_states[0]))
        losses.append(cross_entropy(logits, tokens[:, t + 1], reduction="none"))
        right.append(logits.argmax(-1) == tokens[:, t + 1])
    return torch.stack(losses, 1), torch.stack(right, 1)


def text_rows(model: Any, heldout: Tensor, rows: int, length: int) -> list[dict[str, Any]]:
    """Scores of the quarters of `rows` excerpts of `length` tokens, which follow each other in the text."""
    rows = min(rows, len(heldout) // length)
    tokens = heldout[: rows * length].view(rows, length).long().to(model.device)
    found: list[dict[str, Any]] = []
    exact = torch.empty(0)
    for states in STATES:
        losses = decode(model, tokens, states)[0].cpu()
        exact = losses if states == "fp32" else exact
        for first, last in [(0, length), *((i * length // 4, (i + 1) * length // 4) for i in range(4))]:
            part, more = losses[:, first:last], (losses - exact)[:, first:last]
            blocks = torch.cat([b.mean(1) for b in more.split(BLOCK, 1)])
            found.append(dict(
                task="text", states=states, tokens=f"{first}-{last}", nats=part.mean().item(),
                more_nats=more.mean().item(), standard_error=blocks.std().item() / math.sqrt(len(blocks)),
                each_differs_by=more.abs().mean().item(),
            ))  # fmt: skip
        print(found[-5], flush=True)
    return found


def recall_batch(task: Recall, pairs: int, filler: int, batch: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences [batch, T] of pairs, filler and queries, and a mask [T] of the values that are asked for."""
    keys = torch.rand(batch, task.kinds, generator=random).argsort(1)[:, :pairs]
    values = task.kinds + torch.randint(task.kinds, (batch, pairs), generator=random)
    order = torch.rand(batch, pairs, generator=random).argsort(1)
    noise = 2 * task.kinds + torch.randint(task.kinds, (batch, filler), generator=random)
    told = torch.stack((keys, values), -1).flatten(1)
    asked = torch.stack((keys.gather(1, order), values.gather(1, order)), -1).flatten(1)
    tokens = torch.cat((told, noise, asked), 1)
    mask = torch.zeros(tokens.shape[1], dtype=torch.bool)
    mask[2 * pairs + filler + 1 :: 2] = True
    return tokens, mask


def train_recall(size: str, device: torch.device, steps: int | None) -> tuple[Any, dict[str, Any]]:
    """Train a model of this size to recall; return it and the facts of its training."""
    task = RECALL[size]
    steps = task.steps if steps is None else steps
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    config = KDAConfig(vocab_size=3 * task.kinds, bos_token_id=None, eos_token_id=None, **task.config)
    model: Any = KDAForCausalLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.rate, total_steps=steps, pct_start=0.1)
    began, losses, grown = time.perf_counter(), [], 0.0
    for step in range(steps):
        filler = int(torch.randint(int(task.filler * grown) + 1, (), generator=random))
        tokens, mask = recall_batch(task, 2 + int(grown * (task.pairs - 2)), filler, task.batch, random)
        labels = tokens.masked_fill(~mask, -100)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(tokens.to(device), labels=labels.to(device), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0 or step + 1 == steps:
            spent = time.perf_counter() - began
            print(f"recall, step {step}: {losses[-1]:.4f} nats, {grown:.0%} of the task, {spent:.0f} s", flush=True)
        if losses[-1] < math.log(task.kinds) / 2:
            grown = min(1.0, grown + 0.02)
    parameters = sum(p.numel() for p in model.parameters())
    last = statistics.fmean(losses[-20:])
    facts = task._asdict() | dict(
        size=size, parameters=parameters, steps=steps, nats_of_the_last_steps=last, share_of_the_task=grown
    )
    return model.eval(), facts


def recall_rows(model: Any, size: str, fillers: list[int], sequences: int) -> list[dict[str, Any]]:
    """Scores of the values asked for after each number of filler tokens."""
    task, found = RECALL[size], list[dict[str, Any]]()
    for filler in fillers:
        tokens, mask = recall_batch(task, task.pairs, filler, sequences, torch.Generator().manual_seed(1 + filler))
        asked = mask[1:].to(model.device)
        exact = torch.empty(0)
        for states in STATES:
            losses, right = decode(model, tokens.to(model.device), states)
            losses, right = losses[:, asked].cpu(), right[:, asked].cpu()
            exact = losses if states == "fp32" else exact
            more = losses - exact
            found.append(dict(
                task="recall", states=states, tokens=f"{filler} of filler", nats=losses.mean().item(),
                more_nats=more.mean().item(), standard_error=more.mean(1).std().item() / math.sqrt(sequences),
                each_differs_by=more.abs().mean().item(), accuracy=right.float().mean().item(),
            ))  # fmt: skip
            print(found[-1], flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="folder of a run of examples/train_lm.py (default: no text)")
    parser.add_argument("--cache", type=Path, help="folder that keeps its text and tokens (that of the run)")
    parser.add_argument("--rows", type=int, default=8, help="excerpts that are decoded at once")
    parser.add_argument("--length", type=int, default=4096, help="tokens of an excerpt")
    parser.add_argument("--recall", choices=RECALL, help="size of a model to train on recall (default: none)")
    parser.add_argument("--recall-steps", type=int, help="of its training")
    parser.add_argument("--fillers", type=int, nargs="+", default=[0, 256, 1024], help="numbers of filler tokens")
    parser.add_argument("--sequences", type=int, default=64, help="of recall, for each number")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    report.add_name_option(parser, "cpu-state-dtypes or gpu-state-dtypes")
    report.add_commit_option(parser)
    args = parser.parse_args(arguments)
    if args.run is None and args.recall is None:
        parser.error("needs --run FOLDER or --recall SIZE: there is nothing to score")
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows: list[dict[str, Any]] = []
    details: dict[str, Any] = dict(dtype=str(dtype).removeprefix("torch."))
    if args.run is not None:
        facts = json.loads((args.run / "run.json").read_text())
        model: Any = load_model(checkpoint_of(args.run), device).to(dtype).eval()
        s = facts["settings"]
        vocabulary = None if s["vocab"] == "byte" else model.config.vocab_size
        cache = args.cache or args.run
        corpus = load_corpus(None, s["max_mb"], s["heldout_kb"], vocabulary, args.length, cache, s["text"])
        if corpus.facts["sha256"] != facts["corpus"]["sha256"]:
            parser.error(f"--run {args.run}: its text, {facts['corpus']['source']}, is another one on this machine")
        details["text"] = dict(
            parameters=facts["parameters"], steps=facts["steps"], config=s["config"], text=corpus.facts["source"],
            vocabulary=vocabulary or BYTES, trained_on=s["seq_len"],
        )  # fmt: skip
        rows += text_rows(model, corpus.heldout, args.rows, args.length)
    if args.recall is not None:
        model, details["recall"] = train_recall(args.recall, device, args.recall_steps)
        rows += recall_rows(model.to(dtype), args.recall, args.fillers, args.sequences)
    name = args.name or f"{device.type.replace('cuda', 'gpu')}-state-dtypes"
    results = report.document(name, TITLE, rows, COLUMNS, report.stamp(args.commit), details)
    report.save(args.output, results)
    print(report.text(results))


if __name__ == "__main__":
    main()
