"""What a finished run shows: its loss curve as a picture, and a sample with the size of its cache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def figure_of(columns: int = 1) -> Any:
    """A figure with so many columns of axes, or None, said so, without matplotlib, which is optional."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture of the loss curve: matplotlib is not installed (pip install matplotlib)")
        return None
    figure = Figure(figsize=(8 if columns == 1 else 4 * columns, 4.5), layout="constrained")
    figure.subplots(1, columns)
    return figure


def plot_phases(losses: Mapping[str, Sequence[float]], labels: Mapping[str, str], path: Path) -> None:
    """Draws the losses of training phases side by side.

    Args:
        losses: of each step, by phase.
        labels: what the loss of a phase is.
        path: of the picture.
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
    """For each step the mean of the last ones, and of how many."""
    width = max(1, len(losses) // 40)
    return [sum(losses[max(0, i - width) : i]) / min(i, width) for i in range(1, len(losses) + 1)], width


def plot_training(axes: Any, losses: Sequence[float]) -> list[float]:
    """Draws the losses of steps, raw and smoothed; returns the smoothed ones."""
    smooth, width = smoothed(losses)
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth, color="tab:blue", label=f"training, mean of {width} steps")
    return smooth


def plot(losses: Sequence[float], heldout: Sequence[tuple[int, float]], trigram: float, path: Path) -> None:
    """Draws the loss curve in bits per byte; without matplotlib, which is optional, says so.

    Args:
        losses: of each training step.
        heldout: (step, bits per held-out byte).
        trigram: bits per held-out byte of the trigram model.
        path: of the picture.
    """
    figure = figure_of()
    if figure is None:
        return
    axes = figure.axes[0]
    smooth = plot_training(axes, losses)
    axes.plot([step for step, _ in heldout], [bits for _, bits in heldout], "o-", color="tab:red", label="held-out")
    axes.axhline(trigram, color="black", linestyle="--", label=f"held-out, interpolated byte trigrams: {trigram:.2f}")
    for step, bits in heldout[-1:]:
        axes.annotate(f"{bits:.2f}", (step, bits), (0, 8), textcoords="offset points", ha="center", color="tab:red")
    if losses:  # cut off the steep start, which would flatten the rest
        axes.set_ylim(top=min(losses[0], max(smooth[-1] + 1, 1.7 * trigram)))
    axes.set(xlabel="step", ylabel="bits per byte", title="Tiny KDA language model")
    axes.legend()
    figure.savefig(path, dpi=150)


def plot_run(report: Mapping[str, Any], path: Path) -> None:
    """Draws the loss curve of a report of train_lm.py in nats per token."""
    figure = figure_of()
    if figure is None:
        return
    axes, heldout, unigram = figure.axes[0], report["heldout"], report["unigram_nats_per_token"]
    smooth = plot_training(axes, report["losses"])
    steps, nats = [h["step"] for h in heldout], [h["nats_per_token"] for h in heldout]
    last = f": {nats[-1]:.3f}, which is {heldout[-1]['bits_per_byte']:.3f} bits per byte" if heldout else ""
    axes.plot(steps, nats, "o-", color="tab:red", label=f"held-out{last}")
    axes.axhline(unigram, color="black", linestyle="--", label=f"held-out, token frequencies: {unigram:.3f}")
    if smooth:  # cut off the steep start, which would flatten the rest
        axes.set_ylim(min(smooth + nats) - 0.3, max(unigram, smooth[-1]) + 1)
    axes.set(xlabel="step", ylabel="nats per token", title=run_label(report))
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=150)


def plot_comparison(reports: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draws smoothed training losses and held-out losses of named reports against steps and against training time."""
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


def run_label(report: Mapping[str, Any]) -> str:
    """A report of train_lm.py in a few words: model, backend, speed."""
    rate = report["tokens_per_s"]
    speed = f", {rate['median']:,.0f} tokens/s" if rate else ""
    return f"{Path(report['settings']['config']).stem}, {report['backend']['serves']}{speed}"


def run_table(report: Mapping[str, Any]) -> str:
    """The result of a report of train_lm.py, as a Markdown table of one row."""
    rate, mfu, heldout = report["tokens_per_s"], report["mfu"], report["heldout"]
    s, machine = report["settings"], report["machine"]
    cells = {
        "model": f"{Path(s['config']).stem}, {report['parameters']:,} parameters",
        "KDA backend": report["backend"]["serves"] + (", compiled" if report["compiled"] else ""),
        "machine": f"{machine.get('gpu', machine['cpu'])}, torch {machine['torch']}",
        "batch": f"{s['batch_size']} x {s['seq_len']}, {s['dtype']}",
        "steps": f"{report['steps']:,}",
        "tokens": f"{report['tokens'] / 1e6:,.2f} M ({report['epochs']:.2f} epochs)",
        "tokens/s": f"{rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f})" if rate else "not timed",
        "MFU": f"{100 * mfu:.1f}% of {report['peak_tflops']:g} TFLOP/s" if mfu is not None else "no peak known",
        "held-out nats/token": f"{heldout[-1]['nats_per_token']:.3f}" if heldout else "not evaluated",
        "held-out bits/byte": f"{heldout[-1]['bits_per_byte']:.3f}" if heldout else "not evaluated",
    }
    return "\n".join(
        ("| " + " | ".join(cells) + " |", "|" + " --- |" * len(cells), "| " + " | ".join(cells.values()) + " |")
    )


def cache_bytes(cache: Any) -> int:
    """Bytes that the KDA layers hold: the state of the recurrence and the last inputs of the convolutions."""
    states = [s for layer in cache.layers for s in (*layer.conv_states.values(), *layer.recurrent_states.values())]
    return sum(s.nbytes for s in states)


def sample(model: Any, prompt: bytes, length: int) -> None:
    """Prints `prompt` continued by 2 * `length` bytes, the speed, and the cache's size halfway and at the end."""
    ids = torch.tensor([list(prompt)], device=model.device)
    cache, sizes = None, []
    began = time.perf_counter()
    for _ in range(2):
        out = model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=length,
            do_sample=True,
            temperature=0.8,
            top_k=40,
            return_dict_in_generate=True,
        )
        ids, cache = out.sequences, out.past_key_values
        sizes.append(cache_bytes(cache))
    rate = 2 * length / (time.perf_counter() - began)
    print(f"--- sample\n{bytes(ids[0].tolist()).decode(errors='replace')}\n---")
    print(f"{rate:,.0f} tokens/s; cache: {sizes[0]:,} bytes after {length} tokens, {sizes[1]:,} after {2 * length}")
