"""Our layers inside vLLM beside its own: `python -m benchmarks.vllm_layers MODEL`, where vLLM is installed.

Two engines of one checkpoint with KDA layers, `stock` and `ours`, each in a process of its own, take turns. The process
that starts first can run at another speed than the second one, so all of it is measured in both orders, and rows name
the `first`. Prompts are random tokens.

* `prefill NxT`: wall ms of N prompts of T tokens and one new token each. `GPU ms` is the sum of its kernels.
* `decode N`: ms of a step of N sequences, the median of `STEPS`.
* `graph N`: ms of that step's CUDA graph, replayed by itself: the fastest that any host could make it.
* `mixed`: wall ms of 24 prompts of 3,000 tokens, in chunks, beside 24 sequences that decode, for 12 new tokens each.

`of stock` divides the time of stock's layer by it. First, log-probabilities of prompts of many lengths are compared:
ours may differ from stock's by no more than `MOST` times what stock's differ by when prompts run alone and together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import report, timing

TITLE = "Our layers in vLLM, and its own"
COLUMNS = ["first", "task", "layer", "ms", "of stock", "GPU ms"]
ENGINES = ("stock", "ours")
STEPS, PROMPT = 100, 64  # of a decoding that is timed; the steps before them begin it
LENGTHS = (5, 16, 33, 64, 65, 127, 257, 700, 1500)  # of prompts that are compared
ROUNDS = 6  # of a pass; hosts are noisy
MOST = 4  # times the distance of stock from itself
TASKS = (
    "prefill 4x8192",
    "prefill 16x512",
    "decode 1",
    "decode 32",
    "decode 128",
    "graph 1",
    "graph 32",
    "graph 128",
    "mixed",
)


# ---------------------------------------------------------------- the process of an engine


class Engine:
    """vLLM's engine with one of the two layers; its methods are what `Worker` asks for."""

    def __init__(self, name: str, model: str, options: dict[str, Any]):
        # vLLM reads these when it is imported. In this process, so that a step can be timed.
        os.environ |= {"KDA_LAYERS_ENGINES": "vllm" if name == "ours" else "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
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
        """Random tokens."""
        return [torch.randint(3, self.vocabulary, (n,), generator=self.generator).tolist() for n in lengths]

    def generate(self, prompts: list[list[int]], new: int, **options: Any) -> list[Any]:
        """Answer prompts with as many new tokens each."""
        sampling = self.sampling(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True, **options)
        found: list[Any] = self.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return found

    def layers(self) -> str:
        """The class of the model's KDA layers.

        Raises:
            RuntimeError: they are not those of this engine's name
        """
        (found,) = self.llm.apply_model(_kda_layers)
        if len(found) != 1 or next(iter(found.values())) != (self.name == "ours"):
            raise RuntimeError(f"expected KDA layers of one kind, served by {self.name}, got {found or 'none'}")
        return str(next(iter(found)))

    def log_probabilities(self, together: bool) -> list[float]:
        """Return those of the tokens of prompts, which are the same in every call."""
        self.generator.manual_seed(1)
        groups = [LENGTHS] if together else [(length,) for length in LENGTHS]
        outputs = [o for lengths in groups for o in self.generate(self.prompts(lengths), 1, prompt_logprobs=0)]
        pairs = [(o.prompt_token_ids[1:], o.prompt_logprobs[1:]) for o in outputs]
        return [chances[token].logprob for tokens, found in pairs for token, chances in zip(tokens, found, strict=True)]

    def turn(self, task: str) -> list[float]:
        """The times of one turn."""
        kind, _, size = task.partition(" ")
        if kind == "graph":
            return self._graph(int(size))
        if kind == "decode":
            self._decode(int(size))
            return [statistics.median(self.steps[-STEPS - 1 : -1])]  # the last one may end what the others began
        return timing.wall_ms(self._call(task), synchronize=_synchronize)

    def gpu_ms(self, task: str) -> float | None:
        """Sum of the kernels of a call that is no decoding; None without a GPU."""
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
        """Replay the graph of a step, which still finds the arguments of the last decoding."""
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


def _kda_layers(model: Any) -> dict[str, bool]:
    """Classes of KDA layers; True for those that ours serve, which may leave a layer to vLLM."""
    kinds = "DeltaAttention", "DeltaNetAttention", "LinearAttention"
    found = [m for m in model.modules() if type(m).__name__.endswith(kinds)]
    return {type(m).__name__: getattr(m, "core", None) is not None for m in found}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def work(connection: Connection, name: str, model: str, options: dict[str, Any]) -> None:
    """Answer `Worker` until it closes the connection."""
    engine: Any = None
    with contextlib.suppress(EOFError):
        while True:
            method, args = connection.recv()
            try:
                if engine is None:
                    engine = Engine(name, model, options)
                answer = getattr(engine, method)(*args)
            except Exception as problem:
                answer = RuntimeError(f"{name}: {type(problem).__name__}: {problem}")
            connection.send(answer)


class Worker:
    """A process with an engine, which the first question starts."""

    def __init__(self, name: str, model: str, options: dict[str, Any]):
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.name, self.process = name, context.Process(target=work, args=(other, name, model, options))
        self.process.start()
        other.close()

    def ask(self, method: str, *args: Any) -> Any:
        try:
            self.connection.send((method, args))
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            raise RuntimeError(f"the process of {self.name} ended with {self.process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextlib.contextmanager
def workers(order: Sequence[str], model: str, options: dict[str, Any]) -> Iterator[dict[str, Worker]]:
    """Both engines, started in this order, one after the other."""
    found: dict[str, Worker] = {}
    try:
        for name in order:
            found[name] = Worker(name, model, options)
            print(f"{name}: {found[name].ask('layers')}", flush=True)
        yield {name: found[name] for name in ENGINES}
    finally:
        for worker in found.values():
            worker.connection.close()
            worker.process.join(30)
            worker.process.kill()
            worker.process.join()  # its memory is free


# ---------------------------------------------------------------- the comparison


def judge(found: dict[str, Worker]) -> dict[str, float]:
    """Return mean distances of log-probabilities of prompts: of ours from stock's, and of stock's from itself.

    Raises:
        RuntimeError: ours are further away than MOST times the other distance.
    """
    alone, together, ours = (
        torch.tensor(found[name].ask("log_probabilities", joined))
        for name, joined in (("stock", False), ("stock", True), ("ours", True))
    )
    noise, apart = (float((t - together).abs().mean()) for t in (alone, ours))
    if not apart <= MOST * noise:
        raise RuntimeError(
            f"log-probabilities of prompts with our layer must be within {MOST} x {noise:.3g} of vLLM's, the distance "
            f"of these between prompts alone and together, got {apart:.3g}"
        )
    return {"apart": apart, "noise": noise}


def measure(found: dict[str, Worker], first: str, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each task and layer."""
    rows = []
    for task in tqdm(tasks, desc=f"{first} started first", disable=None):
        for worker in found.values():
            worker.ask("turn", task)
        turns = {name: partial(worker.ask, "turn", task) for name, worker in found.items()}
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
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]
    options: dict[str, Any] = {"max_model_len": 16384, "max_num_seqs": 128, "max_num_batched_tokens": 8192}
    if device == "cuda":
        graphs = {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[-1]}
        options |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.4, "compilation_config": graphs}
    options |= args.options
    facts = report.stamp(args.commit) | {"vllm": version("vllm")}
    rows: list[dict[str, Any]] = []
    details: dict[str, Any] = {"model": json.loads((Path(args.model) / "config.json").read_text())}
    for order in (ENGINES, ENGINES[::-1]):
        with workers(order, args.model, options) as found:
            details[f"distances, {order[0]} first"] = judge(found)
            rows += measure(found, order[0], args.tasks.split(","))
        contents = report.document(name, TITLE, rows, COLUMNS, facts, details)
        print(report.text(contents))
        print(report.save(args.output, contents))


if __name__ == "__main__":
    main()
