"""Versions of the package in turns: `python -m benchmarks.versions before=HEAD~1 now=. --cases training:1,8192,32`.

A version is a commit, or a folder that holds `kda_layers`. Each runs in a process of its own, with the benchmarks of
this working tree; on one GPU they take turns, as the contenders of every benchmark do. Results are compared with those
of the first version. A case is PASS:B,T,H and, after further colons, fields of benchmarks.gpu.cases.Case, as in
`forward:1,8192,32:gates=fast:lengths=64x128` or `training:1,65536,8:kept:segments=always`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import timing
from benchmarks.gpu.cases import Case, make_inputs
from benchmarks.gpu.contenders import Contender, ours_forward, ours_prefill, ours_training
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.truth import Results, error, upstream
from benchmarks.processes import ROOT, Process, serve

PASSES = ("forward", "prefill", "training", "backward")
CUDA = "benchmarks.gpu.machine:CudaMachine"


# ---------------------------------------------------------------- cases


def parse_case(text: str) -> tuple[str, Case, str]:
    """The pass, the case, and `segments` of `kda`.

    Raises:
        ValueError: the text names no pass, has no three sizes, or a field that cases lack
    """
    pass_, sizes, *fields = text.split(":")
    if pass_ not in PASSES:
        raise ValueError(f"case must begin with one of {', '.join(PASSES)}, got {text!r}")
    if len(numbers := sizes.split(",")) != 3 or not all(n.isdigit() for n in numbers):
        raise ValueError(f"case must have sizes B,T,H after its pass, got {text!r}")
    B, T, H = map(int, numbers)
    options: dict[str, Any] = {}
    segments = "never"
    for name, _, value in (field.partition("=") for field in fields):
        if name == "segments":
            segments = value
        elif name == "lengths":
            options[name] = _lengths(value)
        elif name not in Case.__dataclass_fields__:
            raise ValueError(f"case must have fields of {', '.join(Case.__dataclass_fields__)}, got {name!r}")
        else:
            options[name] = int(value) if value.isdigit() else value or True
    return pass_, Case(B, T, H, **options), segments


def _lengths(text: str) -> tuple[int, ...]:
    """Return (128, 128, 7) for "2x128+7"."""
    parts = (part.rpartition("x") for part in text.split("+"))
    return tuple(int(length) for many, _, length in parts for _ in range(int(many or 1)))


def contender_of(text: str, backend: str, device: str) -> Contender:
    pass_, case, segments = parse_case(text)
    x = make_inputs(case, device)._replace(segments=segments)
    if pass_ == "forward":
        return ours_forward(backend, x)
    if pass_ == "prefill":
        return ours_prefill(backend, x)
    if pass_ == "training":
        return ours_training(backend, x, upstream(x))
    return ours_training(backend, x._replace(recompute_above=1.0), upstream(x), backward_alone=True)


# ---------------------------------------------------------------- the process of a version


class Version:
    """The package of a folder, as `processes.Process` asks it."""

    def __init__(self, machine_class: str, backend: str):
        module, _, name = machine_class.partition(":")
        self.machine: Machine = getattr(importlib.import_module(module), name)()
        self.backend = backend
        self.run: Any = None

    def prepare(self, case: str) -> tuple[dict[str, Tensor], int]:
        """Return the results of a case on the CPU, and how many calls its turns need."""
        prepared = contender_of(case, self.backend, self.machine.device).prepare()
        results = prepared.results(prepared.run())
        self.run = prepared.run if case.startswith("backward") else self.machine.graph(prepared.run)
        return {n: t.detach().cpu() for n, t in results.items()}, self.machine.warm_up(self.run)

    def turn(self, calls: int) -> list[float]:
        """Return the times of a turn of the prepared case, in ms."""
        return self.machine.turn(self.run, None, calls)


def work(fd: int, machine_class: str, backend: str) -> None:
    """Serve a `Version`; what a process runs."""
    serve(fd, partial(Version, machine_class, backend))


def parse_versions(texts: Sequence[str]) -> dict[str, str]:
    """Names, and what each stands for.

    Raises:
        ValueError: a text is not NAME=WHAT, or a name is there twice
    """
    found: dict[str, str] = {}
    for text in texts:
        name, _, what = text.partition("=")
        if not name or not what or name in found:
            raise ValueError(f"versions must be NAME=COMMIT or NAME=FOLDER with names that differ, got {text!r}")
        found[name] = what
    return found


@contextlib.contextmanager
def folder_of(what: str) -> Iterator[Path]:
    """A folder that holds the package: `what`, or the files of that commit."""
    if (Path(what) / "kda_layers").is_dir():
        yield Path(what).resolve()
        return
    command = ["git", "-C", str(ROOT), "archive", what, "kda_layers"]
    archive = subprocess.run(command, capture_output=True)
    if archive.returncode:
        reason = archive.stderr.decode().strip()
        raise ValueError(f"version must be a commit or a folder that holds kda_layers, got {what!r}: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder)


# ---------------------------------------------------------------- the comparison


def difference(got: Results, want: Results) -> str:
    """Return the largest relative L2 difference of results from those of the first version."""
    if all(torch.equal(got[n], t) for n, t in want.items()):
        return "same bits"
    name, most = max(((n, error(got[n], t)) for n, t in want.items()), key=lambda item: item[1])
    return f"{name} {most:.1e} apart"


def compare(case: str, versions: dict[str, Process]) -> list[str]:
    """Lines of a Markdown table."""
    made = {name: version.ask("prepare", case) for name, version in versions.items()}
    turns = timing.PASSES * timing.rounds_of(len(versions))

    def turn(name: str) -> Callable[[], list[float]]:
        return lambda: versions[name].ask("turn", -(-made[name][1] // turns))

    first, *_ = made.values()
    lines = []
    for name, times in timing.in_turns({name: turn(name) for name in versions}).items():
        if isinstance(times, Exception):
            raise times
        row = times.summary()
        passes = " / ".join(f"{ms:.4g}" for ms in row["passes"])
        noise = f"{row['again']:.4g}" if "again" in row else ""
        lines.append(
            f"| {case} | {name} | {row['median']:.4g} | {passes} | {noise} | {difference(made[name][0], first[0])} |"
        )
    return lines


def main(argv: Sequence[str] | None = None, machine_class: str = CUDA) -> int:
    """The exit code; tests name a machine of their own, as module:class."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="NAME=COMMIT", help="or NAME=FOLDER")
    parser.add_argument("--cases", nargs="+", required=True, metavar="CASE")
    parser.add_argument("--backend", default="sm90", help="(%(default)s)")
    args = parser.parse_args(argv)
    named = parse_versions(args.versions)
    for case in args.cases:
        parse_case(case)
    if machine_class == CUDA and not torch.cuda.is_available():
        print("benchmarks.versions needs a CUDA device, and torch finds none here", file=sys.stderr)
        return 2
    print("| case | version | ms | passes | again | results |", "|" + " --- |" * 6, sep="\n")
    with contextlib.ExitStack() as stack:
        versions = {}
        for name, what in named.items():
            folder = stack.enter_context(folder_of(what))
            versions[name] = Process(name, "benchmarks.versions:work", machine_class, args.backend, folder=folder)
            stack.callback(versions[name].close)
        for case in tqdm(args.cases, desc="cases"):
            print(*compare(case, versions), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
