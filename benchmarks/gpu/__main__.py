"""`make bench-gpu`, or `python -m benchmarks.gpu`: see the package's text for what is measured and how.

Exit code 0; 1 where nothing was timed, or something of ours was wrong or broke; 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import report, timing
from benchmarks.gpu import operator, precompile, tables
from benchmarks.gpu.cases import FULL, QUICK, Sizes
from benchmarks.gpu.harness import Budget, Job, Row, Setup, failures, run_all
from benchmarks.gpu.layer import layer
from benchmarks.gpu.machine import CudaMachine, Machine
from benchmarks.gpu.model import model
from kda_layers.kernels.kda.contract import KDA

SECTIONS: dict[str, Callable[[Setup], list[Job]]] = {
    "forward": operator.forward,
    "packed": operator.packed,
    "segments": operator.segments,
    "cudnn_shapes": operator.cudnn_shapes,
    "training": operator.training,
    "backward": operator.backward,
    "gdn_forward": operator.gdn_forward,
    "gdn_training": operator.gdn_training,
    "gdn_decode": operator.gdn_decode,
    "decode": operator.decode,
    "host": operator.host,
    "hard": operator.hard,
    "hard_gradients": operator.hard_gradients,
    "context": operator.context,
    "overhead": operator.overhead,
    "layer": layer,
    "model": model,
}
PACKAGES = ("triton", "flash-linear-attention", "fla-core", "flash-qla", "tilelang", "nvidia-cudnn-frontend")


def stamp(commit: str | None = None) -> dict[str, str]:
    """The machine, its driver, the peers' versions, the commit and the date."""
    facts = report.stamp(commit)
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = _first_line(query)
        facts["cudnn"] = str(torch.backends.cudnn.version())
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def with_heads(sizes: Sizes, heads: list[int]) -> Sizes:
    """The sizes, without cases of the operator that have another number of heads."""
    sections = (
        "forward", "packed", "segments", "cudnn_shapes", "training", "backward", "gdn_forward", "gdn_training",
        "gdn_decode",
    )  # fmt: skip
    chosen: dict[str, Any] = {s: tuple(c for c in getattr(sizes, s) if c.H in heads) for s in sections}
    return replace(sizes, **chosen)


def _first_line(command: list[str]) -> str:
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return lines[0].strip() if lines else "unknown"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--only", help=f"sections, separated by commas, of {','.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--backends", help="ours, separated by commas; default: all but eager")
    parser.add_argument("--heads", type=_numbers, help="only cases of the operator with so many heads, as 32,96")
    timing.add_tuning_option(parser)
    parser.add_argument(
        "--precompile", type=int, metavar="N",
        help="first compile what is timed of flash-linear-attention's autotuned kernels in N processes",
    )  # fmt: skip
    parser.add_argument("--budget-s", type=float, help="start no case after so many seconds; those left out are listed")
    report.add_commit_option(parser)
    args = parser.parse_args(argv)
    args.sections = args.only.split(",") if args.only else list(SECTIONS)
    args.ours = args.backends.split(",") if args.backends else [b for b in KDA.backends() if b != "eager"]
    for name, chosen, known in (("--only", args.sections, SECTIONS), ("--backends", args.ours, KDA.backends())):
        unknown = [n for n in chosen if n not in known]
        if unknown:
            parser.error(f"{name}: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    return args


def file_name(args: argparse.Namespace) -> str:
    """Return gpu, or what part of it was run: a part must not replace the results of the whole."""
    part = [] if args.sections == list(SECTIONS) else list(args.sections)
    part += [f"h{h}" for h in args.heads or ()]
    return "-".join(["gpu", *part, *(["quick"] if args.quick else [])]).replace("_", "-")


def main(argv: Sequence[str] | None = None, machine: Machine | None = None, sizes: Sizes | None = None) -> int:
    """The exit code. `machine` and `sizes` are for tests, which run every section on a CPU."""
    args = parse(argv)
    if machine is None:
        if not torch.cuda.is_available():
            print("benchmarks.gpu needs a CUDA device, and torch finds none here", file=sys.stderr)
            return 2
        machine = CudaMachine()
    for other in ("FLA_FLASH_KDA", "FLA_FLASH_QLA"):  # FLA stands for its own kernels, not for another package's
        os.environ.setdefault(other, "0")
    sizes = sizes or (QUICK if args.quick else FULL)
    setup = Setup(machine, with_heads(sizes, args.heads) if args.heads else sizes, args.ours)
    jobs = [(section, job) for section in args.sections for job in SECTIONS[section](setup)]
    name, facts = file_name(args), stamp(args.commit)
    heads = f", {' and '.join(map(str, args.heads))} heads" if args.heads else ""
    title = f"Benchmarks on a GPU: {', '.join(args.sections).replace('_', ' ')}{heads}"
    if args.precompile:
        seconds, failed = precompile.in_processes(args.precompile, precompile.cases_of(args.sections, setup.sizes))
        print(f"compiled in {args.precompile} processes and {seconds:.0f} s; {len(failed)} failed", *failed, sep="\n")
    rows: list[Row] = []
    results = report.document(name, title, rows, (), facts)
    with tqdm(total=len(jobs), desc="cases") as progress:

        def done(more: list[Row]) -> None:
            rows.extend(more)
            report.save(args.output, results)  # a run that is killed leaves what it had
            progress.set_postfix_str(more[0]["section"], refresh=False)
            progress.update()

        run_all(jobs, machine, Budget(args.budget_s), done)
    print(tables.markdown(results))
    found = failures(rows)
    for line in found:
        print(f"FAILED: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
