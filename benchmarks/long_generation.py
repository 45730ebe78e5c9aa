"""Memory while a small KDA model generates many tokens: `python -m benchmarks.long_generation --tokens 100000`.

One greedy step over a static cache, captured in a CUDA graph and replayed. Memory is what torch has allocated, and the
peak since the row before; beside it the keys and values that a softmax model of the same size would hold by then.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import StaticCache

from benchmarks import report
from benchmarks.gpu.machine import CudaMachine
from kda_layers import KDAConfig, KDAForCausalLM
from kda_layers.modeling.layer.cache import cache_bytes

TITLE = "Memory of a small KDA model while it generates"
SIZES = dict(
    vocab_size=256, hidden_size=256, num_hidden_layers=4, linear_num_heads=6, linear_head_dim=128, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
COLUMNS = ["tokens", "seconds", "allocated MiB", "peak MiB", "cache MiB", "softmax cache MiB"]


@torch.inference_mode()
def measure(tokens: int, every: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model: Any = KDAForCausalLM(KDAConfig(**SIZES)).to("cuda", torch.bfloat16).eval()
    cache: Any = StaticCache(config=model.config, max_cache_len=1)
    ids = torch.randint(256, (1, 128), device="cuda")
    ids = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)

    def step() -> None:
        ids.copy_(model(ids, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True))

    replay = CudaMachine().graph(step)
    rows = []
    began = time.perf_counter()
    for done in tqdm(range(every, tokens + 1, every), unit_scale=every, unit="token"):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(every):
            replay()
        torch.cuda.synchronize()
        states = [t for layer in cache.layers for t in layer.recurrent_states.values()]
        if not all(t.isfinite().all() for t in states):
            raise RuntimeError(f"a state is not finite after {done} tokens")
        memory = (torch.cuda.memory_allocated() / 2**20, torch.cuda.max_memory_allocated() / 2**20)
        softmax = done * 2 * 2 * SIZES["hidden_size"] * SIZES["num_hidden_layers"] / 2**20
        seconds = time.perf_counter() - began
        rows.append(dict(zip(COLUMNS, (done, seconds, *memory, cache_bytes(cache) / 2**20, softmax), strict=True)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=10_000)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    report.add_commit_option(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, and torch finds none here")
    if not 0 < args.every <= args.tokens:
        parser.error(f"--every must be from 1 to --tokens {args.tokens}, got {args.every}")
    rows = measure(args.tokens, args.every)
    results = report.document("gpu-long-generation", TITLE, rows, COLUMNS, report.stamp(args.commit))
    report.save(args.output, results)
    print(report.text(results))
    if len({(r["allocated MiB"], r["peak MiB"], r["cache MiB"]) for r in rows}) != 1:
        raise SystemExit("memory was not constant")


if __name__ == "__main__":
    main()
