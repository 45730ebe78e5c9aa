"""Summaries, the stamp of machine and versions, and result files of all benchmarks (benchmarks/README.md)."""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import kda_layers


def summary(times: list[float]) -> dict[str, float]:
    """Median, first and last decile, and the lowest and highest, of `times`."""
    if not times:
        raise ValueError("times must not be empty: nothing was timed")
    deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else [times[0]] * 9
    return {
        "median": statistics.median(times), "p10": deciles[0], "p90": deciles[-1],
        "min": min(times), "max": max(times), "calls": len(times),
    }  # fmt: skip


def in_fresh_process(module: str, *arguments: str) -> float:
    """The number that `python -m module arguments` prints last."""
    command = [sys.executable, "-m", module, *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def peak_extra_mib(f: Callable[[], Any]) -> float:
    """Peak resident memory of one call above what the process held before it, in MiB."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # or the call would reuse, uncounted, what making its inputs left behind
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak

    def kib(field: str) -> int:
        return int(next(line for line in _lines("/proc/self/status") if line.startswith(field)).split()[1])

    before = kib("VmRSS")
    result = f()
    peak = (kib("VmHWM") - before) / 1024
    del result
    return peak


def add_commit_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--commit", metavar="HASH", help="of these sources, where git does not know (default: ask it)")


def add_name_option(parser: argparse.ArgumentParser, default: str) -> None:
    """Add --name, refused before anything is measured if `document` would refuse it."""
    parser.add_argument("--name", type=_checked_name, help=f"of the result file ({default})")


def _checked_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{NAME_RULE}, got {name!r}")
    return name


def stamp(commit: str | None = None) -> dict[str, str]:
    """The machine, versions, commit (what git says if None) and date."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    gpu = {}
    if torch.cuda.is_available():
        gpu = {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return gpu | {
        "cpu": f"{cpu}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kda_layers": kda_layers.__version__,
        "commit": commit or _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"


SCHEMA = 1
NAME = re.compile(r"(cpu|gpu)(-[a-z0-9]+)*")
NAME_RULE = "expected cpu- or gpu-, then words joined by hyphens"
KEYS = {"schema": int, "name": str, "title": str, "stamp": dict, "columns": list, "rows": list}


def document(
    name: str,
    title: str,
    rows: list[dict[str, Any]],
    columns: Sequence[str] = (),
    facts: dict[str, str] | None = None,
    details: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a result file's contents, as benchmarks/README.md describes them.

    Args:
        name: stem of the file: the device, then what was run, joined by hyphens.
        title: what was measured, in one line.
        rows: one object for each measurement.
        columns: fields that a table shows, in order; none if the rows have sections (benchmarks/gpu/tables.py).
        facts: the stamp of machine and versions; default: this process's.
        details: what is no row, such as the settings of a training.

    Raises:
        ValueError: `name` breaks the rule.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"name of results: {NAME_RULE}, got {name!r}")
    contents = {"schema": SCHEMA, "name": name, "title": title, "stamp": stamp() if facts is None else facts}
    return contents | {"columns": list(columns), "rows": rows} | ({"details": details} if details else {})


def save(folder: Path, contents: dict[str, Any]) -> Path:
    """Write the document to its file in `folder`, and return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{contents['name']}.json"
    path.write_text(serialise(contents))
    return path


def serialise(contents: dict[str, Any]) -> str:
    """Return the document as JSON with each row, fact and detail on one line, so that diffs show what changed."""
    fields = [f" {json.dumps(key)}: {_lines_of(value)}" for key, value in contents.items()]
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _lines_of(value: Any) -> str:
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"
    if isinstance(value, list) and any(isinstance(row, dict) for row in value):
        return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
    return json.dumps(value)


def load(path: Path) -> dict[str, Any]:
    """Read a result file.

    Raises:
        ValueError: it does not follow the schema; the text names the file and the first field that is wrong.
    """
    contents = json.loads(path.read_text())
    for key, kind in KEYS.items():
        if not isinstance(contents.get(key), kind):
            raise ValueError(f"{path}: expected {key!r} to be {kind.__name__}, got {contents.get(key)!r:.60}")
    if contents["schema"] != SCHEMA:
        raise ValueError(f"{path}: expected schema {SCHEMA}, got {contents['schema']}")
    if contents["name"] != path.stem or not NAME.fullmatch(path.stem):
        raise ValueError(f"{path}: expected the name to be the file's and to begin with cpu- or gpu-")
    if unknown := contents.keys() - KEYS.keys() - {"details"}:
        raise ValueError(f"{path}: unknown fields {', '.join(sorted(unknown))}; what is no row belongs in 'details'")
    return contents


def text(contents: dict[str, Any]) -> str:
    """Return the document's table in Markdown; below it, how far passes and repeated entries agree."""
    columns, rows = contents["columns"], contents["rows"]
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(c, "")) for c in columns) + " |" for row in rows]
    lines += ["", *turns(rows), ", ".join(f"{k} {v}" for k, v in contents["stamp"].items())]
    return "\n".join(lines) + "\n"


def turns(rows: list[dict[str, Any]]) -> list[str]:
    """Lines on how far apart one contender entered twice was at most, and on passes that do not agree."""
    found = [(row, n, v) for row in rows for n, v in row.items() if isinstance(v, dict) and "passes" in v]
    noise = [abs(v["again"] / v["median"] - 1) for _, _, v in found if "again" in v]
    lines = [f"One contender entered twice: medians at most {max(noise):.1%} apart.", ""] if noise else []
    for row, name, v in found:
        if not v["agree"]:
            what = ", ".join(str(x) for x in row.values() if isinstance(x, (str, int)) and x != "")
            medians = " / ".join(f"{m:.3g}" for m in v["passes"])
            spread = f"{v['p10']:.3g} to {v['p90']:.3g}"
            lines += [f"Passes differ, {what}, {name}: medians {medians}, first to last decile {spread}.", ""]
    return lines


def _cell(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 100
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
