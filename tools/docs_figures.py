"""The figures of README and docs: charts of benchmarks/results, and the diagrams of docs/internals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tools import docs_svg as svg
from tools.docs_svg import BLUE, GREEN, GREY, INK, ORANGE, VIOLET, Line, Panel

Results = Mapping[str, Any]  # name -> contents of a result file

H200 = "tokens (1 sequence, 32 heads of 128, bf16)"
README_RUN = "gpu-context"


def by_length(rows: Sequence[Any], **wanted: Any) -> dict[float, float]:
    """Return {T: median ms} of the timed rows that have these values."""
    chosen = [r for r in rows if r["status"] == "timed" and all(r.get(n) == v for n, v in wanted.items())]
    found: dict[float, float] = {r["T"]: r["time"]["median"] for r in chosen}
    if not found or len(found) < len(chosen):
        raise ValueError(f"expected one timed row for each T of {wanted}, got {len(chosen)} for {len(found)} lengths")
    return dict(sorted(found.items()))


def length_panel(rows: Sequence[Any], title: str, who: Mapping[str, tuple[str, str, str]]) -> Panel:
    """Return the times of a pass in the context section; `who` maps contenders to label, color and dash."""
    there = {r["contender"] for r in rows if r.get("pass") == title and r["status"] == "timed"}
    lines = [
        Line(label, by_length(rows, section="context", contender=name, **{"pass": title}), color, dash)
        for name, (label, color, dash) in who.items()
        if name in there
    ]
    return Panel(title, H200, "ms", lines)


def common_lengths(rows: Sequence[Any]) -> list[Any]:
    """Return the rows of the lengths of a pass at which none of its contenders failed."""
    failed = {(r["pass"], r["T"]) for r in rows if r["status"] == "failed"}
    return [r for r in rows if (r["pass"], r["T"]) not in failed]


def time_against_length(results: Results) -> str:
    """README's figure: every point from one run, of the lengths at which every contender of a pass was timed."""
    rows = common_lengths(results[README_RUN]["rows"])
    who = {"sm90": ("kda_layers", BLUE, ""), "FLA": ("flash-linear-attention", ORANGE, "")}
    who |= {"cuDNN": ("cuDNN", GREEN, "5 3"), "softmax attention": ("softmax attention", GREY, "2 3")}
    panels = [length_panel(rows, title, who) for title in ("forward", "forward + backward")]
    gpu = results[README_RUN]["stamp"]["gpu"].removeprefix("NVIDIA ")
    return svg.chart(panels, f"Time against length on an {gpu}")


def cpu_operator(results: Results) -> str:
    rows = [r for r in results["cpu-operator"]["rows"] if r["case"] == "forward" and r["gates"] == "slow"]

    def lines(unit: str) -> list[Line]:
        return [
            Line(name, {r["T"]: r[f"{name} {unit}"] for r in rows if f"{name} {unit}" in r}, color)
            for name, color in (("kda_layers", BLUE), ("transformers", ORANGE))
        ]

    x = "tokens (1 sequence, 4 heads of 128, fp32)"
    panels = [Panel("forward", x, "ms", lines("ms")), Panel("peak extra memory", x, "MiB", lines("MiB"))]
    return svg.chart(panels, "Time and memory against length on a CPU")


def gpu_operator(results: Results) -> str:
    rows = results["gpu-operator"]["rows"]
    who = {"fla": ("kda_layers fla", BLUE, ""), "FLA": ("flash-linear-attention", ORANGE, "6 3")}
    who |= {"cuDNN": ("cuDNN", GREEN, "5 3"), "softmax attention": ("softmax attention", GREY, "2 3")}

    panels = [length_panel(rows, title, who) for title in ("forward", "forward + backward")]
    return svg.chart(panels, "Time against length through fla on an H200")


def long_generation(results: Results) -> str:
    rows = results["gpu-long-generation"]["rows"]
    columns = {"allocated MiB": ("allocated: weights, graph, cache", BLUE), "cache MiB": ("cache", GREEN)}
    columns |= {"softmax cache MiB": ("keys and values of softmax attention, computed", GREY)}
    lines = [
        Line(label, {r["tokens"]: r[column] for r in rows}, color, marker=False)
        for column, (label, color) in columns.items()
    ]
    panel = Panel("memory while generating", "generated tokens", "MiB", lines, log=False)
    return svg.chart([panel], "Memory while generating")


