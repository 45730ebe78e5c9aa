"""Loss curves of training runs as pictures; matplotlib is optional."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.report import run_label


def figure_of(columns: int = 1) -> Any:
    """Return a figure with `columns` axes; without matplotlib print a note and return None."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture of the loss curve: matplotlib is not installed (pip install matplotlib)")
        return None
    figure = Figure(figsize=(8 if columns == 1 else 4 * columns, 4.5), layout="constrained")
    figure.subplots(1, columns)
    return figure


def plot_phases(losses: Mapping[str, Sequence[float]], labels: Mapping[str, str], path: Path) -> None:
    """Draw the losses of training phases, a panel for each.

    Args:
        losses: loss of each step, by phase.
        labels: name and unit of the loss, by phase.
        path: picture to write.
    """
    figure = figure_of(len(losses))
    if figure is None:
        return
    for axes, (phase, values) in zip(figure.axes, losses.items(), strict=True):
        axes.plot(range(1, len(values) + 1), values, color="tab:blue", linewidth=0.8)
        axes.set(xlabel="step", ylabel=labels[phase], title=phase, yscale="log")
        axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=150)


def smoothed(losses: Sequence[float]) -> tuple[list[float], int]:
    """Return the mean of the last losses for each step, and the number of losses in a mean."""
    width = max(1, len(losses) // 40)
    return [sum(losses[max(0, i - width) : i]) / min(i, width) for i in range(1, len(losses) + 1)], width


def plot_run(report: Mapping[str, Any], path: Path) -> None:
    """Draw the loss curve of a report: bits per byte of a byte-level model, otherwise nats per token."""
    figure = figure_of()
    if figure is None:
        return
    axes, is_bytes = figure.axes[0], report["settings"]["vocab"] == "byte"
    unit, scale = ("bits per byte", 1 / math.log(2)) if is_bytes else ("nats per token", 1.0)
    losses = [x * scale for x in report["losses"]]
    heldout = [h["nats_per_token"] * scale for h in report["heldout"]]
    name, baseline = "token frequencies", report["unigram_nats_per_token"] * scale
    if report["trigram_bits_per_byte"] is not None:
        name, baseline = "interpolated byte trigrams", report["trigram_bits_per_byte"]
    smooth, width = smoothed(losses)
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth, color="tab:blue", label=f"training, mean of {width} steps")
    last = f": {heldout[-1]:.3f}" if heldout else ""
    if heldout and not is_bytes:
        last += f", which is {report['heldout'][-1]['bits_per_byte']:.3f} bits per byte"
    axes.plot([h["step"] for h in report["heldout"]], heldout, "o-", color="tab:red", label=f"held-out{last}")
    axes.axhline(baseline, color="black", linestyle="--", label=f"held-out, {name}: {baseline:.3f}")
    if smooth:  # leave out the steep start, which would flatten the rest
        axes.set_ylim(min(smooth + heldout) - 0.3, max(baseline, smooth[-1]) + 1)
    axes.set(xlabel="step", ylabel=unit, title=run_label(report))
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=150)


def plot_comparison(reports: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw smoothed training losses and held-out losses of named reports against steps and against training time."""
    figure = figure_of(2)
    if figure is None:
        return
    by_step, by_time = figure.axes
    for name, report in reports.items():
        smooth, _ = smoothed(report["losses"])
        (line,) = by_step.plot(range(1, len(smooth) + 1), smooth, label=f"{name}: {run_label(report)}")
        nats = [h["nats_per_token"] for h in report["heldout"]]
        by_step.plot([h["step"] for h in report["heldout"]], nats, "o", color=line.get_color())
        by_time.plot([h["seconds"] / 60 for h in report["heldout"]], nats, "o", color=line.get_color())
        minutes = list(itertools.accumulate(w["seconds"] / 60 for w in report["windows"]))
        by_time.plot(minutes, [smooth[int(w["step"]) - 1] for w in report["windows"]], color=line.get_color())
    unigram = max(report["unigram_nats_per_token"] for report in reports.values())
    for axes, label in ((by_step, "step"), (by_time, "minutes of training")):
        axes.set_ylim(top=unigram + 1)
        axes.set(xlabel=label, ylabel="nats per token (dots: held-out)")
        axes.grid(alpha=0.3)
    by_step.legend(fontsize="x-small")
    figure.savefig(path, dpi=150)
