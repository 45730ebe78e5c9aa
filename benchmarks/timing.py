"""Contenders in turns: the rule by which every benchmark here compares times.

What the first call at a shape builds (plans, autotuned kernels, memory pools) is often kept for the process, so whoever
is first would pay for all: every contender is warmed up before any is timed. Then they take turns, in an order rotated
from round to round and reversed in the second of two passes. Passes whose medians differ by more than AGREE are
marked. The first contender is entered twice: how far its two medians differ is the noise of the comparison.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks import report

PASSES = 2
FEWEST_ROUNDS = 3
AGREE = 0.05  # largest relative difference of the medians of passes that agree

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass
class Times:
    """Times of one contender by pass, and those of its second entry."""

    passes: list[list[float]]
    again: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """`report.summary` of all, the median of each pass, whether these agree, and the second entry's median."""
        medians = [statistics.median(times) for times in self.passes]
        facts: dict[str, Any] = {**report.summary([t for times in self.passes for t in times])}
        facts |= {"passes": medians, "agree": max(medians) <= (1 + AGREE) * min(medians)}
        return facts | ({"again": statistics.median(self.again)} if self.again else {})


def order(names: Sequence[T], round_: int, pass_: int) -> list[T]:
    """The order of a round: rotated by one from round to round, reversed in every other pass."""
    turned = list(reversed(names)) if pass_ % 2 else list(names)
    first = round_ % len(turned) if turned else 0
    return turned[first:] + turned[:first]


def rounds_of(contenders: int) -> int:
    """Rounds of a pass: everyone, the first one's second entry too, is equally often at every place."""
    entries = contenders + 1
    return -(-FEWEST_ROUNDS // entries) * entries


def in_turns(turns: Mapping[K, Callable[[], list[float]]], rounds: int | None = None) -> dict[K, Times | Exception]:
    """The times of contenders that have been warmed up, each a function that returns the times of one turn.

    Whoever raises takes no further part; the exception is its result.

    Args:
        rounds: number of rounds in a pass; default: `rounds_of`.
    """
    entries: list[tuple[K, bool]] = [(name, False) for name in turns] + [(name, True) for name in list(turns)[:1]]
    found = {name: Times([[] for _ in range(PASSES)]) for name in turns}
    broken: dict[K, Exception] = {}
    for pass_ in range(PASSES):
        for round_ in range(rounds_of(len(turns)) if rounds is None else rounds):
            for name, again in order(entries, round_, pass_):
                if name in broken:
                    continue
                try:
                    times = turns[name]()
                except Exception as problem:
                    broken[name] = problem
                    continue
                (found[name].again if again else found[name].passes[pass_]).extend(times)
    return {name: broken.get(name, times) for name, times in found.items()}


def wall_ms(
    run: Callable[[], Any],
    before: Callable[[], Any] | None = None,
    synchronize: Callable[[], Any] | None = None,
    calls: int = 1,
) -> list[float]:
    """Wall-clock milliseconds of calls of `run`, each after an untimed `before` and up to the end of `synchronize`."""
    times = []
    for _ in range(calls):
        for f in (before, synchronize):
            if f is not None:
                f()
        start = time.perf_counter()
        run()
        if synchronize is not None:
            synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def compare_ms(
    runs: Mapping[K, Callable[[], Any]],
    before: Mapping[K, Callable[[], Any]] | None = None,
    synchronize: Callable[[], Any] | None = None,
    calls: int = 1,
) -> dict[K, dict[str, Any]]:
    """Summaries of the wall-clock milliseconds of `runs`, `calls` in a turn, after two calls of each.

    Raises:
        Exception: what the first run that fails raised.
    """
    prepare = before or {}
    for name, run in runs.items():
        wall_ms(run, prepare.get(name), synchronize, calls=2)

    def turn(name: K) -> Callable[[], list[float]]:
        return lambda: wall_ms(runs[name], prepare.get(name), synchronize, calls)

    summaries = {}
    for name, times in in_turns({name: turn(name) for name in runs}).items():
        if isinstance(times, Exception):
            raise times
        summaries[name] = times.summary()
    return summaries


def take_first_configurations() -> None:
    """Let Triton's autotuners take the first configuration that fits: tuning compiles and times hundreds."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def first(self: Any, kwargs: Any) -> Any:
        return prune(self, kwargs)[:1]

    Autotuner.prune_configs = first


def add_tuning_option(parser: argparse.ArgumentParser) -> None:
    what = "for which Triton's autotuners time each configuration, not 100"
    parser.add_argument("--tuning-ms", type=limit_tuning, help=what)


def limit_tuning(ms: str) -> int:
    """Let Triton's autotuners, which compile and time every configuration for each kind of problem, time less."""
    import triton.testing

    triton.testing.do_bench = functools.partial(triton.testing.do_bench, warmup=int(ms) // 4, rep=int(ms))
    return int(ms)
