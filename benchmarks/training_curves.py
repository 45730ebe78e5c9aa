"""Loss curves of one training by every backend: `python -m benchmarks.training_curves --output FOLDER`.

The preset model "120m" is trained from the same weights on the same batches by each backend: in bf16 (autocast,
parameters in fp32), and by plain PyTorch in fp32 as the reference. What differs is rounding alone, which training
amplifies; how much it does so in any case, a run of the first backend tells whose initial weights differ in their last
bit ("rounding"), and, if asked for, one that sees its batches in another order of the text ("data"). With
--float8 the first backend also trains with torchao's float8 in the large products.

Writes training_curves.json after every run, from which `--resume` keeps the runs that made all steps; then the same as
gpu-training-curves.json in the form of benchmarks/results, and training_curves.md and .png, which `--plot FOLDER` makes
again. Where the budget is too short for all steps, every run makes fewer, as many as the slowest can; the reference may
end earlier.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import report, timing
from benchmarks.lm import in_float8
from kda_layers import KDAForCausalLM, use_backend
from kda_layers.training import CapturedStep

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from common.cli import InputError  # noqa: E402
from common.corpus import Corpus, load_corpus  # noqa: E402
from common.model import load_config  # noqa: E402
from common.optimization import build_optimizer, precision, rate_factor  # noqa: E402
from common.settings import LMSettings  # noqa: E402
from common.text import BYTES, training_batch  # noqa: E402
from common.throughput import machine  # noqa: E402

NAME = "training_curves"
TITLE = "One training by several backends"
COLUMNS = ["name", "dtype", "steps", "steps_per_s", "peak_gib", "status"]
REFERENCE = "eager"  # in fp32
FLOAT8 = "float8"
NOISE = ("rounding", "data")
FIRST_STEPS, TIMED_STEPS = 5, 15  # of the trial that decides how many steps there are
WINDOW = 10  # steps between two readings of loss and time, which wait for the device


@dataclass(frozen=True)
class Run:
    """One training: a backend, and what is changed to see how much any change does."""

    backend: str
    change: str = ""  # or one of NOISE, or FLOAT8

    @property
    def name(self) -> str:
        other = "other " if self.change in NOISE else ""
        return f"{self.backend}, {other}{self.change}" if self.change else self.backend

    @property
    def dtype(self) -> str:
        return "float32" if self.backend == REFERENCE else "bfloat16"


# ---------------------------------------------------------------- training


@torch.no_grad()
def change_last_bits(model: torch.nn.Module, seed: int) -> None:
    """Moves each parameter to the next number above or below, at random: a rounding of fp32."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        up = torch.randint(2, p.shape, generator=generator).bool()
        p.copy_(torch.nextafter(p, torch.where(up, math.inf, -math.inf).to(p)))


def build(run: Run, s: LMSettings) -> Any:
    """The model of a run: the same weights on every device and for every backend."""
    torch.manual_seed(s.seed)
    model: Any = KDAForCausalLM(load_config(s))
    if run.change == "rounding":
        change_last_bits(model, s.seed)
    return model.train()


Step = Callable[[torch.Tensor], torch.Tensor]  # takes a batch, returns the loss