def state_dtypes(results: Results, name: str) -> str:
    """Losses of each form of states beside those of fp32, by position in a text; recall after fillers."""
    rows, colors = results[name]["rows"], (INK, BLUE, GREEN, ORANGE, VIOLET)
    forms = dict(zip(dict.fromkeys(r["states"] for r in rows), colors, strict=True))

    def lines(task: str, column: str) -> list[Line]:
        points: dict[str, dict[float, float]] = {form: {} for form in forms}
        for r in rows:
            first, _, last = r["tokens"].partition("-")
            if r["task"] == task and (task == "recall" or int(last) - int(first) < whole):
                points[r["states"]][int(last or first.split()[0])] = r[column]
        return [Line(form, points[form], color) for form, color in forms.items() if points[form]]

    whole = max(int(r["tokens"].partition("-")[2]) for r in rows if r["task"] == "text")
    panels = [Panel("held-out text", "token", "nats per token more than fp32", lines("text", "more_nats"), log=False)]
    if recall := lines("recall", "accuracy"):
        panels.append(Panel("recall", "tokens of filler", "share of right values", recall, log=False))
    return svg.chart(panels, "Task scores of recurrent states")


def training_curves(results: Results, name: str, of_what: str) -> str:
    """Smoothed losses, and their differences from the first run's over the steps that both made."""
    base, *others = results[name]["rows"]
    width = max(1, max(r["steps"] for r in (base, *others)) // 40)
    of = {r["name"]: smoothed(r["losses"], width) for r in (base, *others)}
    colors = dict(zip(of, (BLUE, VIOLET, ORANGE, GREEN), strict=False))
    losses = [Line(name, points, colors[name], marker=False) for name, points in of.items()]
    apart = [
        Line(r["name"], {n: y - of[base["name"]][n] for n, y in of[r["name"]].items()}, colors[r["name"]], marker=False)
        for r in others
    ]
    panels = [
        Panel("training loss", "step", f"nats per token, mean of {width} steps", losses, log=False),
        Panel(f"difference from {base['name']}", "step", "nats per token", apart, log=False),
    ]
    return svg.chart(panels, f"Loss curves of one training {of_what}")


def parallel(results: Results) -> str:
    """Speedups of the longest sequences that one GPU holds, and a GPU's speed where each has as many tokens."""
    timed = [r for r in results["gpu-parallel"]["rows"] if "speedup" in r]
    colors = {"operator": BLUE, "model": GREEN, "hybrid": ORANGE, "FSDP2": VIOLET, "heads": INK, "decode": GREY}

    def lines(scaling: str, column: str) -> list[Line]:
        found = []
        for what, contender in dict.fromkeys((r["what"], r["contender"]) for r in timed if r["scaling"] == scaling):
            rows = [r for r in timed if (r["what"], r["contender"], r["scaling"]) == (what, contender, scaling)]
            longest = max(r["T"] for r in rows if r["ranks"] == 1)
            points = {r["ranks"]: r[column] for r in rows if scaling == "weak" or r["T"] == longest}
            ours = contender == "ours"
            label = what if ours else f"{what}, {contender}"
            found.append(Line(label, points, colors[what], "" if ours else "5 3"))
        return found

    (tokens,) = {r["T"] for r in timed if r["scaling"] == "weak" and r["ranks"] == 1}
    strong, weak = lines("strong", "speedup"), lines("weak", "of one rank's")
    panels = [
        Panel("the same work on more GPUs", "GPUs", "times faster than one", strong, log=False),
        Panel(f"{tokens:,} tokens a GPU", "GPUs", "speed of a GPU, of one alone", weak, log=False),
    ]
    return svg.chart(panels, "Several GPUs")


def train_120m(results: Results) -> str:
    run = results["gpu-train-120m-fla"]
    heldout = {e["step"]: e["nats_per_token"] for e in run["rows"]}
    losses = smoothed(run["details"]["losses"], 20)
    lines = [Line("training", losses, BLUE, marker=False), Line("held out", heldout, ORANGE)]
    return svg.chart([Panel("five minutes of training", "step", "nats per token", lines, log=False)], "Loss curve")


def smoothed(losses: Sequence[float], width: int) -> dict[float, float]:
    """Return {step: mean of the `width` losses up to it}, for every tenth step."""
    return {n: sum(losses[n - width : n]) / width for n in range(width, len(losses) + 1) if n % 10 == 0}


# ---------------------------------------------------------------- diagrams

LEVELS = {8: "#cfe3fb", 4: "#d6f0dd", 2: "#fbe2cf", 1: "#e9dcfb"}


def binary_anchoring(_: Results) -> str:
    """The pairs (i, j) of 16 tokens by the level that handles them, and one block's two factors."""
    n, cell, x0, y0 = 16, 20.0, 70.0, 74.0
    parts = [svg.text(x0, 26, "which anchor serves the pair (i, j)", 14, font_weight="bold")]
    parts.append(svg.text(x0 + n * cell / 2, y0 - 22, "writing token j", 12, "middle", GREY))
    parts.append(svg.text(x0 - 30, y0 + n * cell / 2, "reading token i", 12, "middle", GREY,
                          transform=f"rotate(-90 {x0 - 30:.1f} {y0 + n * cell / 2:.1f})"))  # fmt: skip
    for i, j in itertools.product(range(n), range(n)):
        half = 1 << ((i ^ j).bit_length() - 1) if i > j else 0
        fill = LEVELS[half] if half else "#f6f8fa" if i < j else "#ffffff"
        parts.append(svg.rect(x0 + j * cell, y0 + i * cell, cell, cell, fill, svg.GRID))
    for half in LEVELS:
        for start in range(0, n, 2 * half):
            x, y = x0 + start * cell, y0 + (start + half) * cell
            parts.append(svg.rect(x, y, half * cell, half * cell, "none", INK))
            if half > 1:
                parts.append(svg.text(x + half * cell / 2, y + half * cell / 2 + 4, f"{start + half}", 11 + half / 2,
                                      "middle"))  # fmt: skip
    for i in range(0, n, 4):
        parts.append(svg.text(x0 + (i + 0.5) * cell, y0 - 6, str(i), 10, "middle", GREY))
        parts.append(svg.text(x0 - 6, y0 + (i + 0.7) * cell, str(i), 10, "end", GREY))
    y = y0 + n * cell + 28
    for k, half in enumerate(LEVELS):
        parts.append(svg.rect(x0 + k * 88, y - 11, 14, 14, LEVELS[half], INK))
        parts.append(svg.text(x0 + k * 88 + 20, y, f"h = {half}", 12))
    return svg.figure(900, 460, [*parts, *_two_factors(480.0)], "Binary anchoring")


def _two_factors(x0: float) -> list[str]:
    """One pair, j = 2 and i = 13, at its anchor 8: both factors decay away from the write and towards the read."""
    n, cell, y0, anchor, j, i = 16, 23.0, 176.0, 8, 2, 13
    middle = lambda token: x0 + (token + 0.5) * cell  # noqa: E731
    parts = [svg.text(x0, 26, "one pair, j = 2 and i = 13, meets at anchor 8", 14, font_weight="bold")]
    for t in range(n):
        parts.append(svg.rect(x0 + t * cell, y0, cell, cell, LEVELS[8] if j < t <= i else "#ffffff", svg.GRID))
        parts.append(svg.text(middle(t), y0 + 16, str(t), 11, "middle", INK if t in (i, j) else GREY))
    edge = x0 + anchor * cell
    parts.append(svg.path([(edge, y0 - 60), (edge, y0 + cell + 60)], INK, 1.4, "4 3"))
    parts.append(svg.text(edge, y0 - 68, "anchor", 12, "middle"))
    parts.append(svg.path([(middle(j), y0 - 18), (edge - 4, y0 - 18)], GREY, 2, arrow=True))
    parts.append(svg.text(edge - 8, y0 - 28, "writer: decays of 3 .. 7", 12, "end"))
    parts.append(svg.path([(edge + 4, y0 + cell + 18), (middle(i), y0 + cell + 18)], GREY, 2, arrow=True))
    parts.append(svg.text(edge + 8, y0 + cell + 38, "reader: decays of 8 .. 13", 12))
    notes = (
        "Each factor is a product of decays, so it lies in [0, 1].",
        "No exponent is ever positive: nothing overflows.",
        "No sums are subtracted: nothing cancels.",
        "A token has one factor for each level: 16 tokens, 4 levels.",
    )
    return parts + [svg.text(x0, y0 + cell + 88 + 22 * k, note, 12.5) for k, note in enumerate(notes)]


def architecture(_: Results) -> str:
    """Boxes from a model's call down to a kernel's launch."""
    parts: list[str] = []

    def box(x: float, y: float, w: float, title: str, lines: Sequence[str], fill: str) -> None:
        parts.append(svg.rect(x, y, w, 26 + 17 * len(lines), fill, GREY, 5))
        parts.append(svg.text(x + 12, y + 19, title, 13, font_weight="bold"))
        parts.extend(svg.text(x + 12, y + 37 + 17 * k, line, 12) for k, line in enumerate(lines))

    def down(x: float, y: float, to: float, label: str = "") -> None:
        parts.append(svg.path([(x, y), (x, to - 2)], GREY, 1.6, arrow=True))
        if label:
            parts.append(svg.text(x + 8, (y + to) / 2 + 4, label, 11.5, color=GREY))

    blue, green, orange = "#eaf3fe", "#eaf7ee", "#fdf1e7"
    box(20, 16, 270, "your model", ("KDAForCausalLM, converted Llama, ...",), blue)
    box(310, 16, 270, "a stock transformers model", ("swap_attention: Kimi-Linear, GLM, ...",), blue)
    box(600, 16, 270, "your own code", ("kda(), kda_step(), fla_api",), blue)
    box(20, 112, 560, "layer", ("projections, short convolution, operator, gated norm, output projection",), blue)
    down(155, 59, 112)
    down(445, 59, 112)
    down(300, 155, 208, "q, k, v, gate and beta logits")
    down(735, 59, 208)
    box(20, 208, 850, "operator", (
        "validate every argument once; errors name argument, expected, got",
        "Problem -> registry: first backend that serves it, memoised; explain() lists every reason",
        "torch op: boundary of autograd and torch.compile; residuals are opaque to everyone but the backend",
    ), green)  # fmt: skip
    for x, label in ((155, "any device"), (445, "CUDA"), (735, "CUDA")):
        down(x, 285, 330, label)
    box(20, 330, 270, "eager", ("PyTorch, chunks of 64", "any dtype, any widths"), orange)
    box(310, 330, 270, "fla", ("flash-linear-attention's", "Triton kernels"), orange)
    box(600, 330, 270, "cuda: sm90, sm100, sm80, sm120", ("forward, backward, decode", "CUDA C++ by NVRTC"), orange)
    return svg.figure(890, 410, parts, "From a model's call to a kernel")


COMMITTED: dict[str, Callable[[Results], str]] = {
    "docs/assets/time.svg": time_against_length,
    "docs/assets/architecture.svg": architecture,
    "docs/assets/binary_anchoring.svg": binary_anchoring,
}
CURVES = {"gpu-training-curves": "by three backends", "gpu-training-curves-float8": "in bf16 and float8"}
RUNS: dict[str, Callable[[Results], str]] = {  # beside the page of the result file
    "cpu-operator": cpu_operator,
    "gpu-operator": gpu_operator,
    "gpu-long-generation": long_generation,
    "gpu-parallel": parallel,
    "gpu-train-120m-fla": train_120m,
    **{n: partial(state_dtypes, name=n) for n in ("cpu-state-dtypes", "gpu-state-dtypes", "gpu-state-dtypes-recall")},
    **{name: partial(training_curves, name=name, of_what=what) for name, what in CURVES.items()},
}
