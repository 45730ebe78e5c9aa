"""`python -m benchmarks.compare A.json B.json`: what became faster or slower between two runs of a benchmark.

Rows are matched by the fields that say what was measured: strings and integers. A time has moved if its medians
differ by more than the larger of the two spreads: from first to last decile of the calls, or from the fastest to the
slowest where a file has no deciles.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NOT_IDENTITY = frozenset(("status", "reason", "note", "goal"))  # texts that say how it went, not what was measured

Key = tuple[tuple[str, Any], ...]


class FileError(Exception):
    """A file is not the output of a benchmark; the text names it and what was expected."""


def load(path: Path) -> tuple[dict[str, str], dict[Key, dict[str, Any]]]:
    """The stamp, and every time's summary by what was measured; None for a row that has no time."""
    try:
        data = json.loads(path.read_text())
    except OSError as problem:
        raise FileError(f"{path}: cannot be read: {problem.strerror}") from problem
    except ValueError as problem:
        raise FileError(f"{path}: expected JSON that a benchmark wrote, got {problem}") from problem
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        raise FileError(f"{path}: expected an object with a list 'rows', got {_shape(data)}")
    times: dict[Key, dict[str, Any]] = {}
    for i, row in enumerate(data["rows"]):
        if not isinstance(row, dict):
            raise FileError(f"{path}: expected row {i} to be an object, got {_shape(row)}")
        what = [
            (n, v)
            for n, v in row.items()
            if isinstance(v, (str, int)) and not isinstance(v, bool) and v != "" and n not in NOT_IDENTITY
        ]
        found = {n: v for n, v in row.items() if isinstance(v, dict) and "median" in v}
        for name, summary in found.items():
            times[(*what, ("time", name))] = _checked(path, i, summary)
    return data.get("stamp", {}), times


def _shape(data: Any) -> str:
    return f"an object with {', '.join(data) or 'nothing'}" if isinstance(data, dict) else type(data).__name__


def _checked(path: Path, i: int, summary: dict[str, Any]) -> dict[str, Any]:
    missing = [n for n in ("median", "min", "max") if not isinstance(summary.get(n), (int, float))]
    if missing:
        raise FileError(f"{path}: expected numbers {', '.join(missing)} in the times of row {i}, got {summary}")
    return summary


def spread(summary: dict[str, Any]) -> float:
    """From first to last decile, or from least to greatest."""
    if "p10" in summary and "p90" in summary:
        return summary["p90"] - summary["p10"]
    return summary["max"] - summary["min"]


def moved(a: dict[str, Any], b: dict[str, Any]) -> str:
    """'faster' or 'slower' if the second median left the larger spread around the first, else nothing."""
    difference = b["median"] - a["median"]
    if abs(difference) <= max(spread(a), spread(b)):
        return ""
    return "faster" if difference < 0 else "slower"


def text_of(key: Key) -> str:
    """Return what was measured, in one line."""
    return ", ".join(f"{n} {v}" for n, v in key if (n, v) != ("time", "time"))


def table(a: dict[Key, dict[str, Any]], b: dict[Key, dict[str, Any]], names: tuple[str, str]) -> str:
    """The comparison in Markdown."""
    lines = [f"| what | {names[0]} | {names[1]} | ratio | moved |", "| --- | --- | --- | --- | --- |"]
    for key in (k for k in a if k in b):
        ratio = b[key]["median"] / a[key]["median"] if a[key]["median"] else float("nan")
        medians = f"{a[key]['median']:.4g} | {b[key]['median']:.4g}"
        lines.append(f"| {text_of(key)} | {medians} | {ratio:.3f} | {moved(a[key], b[key])} |")
    for name, these, those in ((names[0], a, b), (names[1], b, a)):
        only = [k for k in these if k not in those]
        if only:
            lines += ["", f"Timed only in {name}:", "", *(f"- {text_of(k)}" for k in only)]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """0, also where times moved; 2 where a file cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("a", type=Path, metavar="A.json")
    parser.add_argument("b", type=Path, metavar="B.json")
    args = parser.parse_args(argv)
    try:
        (stamp_a, a), (stamp_b, b) = load(args.a), load(args.b)
    except FileError as problem:
        print(problem, file=sys.stderr)
        return 2
    for path, facts in ((args.a, stamp_a), (args.b, stamp_b)):
        print(f"{path}: " + ", ".join(f"{n} {v}" for n, v in facts.items()))
    print()
    print(table(a, b, (args.a.name, args.b.name) if args.a.name != args.b.name else (str(args.a), str(args.b))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