def step_of(model: Any, s: LMSettings, device: torch.device, cuda_graph: bool) -> tuple[Step, torch.optim.Optimizer]:
    """An optimizer step, with `cuda_graph` replayed from a CUDA graph: the same bits."""
    optimizer = build_optimizer(model, capturable=cuda_graph)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with precision(device, s):
            return model(input_ids=batch, labels=batch, use_cache=False).loss

    if cuda_graph:
        captured = CapturedStep(model, optimizer, loss_of=loss_of, max_norm=1.0)
        # The next step overwrites the loss.
        return lambda batch: captured({"batch": batch}).detach().clone(), optimizer

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def train(
    run: Run, s: LMSettings, corpus: Corpus, device: torch.device, steps: int, cuda_graph: bool = False
) -> dict[str, Any]:
    """`steps` of the s.steps that fix the learning rate: losses, steps/s and memory."""
    s = dataclasses.replace(s, dtype=run.dtype)
    seed = s.seed + (run.change == "data")
    model = build(run, s).to(device)
    if run.change == FLOAT8:
        model = in_float8(model, device.type)
    take_step, optimizer = step_of(model, s, device, cuda_graph)
    losses: list[float] = []
    unread: list[torch.Tensor] = []
    rates: list[float] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with use_backend(run.backend), tqdm(total=steps, desc=run.name, unit="step", mininterval=_interval()) as bar:
        began = time.perf_counter()
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = s.lr * rate_factor(step / s.steps, s.schedule)
            batch = training_batch(corpus.train, s.batch_size, s.seq_len, seed, step).to(device).long()
            unread.append(take_step(batch))
            if len(unread) == WINDOW or step + 1 == steps:
                losses += torch.stack(unread).tolist()
                now = time.perf_counter()
                if step >= max(FIRST_STEPS, WINDOW):  # the first window compiles
                    rates.append(len(unread) / (now - began))
                began = now
                bar.update(len(unread))
                bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
                unread.clear()
                if not math.isfinite(losses[-1]):
                    break
    finite = list(itertools.takewhile(math.isfinite, losses))
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    del model, optimizer, take_step
    gc.collect()
    return {
        "name": run.name, **dataclasses.asdict(run), "dtype": run.dtype, "steps": len(finite), "losses": finite,
        "status": "finished" if len(finite) == steps else f"the loss of step {len(finite) + 1} is not finite",
        "steps_per_s": statistics.median(rates) if rates else None, "peak_gib": memory,
    }  # fmt: skip


def seconds_per_step(run: Run, s: LMSettings, corpus: Corpus, device: torch.device, cuda_graph: bool = False) -> float:
    """Return the seconds per step of a short trial, after the first steps, in which kernels are compiled."""
    s = dataclasses.replace(s, steps=FIRST_STEPS + TIMED_STEPS)
    rate = train(run, s, corpus, device, s.steps, cuda_graph)["steps_per_s"]
    if rate is None:
        raise RuntimeError(f"the trial of {run.name} did not train: its loss is not finite")
    return 1 / rate


def plan_steps(asked: int, budget_s: float, seconds: dict[Run, float]) -> dict[Run, int]:
    """Return the number of steps of each run: all the same, but for a reference that is too slow for them."""
    affordable = {run: max(FIRST_STEPS + 1, int(budget_s / each)) for run, each in seconds.items()}
    common = [n for run, n in affordable.items() if run.backend != REFERENCE] or list(affordable.values())
    steps = min(asked, *common)
    return {run: min(steps, n) for run, n in affordable.items()}


def _interval() -> float:
    return 0.2 if sys.stderr.isatty() else 10


# ---------------------------------------------------------------- what came out


def smoothed(losses: Sequence[float], width: int) -> list[float]:
    """For each step the mean of the last `width` ones, or of as many as there are."""
    sums = [0.0, *itertools.accumulate(losses)]
    return [(sums[i] - sums[max(0, i - width)]) / min(i, width) for i in range(1, len(sums))]


