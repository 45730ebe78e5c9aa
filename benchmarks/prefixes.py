"""Time to the first token after a prefix that the engine knows: `python -m benchmarks.prefixes`, on a GPU.

transformers' continuous batching of a random model of KDA layers, with and without sharing of prefixes; times are those
from the request until its first token is there. In turns:

* `question`: 60 random tokens alone.
* `new`: --prefix tokens that no earlier prompt had, and a question.
* `known`: the same tokens as in earlier prompts, and another question.

Then `clients`: 32 prompts at once after one new prefix, until the last first token; and `chat`: turns of 60 tokens and
60 answered ones after a prefix, the last first token. `of new` is a time divided by that of `new` in the same
row's engine. MiB: the states that are kept of prefixes when all is done. On a CPU, a small model, to rehearse.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks import report, timing
from benchmarks.gpu.layer import to_bf16
from kda_layers import KDAConfig, KDAForCausalLM
from kda_layers.serving import enable_continuous_batching

TITLE = "Time to the first token after a prefix that is shared"
COLUMNS = ["size", "sharing", "prompt", "ms", "of new", "MiB"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES: dict[str, dict[str, Any]] = {
    "120m": dict(hidden_size=768, num_hidden_layers=12, intermediate_size=2048),
    "0.7b": dict(hidden_size=2048, num_hidden_layers=12, intermediate_size=5632),
    "3b": dict(hidden_size=2560, num_hidden_layers=32, intermediate_size=6912),
    "tiny": dict(hidden_size=64, num_hidden_layers=2, intermediate_size=128),
}
VOCABULARY = 32000
QUESTION, CLIENTS, TURNS = 60, 32, 8
SHARE = {"cuda": 0.3, "cpu": 0.05}  # of the memory, for the cache


def build(size: str) -> Any:
    """A random model of KDA layers on the device, in bf16 on a GPU."""
    fields, head_dim = SIZES[size], 32 if size == "tiny" else 128
    heads = fields["hidden_size"] // head_dim
    config = KDAConfig(
        **fields, vocab_size=VOCABULARY, linear_num_heads=heads, linear_head_dim=head_dim, tie_word_embeddings=True,
        num_attention_heads=heads,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = KDAForCausalLM(config).eval()
    return to_bf16(model) if DEVICE == "cuda" else model


class Engine:
    """transformers' engine and prompts of random tokens."""

    def __init__(self, model: Any, sharing: bool, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        config = ContinuousBatchingConfig(max_memory_percent=SHARE[DEVICE], allow_block_sharing=sharing)
        generation = GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=-1)
        self.manager = model.init_continuous_batching(generation, config)
        self.manager.start()

    def draw(self, count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=self.generator).tolist()

    def ask(self, prompts: list[list[int]], new: int = 1) -> list[list[int]]:
        """Return the answers of `new` tokens to prompts that come at once."""
        asked = [self.manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1) for prompt in prompts]
        answers: dict[str, list[int]] = {}
        while len(answers) < len(asked):
            result = self.manager.get_result(timeout=120)
            if result is None or result.error:
                raise RuntimeError(f"no answer to a prompt: {result and result.error}")
            answers[result.request_id] = result.generated_tokens
        return [answers[request] for request in asked]

    def clients(self, prefix: int) -> None:
        """Ask after one new prefix by all clients at once."""
        begin = self.draw(prefix)
        self.ask([begin + self.draw(QUESTION) for _ in range(CLIENTS)])

    def chat(self, prefix: int) -> float:
        """Chat after a new prefix; return the milliseconds until the first token of the last turn."""
        prompt = self.draw(prefix)
        for _ in range(TURNS - 1):
            prompt = prompt + self.draw(QUESTION)
            prompt = prompt + self.ask([prompt], QUESTION)[0]
        begin = time.perf_counter()
        self.ask([prompt + self.draw(QUESTION)])
        return 1e3 * (time.perf_counter() - begin)

    @property
    def kept_mib(self) -> float:
        states = self.manager.batch_processor.cache.cache_allocators["linear_attention"]
        return float(len(states.prefixes.kept) * states.bytes_per_block / 2**20)


def measure(size: str, prefix: int, sharing: bool) -> list[dict[str, Any]]:
    """A row for each kind of prompt."""
    engine = Engine(build(size), sharing, seed=1)
    known = engine.draw(prefix)
    for _ in range(2):  # with the second prompt, the engine knows what they have in common
        engine.ask([known + engine.draw(QUESTION)])
    turns = {
        "question": lambda: engine.ask([engine.draw(QUESTION)]),
        "new": lambda: engine.ask([engine.draw(prefix + QUESTION)]),
        "known": lambda: engine.ask([known + engine.draw(QUESTION)]),
    }
    times: dict[str, Any] = timing.compare_ms(turns, None, None)
    times |= timing.compare_ms({f"{CLIENTS} clients": lambda: engine.clients(prefix)}, None, None)
    chats = [engine.chat(prefix) for _ in tqdm(range(4), desc="chats", disable=None)][1:]
    times[f"chat, turn {TURNS}"] = {"median": statistics.median(chats)}
    rows = [
        {"size": size, "sharing": sharing, "prompt": prompt, "wall": wall, "ms": wall["median"], "prefix": prefix,
         "of new": wall["median"] / times["new"]["median"], "MiB": engine.kept_mib}
        for prompt, wall in times.items()
    ]  # fmt: skip
    engine.manager.stop(block=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--sizes", default="0.7b,3b" if DEVICE == "cuda" else "tiny", help="%(default)s")
    parser.add_argument("--prefix", type=int, default=4096, help="tokens (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="folder (%(default)s)")
    report.add_commit_option(parser)
    report.add_name_option(parser, "gpu-prefixes, cpu-prefixes")
    args = parser.parse_args()
    sizes = args.sizes.split(",")
    if unknown := sorted(set(sizes) - set(SIZES)):
        parser.error(f"--sizes: expected some of {', '.join(SIZES)}, got {', '.join(unknown)}")
    enable_continuous_batching()
    name = args.name or ("gpu-prefixes" if DEVICE == "cuda" else "cpu-prefixes")
    rows: list[dict[str, Any]] = []
    for size in sizes:
        for sharing in (True, False):
            rows += measure(size, args.prefix, sharing)
            contents = report.document(name, TITLE, rows, COLUMNS, report.stamp(args.commit))
            print(report.text(contents))
            print(report.save(args.output, contents))


if __name__ == "__main__":
    main()
