"""Our layers in vLLM against its own: `python -m benchmarks.vllm_layers MODEL`, where vLLM is installed.

Two engines of one checkpoint with KDA layers, `stock` and `ours`, run in two processes and take turns. The process that
starts first can run faster or slower than the second, so everything is measured in both orders; `first` names the
engine that was started first. Prompts are random tokens.

* `prefill NxT`: wall-clock ms for N prompts of T tokens and one new token each.
* `decode N`: ms per step of N sequences, the median of `STEPS`.
* `graph N`: ms of that step's CUDA graph when it is replayed back to back, which excludes the host.
* `mixed`: wall-clock ms for 24 prompts of 3,000 tokens, prefilled in chunks while 24 other sequences decode; 12 new
  tokens each.

`GPU ms` is the sum of the kernels of a prefill or of `mixed`, and `of stock` is stock's time divided by the engine's.
Before anything is timed, log-probabilities of prompts of several lengths are compared. The result file's details have
`apart`, the mean distance of ours from stock's, and `noise`, that of stock's between prompts alone and together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import report, timing
from benchmarks.processes import Process, serve

TITLE = "Our layers in vLLM, and its own"
COLUMNS = ["first", "task", "layer", "ms", "of stock", "GPU ms"]
ENGINES = ("stock", "ours")
STEPS, PROMPT = 100, 64  # timed decode steps, tokens of the prompts before them
LENGTHS = (5, 16, 33, 64, 65, 127, 257, 700, 1500)  # of the prompts whose log-probabilities are compared
ROUNDS = 6  # per pass; hosts are noisy
SIZES = (1, 32, 128)  # sequences of a decode step
TASKS = ("prefill 4x8192", "prefill 16x512", *(f"{kind} {n}" for kind in ("decode", "graph") for n in SIZES), "mixed")


# ---------------------------------------------------------------- the process of an engine


class Engine:
    """vLLM's engine with one of the two layers, as `Process` asks it."""

    def __init__(self, name: str, model: str, options: dict[str, Any]):
        from vllm import LLM, SamplingParams

        self.name, self.sampling = name, SamplingParams
        self.vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        self.generator = torch.Generator().manual_seed(0)
        self.llm = LLM(model, skip_tokenizer_init=True, enable_prefix_caching=False, **options)
        self.steps: list[float] = []
        step = self.llm.llm_engine.step

        def timed_step() -> Any:
            start = time.perf_counter()
            result = step()
            self.steps.append(1e3 * (time.perf_counter() - start))
            return result

        self.llm.llm_engine.step = timed_step

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return prompts of random tokens."""
        return [torch.randint(3, self.vocabulary, (n,), generator=self.generator).tolist() for n in lengths]

    def generate(self, prompts: list[list[int]], new: int, **options: Any) -> list[Any]:
        """Generate `new` tokens for each prompt."""
        sampling = self.sampling(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True, **options)
        found: list[Any] = self.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return found

    def layers(self) -> str:
        """Return the class of the model's KDA layers.

        Raises:
            RuntimeError: there are none, or some are not served by the layers that this engine is to measure
        """
        (found,) = self.llm.apply_model(_kda_layers)
        if len(found) != 1 or found[0][1] != (self.name == "ours"):
            raise RuntimeError(
                f"expected KDA layers that are {'' if self.name == 'ours' else 'not '}served by kda_layers, got "
                f"(class, served) {found or 'none'}; vLLM's log says why a layer is not served"
            )
        return str(found[0][0])

    def log_probabilities(self, together: bool) -> list[float]:
        """Return the log-probabilities of the tokens of fixed prompts, run alone or together."""
        self.generator.manual_seed(1)
        groups = [LENGTHS] if together else [(length,) for length in LENGTHS]
        outputs = [o for lengths in groups for o in self.generate(self.prompts(lengths), 1, prompt_logprobs=0)]
        pairs = [(o.prompt_token_ids[1:], o.prompt_logprobs[1:]) for o in outputs]
        return [chances[token].logprob for tokens, found in pairs for token, chances in zip(tokens, found, strict=True)]

    def turn(self, task: str) -> list[float]:
        """Return the ms of one turn."""
        kind, _, size = task.partition(" ")
        if kind == "graph":
            return self._graph(int(size))
        if kind == "decode":
            self._decode(int(size))
            return [statistics.median(self.steps[-STEPS - 1 : -1])]  # the last step only returns results
        return timing.wall_ms(self._call(task), synchronize=_synchronize)

    def gpu_ms(self, task: str) -> float | None:
        """Return the sum of a call's kernels in ms, or None for decode, graph and without a GPU."""
        if not torch.cuda.is_available() or task.startswith(("decode", "graph")):
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            self._call(task)()
        return sum(e.self_device_time_total for e in found.key_averages()) / 1e3

    def _call(self, task: str) -> Callable[[], Any]:
        if task == "mixed":
            return partial(self.generate, self.prompts([PROMPT] * 24 + [3000] * 24), 12)
        count, _, length = task.removeprefix("prefill ").partition("x")
        return partial(self.generate, self.prompts([int(length)] * int(count)), 1)

    def _decode(self, sequences: int) -> None:
        self.steps.clear()
        self.generate(self.prompts([PROMPT] * sequences), STEPS + 10)

    def _graph(self, sequences: int) -> list[float]:
        """Return the ms of a step's CUDA graph, whose inputs are still those of the last step of a decode."""
        self._decode(sequences)
        executor = self.llm.llm_engine.model_executor.driver_worker
        graphs = getattr(executor, "worker", executor).model_runner.cudagraph_manager.graphs
        graph = next(g for d, g in graphs.items() if d.num_tokens == sequences and d.cg_mode.name == "FULL")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
        return [start.elapsed_time(end) / 20]