def width_of(data: dict[str, Any]) -> int:
    """Steps that a smoothed loss is the mean of, from the longest run."""
    return max(1, max(r["steps"] for r in data["runs"]) // 40)


def difference(a: dict[str, Any], b: dict[str, Any], width: int) -> list[float]:
    """b - a of the smoothed losses, over the steps that both have made."""
    pairs = zip(smoothed(a["losses"], width), smoothed(b["losses"], width), strict=False)
    return [y - x for x, y in pairs]


def largest(differences: Sequence[float], width: int) -> float:
    """The largest absolute difference, of means over `width` steps where there are as many."""
    return max(map(abs, differences[min(width, len(differences)) - 1 :]))


def table(data: dict[str, Any]) -> str:
    """The runs, the differences between each two of them, and the noise, in Markdown."""
    runs, width, s = data["runs"], width_of(data), data["settings"]
    if not (shortest := min(r["steps"] for r in runs)):
        raise SystemExit("a run has no finite loss: nothing can be compared")
    lines = [
        f"| run | precision | steps | loss, mean of the last {width} | after {shortest} steps | steps/s | GiB |",
        "|" + " --- |" * 7,
    ]
    for r in runs:
        smooth = smoothed(r["losses"], width)
        rate, memory = (f"{v:.3g}" if v is not None else "" for v in (r["steps_per_s"], r["peak_gib"]))
        lines.append(
            f"| {r['name']} | {r['dtype']} | {r['steps']} | {smooth[-1]:.4f} | {smooth[shortest - 1]:.4f} | {rate} | "
            f"{memory} |"
        )
    if len(runs) > 1:
        lines += ["", "| smoothed curves | steps | largest difference | last difference | |", "|" + " --- |" * 5]
    for a, b in itertools.combinations(runs, 2):
        found = difference(a, b, width)
        noise = "noise" if a["backend"] == b["backend"] and FLOAT8 not in (a["change"], b["change"]) else ""
        lines.append(
            f"| {b['name']} - {a['name']} | {len(found)} | {largest(found, width):.2g} | {found[-1]:+.2g} | {noise} |"
        )
    lines += [
        "",
        f"{data['parameters']:,} parameters, {s['batch_size']} x {s['seq_len']} tokens a step, nats per token; "
        f"smoothed: the mean of {width} steps. Other rounding: the initial weights differ in their last bit of fp32. "
        "Other data: other excerpts of the same text.",
    ]
    if any(r["at_once"] > 1 for r in runs):
        shared = " / ".join(r["name"] for r in runs if r["at_once"] > 1)
        lines.append(f"Of trainings that shared the device ({shared}) steps/s are not those of one alone.")
    if s.get("cuda_graph"):
        lines.append("Steps are replayed from CUDA graphs.")
    if s.get("untuned"):
        lines.append("Triton's kernels ran in their first configuration: their steps/s say nothing of their speed.")
    for r in runs:
        if r["status"] != "finished":
            lines.append(f"{r['name']} stopped: {r['status']}.")
        elif r["steps"] < data["steps"]:
            lines.append(f"{r['name']} made {r['steps']} steps of {data['steps']}, as many as its time allowed.")
    if data["steps"] < s["asked_steps"]:
        lines.append(f"{s['asked_steps']} steps were asked for, and the time allowed {data['steps']}.")
    stamps: dict[str, list[str]] = {}
    for r in runs:
        stamps.setdefault(", ".join(f"{k} {v}" for k, v in r["stamp"].items()), []).append(r["name"])
    for stamp, names in stamps.items():
        lines += ["", stamp if len(stamps) == 1 else f"{' / '.join(names)}: {stamp}"]
    return "\n".join(lines) + "\n"


def plot(data: dict[str, Any], path: Path) -> None:
    """Smoothed curves, and their differences from the first run's beside the noise."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path.name}: matplotlib is not installed; --plot makes it elsewhere")
        return
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    curves, differences = figure.subplots(1, 2)
    base, width = data["runs"][0], width_of(data)
    for i, r in enumerate(data["runs"]):
        smooth, color = smoothed(r["losses"], width), f"C{i}"
        style = "--" if r["change"] in NOISE else "-"
        curves.plot(range(1, len(smooth) + 1), smooth, style, color=color, label=f"{r['name']}, {r['dtype']}")
        if r is base:
            continue
        found = difference(base, r, width)
        steps = range(1, len(found) + 1)
        if r["change"] == "rounding":
            band = list(itertools.accumulate(map(abs, found), max))
            label = "noise: most so far of weights off by a rounding"
            differences.fill_between(steps, [-x for x in band], band, color="grey", alpha=0.3, label=label)
        if r["change"] != "data":  # other batches have other losses
            differences.plot(steps, found, style, color=color, linewidth=1, label=f"{r['name']} - {base['name']}")
    curves.set(xlabel="step", ylabel=f"loss, nats per token, mean of {width} steps", title="Training loss")
    differences.set(xlabel="step", ylabel="difference, nats per token", title=f"Differences from {base['name']}")
    for axes in (curves, differences):
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def show(folder: Path) -> dict[str, Any]:
    """Makes the table and the picture from the JSON in `folder`."""
    data: dict[str, Any] = json.loads((folder / f"{NAME}.json").read_text())
    text = table(data)
    (folder / f"{NAME}.md").write_text(text)
    print(text)
    plot(data, folder / f"{NAME}.png")
    report.save(folder, results(data))
    return data


def results(data: dict[str, Any]) -> dict[str, Any]:
    """Return the document for benchmarks/results: a row for each run."""
    stamp = data["runs"][0]["stamp"]
    name = f"{'gpu' if 'gpu' in stamp else 'cpu'}-training-curves"
    details = {n: v for n, v in data.items() if n != "runs"}
    return report.document(name, TITLE, data["runs"], COLUMNS, stamp, details)


# ---------------------------------------------------------------- all


def settings_of(args: argparse.Namespace, s: LMSettings) -> dict[str, Any]:
    """Return what fixes a training but for the run's own precision."""
    settings = dataclasses.asdict(s) | {"config": Path(s.config).name, "asked_steps": args.steps}
    settings |= {"cuda_graph": args.cuda_graph, "untuned": args.untuned}
    del settings["dtype"], settings["minutes"]
    return settings


def finished_runs(folder: Path, settings: dict[str, Any], steps: int) -> dict[str, dict[str, Any]]:
    """The runs of the JSON in `folder` with all the steps, by name; none of a training with other settings."""
    path = folder / f"{NAME}.json"
    data = json.loads(path.read_text()) if path.exists() else {"settings": None, "runs": []}
    return {r["name"]: r for r in data["runs"] if data["settings"] == settings and r["steps"] == steps}


Map = Callable[..., Iterable[Any]]  # as the built-in


@contextlib.contextmanager
def mapping(at_once: int, untuned: bool) -> Iterator[Map]:
    """`map`, or one that runs so many calls at a time, each process with its own interpreter."""
    begin = timing.take_first_configurations if untuned else None
    if at_once == 1:
        if begin is not None:
            begin()
        yield map
        return
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn"), begin) as pool:
        yield pool.map


def measure(args: argparse.Namespace, s: LMSettings, device: torch.device) -> None:
    """Trains, and writes the JSON after every run."""
    first, *others = args.backends
    changed = [Run(first, change) for change in (*args.noise, *([FLOAT8] if args.float8 else []))]
    runs = [Run(first), *changed, *(Run(b) for b in others)]  # the reference last, if that is the order
    vocab = load_config(s).vocab_size
    args.output.mkdir(parents=True, exist_ok=True)
    cache = args.cache or args.output
    corpus = load_corpus(args.data, s.max_mb, s.heldout_kb, None if vocab == BYTES else vocab, s.seq_len, cache)
    with mapping(args.at_once, args.untuned) as map_runs:
        _measure(args, s, device, runs, corpus, map_runs)


def _measure(
    args: argparse.Namespace, s: LMSettings, device: torch.device, runs: list[Run], corpus: Corpus, map_runs: Map
) -> None:
    kept = finished_runs(args.output, settings_of(args, s), args.steps) if args.resume else {}
    missing = [run for run in runs if run.name not in kept]
    tried = list(dict.fromkeys(run.backend for run in missing))
    seconds = map_runs(seconds_per_step, map(Run, tried), *map(itertools.repeat, (s, corpus, device, args.cuda_graph)))
    trials = dict(zip(tried, seconds, strict=True))
    steps = plan_steps(args.steps, args.budget_s, {run: trials[run.backend] for run in missing}) if missing else {}
    most = args.steps if kept else max(steps.values())
    if most < args.steps:
        print(f"{most} steps instead of {args.steps}: --budget-s {args.budget_s:g} allows no more to the slowest run")
    s = dataclasses.replace(s, steps=most)
    parameters = sum(p.numel() for p in build(runs[0], s).parameters())
    facts = {"stamp": machine(device, args.commit), "at_once": args.at_once}
    data: dict[str, Any] = {
        "settings": settings_of(args, s), "corpus": corpus.facts, "parameters": parameters,
        "steps": most, "seconds_per_step_of_trials": trials, "runs": [],
    }  # fmt: skip
    same = map(itertools.repeat, (s, corpus, device))
    made = iter(map_runs(train, missing, *same, [steps[r] for r in missing], itertools.repeat(args.cuda_graph)))
    for run in runs:
        data["runs"].append(kept[run.name] if run.name in kept else next(made) | facts)
        (args.output / f"{NAME}.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def tokens(text: str) -> tuple[int, int]:  # what does not fit is a ValueError, which argparse explains
        rows, length = text.split("x")
        return int(rows), int(length)

    def names(text: str) -> list[str]:
        return list(dict.fromkeys(n for n in text.split(",") if n))

    parser.add_argument("--config", default=LMSettings.config, metavar="FILE", help="of the model")
    parser.add_argument("--backends", type=names, default="sm90,fla,eager", help="the first makes noise (%(default)s)")
    parser.add_argument("--noise", type=names, default="rounding", help="rounding, data, or both (%(default)s)")
    parser.add_argument("--float8", action="store_true", help="train the first in float8, too (no)")
    parser.add_argument("--steps", type=int, default=2000, help="of each run (%(default)s)")
    parser.add_argument("--budget-s", type=float, default=120, metavar="S", help="seconds of each run (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep the finished runs that --output has already")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="trainings in processes of their own (1)")
    parser.add_argument("--cuda-graph", action="store_true", help="capture the training step, on CUDA (no)")
    parser.add_argument("--untuned", action="store_true", help="take Triton's first configurations, of any speed (no)")
    parser.add_argument("--tokens", type=tokens, default="1x1024", metavar="BxT", help="of a step (%(default)s)")
    parser.add_argument("--lr", type=float, default=5e-4, help="peak learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data order (%(default)s)")
    parser.add_argument("--data", metavar="FILE", help="text to train on (what is installed with Python)")
    parser.add_argument("--max-mb", type=float, default=20.0, help="megabytes of text at most (%(default)s)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where text and tokens are kept (--output)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / NAME, help="folder (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="only make table and picture from the JSON there")
    report.add_commit_option(parser)
    args = parser.parse_args(argv)
    if not args.backends:
        parser.error("--backends must name at least one")
    if unknown := set(args.noise) - set(NOISE):
        parser.error(f"--noise must be of {' and '.join(NOISE)}, got {', '.join(sorted(unknown))}")
    if args.at_once < 1:
        parser.error(f"--at-once must be 1 or more, got {args.at_once}")
    if not args.budget_s > 0:
        parser.error(f"--budget-s must be more than 0, got {args.budget_s:g}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """1 where a loss was not finite; 2 where an option cannot be used."""
    args = parse(argv)
    if args.plot:
        show(args.plot)
        return 0
    try:
        (rows, length), device = args.tokens, torch.device(args.device)
        s = LMSettings(
            config=args.config, steps=args.steps, seq_len=length, batch_size=rows, lr=args.lr, seed=args.seed,
            max_mb=args.max_mb,
        )  # fmt: skip
        for backend in args.backends:
            with use_backend(backend):  # a name that is not known ends all here
                pass
        measure(args, s, device)
    except (InputError, ValueError) as error:
        print(f"{NAME}: error: {error}", file=sys.stderr)
        return 2
    data = show(args.output)
    return int(any(r["status"] != "finished" for r in data["runs"]))


if __name__ == "__main__":
    sys.exit(main())
