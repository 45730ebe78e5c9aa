"""What a finished run shows: its loss curve as a picture, and a sample with the size of its cache."""

from __future__ import annotations

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
    width = max(1, len(losses) // 40)
    smooth = [sum(losses[max(0, i - width) : i]) / min(i, width) for i in range(1, len(losses) + 1)]
    axes = figure.axes[0]
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth, color="tab:blue", label=f"training, mean of {width} steps")
    axes.plot([step for step, _ in heldout], [bits for _, bits in heldout], "o-", color="tab:red", label="held-out")
    axes.axhline(trigram, color="black", linestyle="--", label=f"held-out, interpolated byte trigrams: {trigram:.2f}")
    for step, bits in heldout[-1:]:
        axes.annotate(f"{bits:.2f}", (step, bits), (0, 8), textcoords="offset points", ha="center", color="tab:red")
    if losses:  # cut off the steep start, which would flatten the rest
        axes.set_ylim(top=min(losses[0], max(smooth[-1] + 1, 1.7 * trigram)))
    axes.set(xlabel="step", ylabel="bits per byte", title="Tiny KDA language model")
    axes.legend()
    figure.savefig(path, dpi=150)


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