def _kda_layers(model: Any) -> list[tuple[str, bool]]:
    """Return (class, served by kda_layers) of the KDA layers, once each; a layer of ours without a core is vLLM's."""
    kinds = "DeltaAttention", "DeltaNetAttention", "LinearAttention"
    found = [m for m in model.modules() if type(m).__name__.endswith(kinds)]
    return sorted({(type(m).__name__, getattr(m, "core", None) is not None) for m in found})


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def work(fd: int, name: str, model: str, options: dict[str, Any]) -> None:
    """Serve an `Engine`; what a process runs."""
    serve(fd, partial(Engine, name, model, options))


@contextlib.contextmanager
def engines(order: Sequence[str], model: str, options: dict[str, Any]) -> Iterator[dict[str, Process]]:
    """Start both engines in this order, one after the other."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name in order:
            # One process per engine, so that its steps can be timed.
            variables = {"KDA_LAYERS_ENGINES": "vllm" if name == "ours" else "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            found[name] = Process(name, "benchmarks.vllm_layers:work", name, model, options, environment=variables)
            stack.callback(found[name].close)
            print(f"{name}: {found[name].ask('layers')}", flush=True)
        yield {name: found[name] for name in ENGINES}


# ---------------------------------------------------------------- the comparison


def distances(found: dict[str, Process]) -> dict[str, float]:
    """Return `apart` and `noise`, mean distances of log-probabilities.

    Raises:
        RuntimeError: one is not finite
    """
    alone, together, ours = (
        torch.tensor(found[name].ask("log_probabilities", joined))
        for name, joined in (("stock", False), ("stock", True), ("ours", True))
    )
    result = {"apart": float((ours - together).abs().mean()), "noise": float((alone - together).abs().mean())}
    if not all(map(math.isfinite, result.values())):
        raise RuntimeError(f"distances of log-probabilities must be finite, got {result}: an engine computes NaN")
    return result


def measure(found: dict[str, Process], first: str, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each task and layer."""
    rows = []
    for task in tqdm(tasks, desc=f"{first} started first", disable=None):
        for engine in found.values():
            engine.ask("turn", task)
        turns = {name: partial(engine.ask, "turn", task) for name, engine in found.items()}
        times = timing.in_turns(turns, ROUNDS)
        summaries = {}
        for name, of in times.items():
            if isinstance(of, Exception):
                raise of
            summaries[name] = of.summary()
        for name, wall in summaries.items():
            ratio = summaries["stock"]["median"] / wall["median"]
            row = {"first": first, "task": task, "layer": name, "wall": wall, "ms": wall["median"], "of stock": ratio}
            rows.append(row | {"GPU ms": found[name].ask("gpu_ms", task)})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint; two engines of it must fit on the GPU")
    parser.add_argument("--tasks", default=",".join(TASKS), help="(%(default)s)")
    parser.add_argument("--options", type=json.loads, default={}, help="of vllm.LLM, as JSON")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="folder (%(default)s)")
    report.add_commit_option(parser)
    report.add_name_option(parser, "gpu-vllm-layers, cpu-vllm-layers")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = args.name or ("gpu-vllm-layers" if device == "cuda" else "cpu-vllm-layers")
    options: dict[str, Any] = {"max_model_len": 16384, "max_num_seqs": 128, "max_num_batched_tokens": 8192}
    if device == "cuda":
        graphs = {"cudagraph_capture_sizes": list(SIZES), "max_cudagraph_capture_size": SIZES[-1]}
        options |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.4, "compilation_config": graphs}
    options |= args.options
    facts = report.stamp(args.commit) | {"vllm": version("vllm")}
    rows: list[dict[str, Any]] = []
    details: dict[str, Any] = {"model": json.loads((Path(args.model) / "config.json").read_text())}
    for order in (ENGINES, ENGINES[::-1]):
        with engines(order, args.model, options) as found:
            details[f"{order[0]} started first"] = distances(found)
            print(details[f"{order[0]} started first"])
            rows += measure(found, order[0], args.tasks.split(","))
        contents = report.document(name, TITLE, rows, COLUMNS, facts, details)
        print(report.text(contents))
        print(report.save(args.output, contents))


if __name__ == "__main__":
    main()
