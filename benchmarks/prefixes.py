"""Time to the first token after a prefix that the engine knows: `python -m benchmarks.prefixes`, on a GPU.

transformers' continuous batching of a random model of KDA layers, with and without sharing of prefixes; times run from
the request to its first token. In turns, by two engines of one model:

* `question`: 60 random tokens.
* `new`: --prefix tokens that no earlier prompt had, and a question.
* `known`: the same tokens as in earlier prompts, and another question.
* `clients`: 32 prompts at once after one new prefix, until the last of their first tokens.
* `chat`: the last of 8 turns, each of 60 tokens and an answer of 60, after a new prefix.

`of new` divides by the time of `new` of the same engine. MiB: states of prefixes that are kept at the end. On a CPU, a
small model, to rehearse.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
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
QUESTION, CLIENTS, TURNS, CHATS = 60, 32, 8, 5
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


def measure(size: str, prefix: int) -> list[dict[str, Any]]:
    """A row for each kind of prompt, with sharing and without."""
    model = build(size)
    engines = {sharing: Engine(model, sharing, seed=1) for sharing in (True, False)}
    turns: dict[tuple[bool, str], Callable[[], Any]] = {}
    for sharing, engine in engines.items():
        known = engine.draw(prefix)
        for _ in range(2):  # with the second prompt, the engine knows what they have in common
            engine.ask([known + engine.draw(QUESTION)])
        turns[sharing, "question"] = partial(ask_after, engine, 0)
        turns[sharing, "new"] = partial(ask_after, engine, prefix)
        turns[sharing, "known"] = partial(ask_after, engine, 0, known)
        turns[sharing, f"{CLIENTS} clients"] = partial(engine.clients, prefix)
    times: dict[tuple[bool, str], Any] = timing.compare_ms(turns, None, None)
    chats: dict[bool, list[float]] = {sharing: [] for sharing in engines}
    for i in tqdm(range(CHATS), desc="chats", disable=None):
        for sharing in (True, False) if i % 2 else (False, True):
            chats[sharing].append(engines[sharing].chat(prefix))
    for sharing, found in chats.items():
        times[sharing, f"chat, turn {TURNS}"] = {"median": statistics.median(found[1:])}  # the first one warms up
    rows = []
    for (sharing, prompt), wall in times.items():
        row = {"size": size, "sharing": sharing, "prompt": prompt, "prefix": prefix, "wall": wall, "ms": wall["median"]}
        share = wall["median"] / times[sharing, "new"]["median"]
        rows.append(row | {"of new": share, "MiB": engines[sharing].kept_mib})
    for engine in engines.values():
        engine.manager.stop(block=True)
    return rows


def ask_after(engine: Engine, new: int, known: Sequence[int] = ()) -> None:
    """Ask a question after known tokens or `new` ones."""
    engine.ask([[*known, *engine.draw(new + QUESTION)]])


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
        rows += measure(size, args.prefix)
        contents = report.document(name, TITLE, rows, COLUMNS, report.stamp(args.commit))
        print(report.text(contents))
        print(report.save(args.output, contents))


if __name__ == "__main__":
    main()
