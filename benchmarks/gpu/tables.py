"""The report that a person reads: a Markdown table for each section, and what was not timed and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from benchmarks.gpu.contenders import CALL
from benchmarks.gpu.harness import EVERY_ONE, RESULT, Row
from benchmarks.gpu.kernel_shares import KINDS
from benchmarks.gpu.peers import SOFTMAX
from benchmarks.timing import AGREE

ABOUT = {
    "forward": "Forward pass of the operator: bf16, K = V = 128, raw logits in, no initial state. ms.",
    "packed": "The same over short and uneven sequences, packed in one row. ms.",
    "cudnn_shapes": "The same with an initial state, over the shapes that cuDNN's front end publishes times of. ms.",
    "segments": "The same over long sequences of few heads, in one piece and cut into segments. ms.",
    "training": "Forward and every gradient of the operator. ms.",
    "backward": "Every gradient, from a forward that kept what it likes and is not timed. ms.",
    "gdn_forward": "Forward pass of gated delta nets: one gate a head, raw logits in. FlashQLA and cuDNN take applied "
    "gates and beta, which are not timed; their norms are. ms.",
    "gdn_training": "Forward and every gradient of gated delta nets. FlashQLA and cuDNN take applied gates and "
    "beta, and return their gradients. ms.",
    "gdn_decode": "One token for each sequence of gated delta nets, and of KDA with as many heads. ms.",
    "decode": "One token for each sequence, states of 128 x 128, in fp32 unless a name says otherwise. ms; the floor "
    "reads and writes every state, in the table's column fp32 ones.",
    "host": "Host microseconds of a call from Python, at a size at which the GPU does not hold the host up.",
    "hard": "Relative L2 error against the fp64 recurrence where fast kernels have been wrong; nothing is timed.",
    "hard_gradients": "The same of every gradient, on the same inputs.",
    "context": "The operator with slow gates and torch's causal attention on the same q, k, v. ms. cuDNN's "
    "backward takes activated inputs only.",
    "overhead": "Our operator over flash-linear-attention's kernels against its function: GPU ms, host us per call.",
    "layer": "The layer in bf16: time, and percent of GPU time by what launched the kernels; goal: rest at most 15 %.",
    "model": "The language model in bf16. MFU: 6 flop a parameter and token, of 989 Tflop/s. Decoding: one greedy "
    "step; the softmax model's cache is full.",
}
IN_TURNS = (
    'Times of the operator are of replayed CUDA graphs, except where a cell says "called". Contenders take turns, in '
    f"rotated order, in two passes; a cell whose passes differ by more than {AGREE:.0%} says so."
)
# Of runs older than commit d106b2c.
CALLED_ALONE = "Contenders follow one another, from Python unless a mode says otherwise: short times are host-bound."
CASE_COLUMNS = {
    "forward": ("B", "T", "H", "what", "gates"),
    "packed": ("B", "T", "H", "what", "gates"),
    "cudnn_shapes": ("B", "T", "H", "what", "gates"),
    "segments": ("B", "T", "H", "what", "gates"),
    "training": ("B", "T", "H", "what", "gates"),
    "backward": ("B", "T", "H", "what", "gates"),
    "gdn_forward": ("B", "T", "H", "what", "gates"),
    "gdn_training": ("B", "T", "H", "what", "gates"),
    "gdn_decode": ("sequences", "H", "what"),
    "decode": ("sequences", "H"),
    "host": ("pass", "B", "T", "H"),
    "hard": ("input", "T", "H"),
    "hard_gradients": ("input", "T", "H"),
    "context": ("pass", "B", "T", "H"),
    "overhead": ("pass", "measure", "B", "T", "H"),
    "layer": ("pass", "mode", "B", "T", "width", "H"),
    "model": ("what", "model", "batch", "context", "mode"),
}
LISTED = {  # sections with a row for each contender, and the columns that follow
    "layer": ("ms", "MiB", "GPU ms", *(f"{kind} %" for kind in KINDS), "goal"),
    "model": ("ms", "tokens/s", "MFU %", "GPU ms", *(f"{kind} %" for kind in KINDS), "cache MiB", "MiB"),
}


def markdown(contents: dict[str, Any]) -> str:
    """Return the report of a result file's contents (benchmarks/README.md)."""
    rows: list[Row] = contents["rows"]
    parts = [f"# {contents['title']}", "", ", ".join(f"{k} {v}" for k, v in contents["stamp"].items()), ""]
    how = CALLED_ALONE
    if any("passes" in r.get("time", {}) for r in rows):
        how = IN_TURNS
    parts += [
        "Cells: median (first to last decile of the calls), times the byte floor, peak extra memory. Cold L2. "
        f"Every time is of a result that was right. {how}"
    ]
    for section in dict.fromkeys(r["section"] for r in rows):
        parts += ["", *_section(section, [r for r in rows if r["section"] == section])]
    return "\n".join(parts) + "\n"


def _section(section: str, rows: list[Row]) -> list[str]:
    columns = CASE_COLUMNS[section]
    if len({(*_case(r, columns), label(r)) for r in rows}) < len(rows):
        columns += ("mode",)
    table = _listing(rows, columns, LISTED[section]) if section in LISTED else _pivot(rows, columns)
    lines = crossovers(rows) if section == "context" else []
    lines += _noise(rows) + _errors(rows) + _not_timed(rows, columns)
    return [f"## {section}", "", ABOUT[section], "", *table, *_list(lines)]


def _case(r: Row, columns: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(r.get(c, "") for c in columns)


def _list(lines: list[str]) -> list[str]:
    return ["", *(f"- {line}" for line in lines)] if lines else []


def _table(header: Iterable[str], body: Iterable[Iterable[str]]) -> list[str]:
    header = list(header)
    lines = [header, ["---"] * len(header), *(list(cells) for cells in body)]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _pivot(rows: list[Row], columns: tuple[str, ...]) -> list[str]:
    """A line for each case, a column for each contender."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for r in rows:
        cases.setdefault(_case(r, columns), {})[label(r)] = r
    names = dict.fromkeys(label(r) for r in rows if r["contender"] != EVERY_ONE)
    floors = any("floor ms" in r for r in rows)
    body = []
    for case, found in cases.items():
        floor = [number(next((r["floor ms"] for r in found.values() if "floor ms" in r), ""))] if floors else []
        body.append([*map(str, case), *floor, *(_cell(found.get(n)) for n in names)])
    return _table([*columns, *(["floor"] if floors else []), *names], body)


def _listing(rows: list[Row], columns: tuple[str, ...], values: tuple[str, ...]) -> list[str]:
    """A line for each contender of each case."""
    values = tuple(v for v in values if v == "ms" or any(v in r for r in rows))
    body = [
        [
            *(str(r.get(c, "")) for c in columns),
            label(r),
            _cell(r, in_list=True),
            *(number(r.get(v, "")) for v in values[1:]),
        ]
        for r in rows
        if r["contender"] != EVERY_ONE
    ]
    return _table([*columns, "contender", *values], body)


def label(r: Row) -> str:
    """The contender's name for readers: ours say so, as one of our backends has nearly a peer's name."""
    return f"kda_layers {r['contender']}" if r["ours"] and r["contender"] != EVERY_ONE else r["contender"]


def _cell(r: Row | None, in_list: bool = False) -> str:
    if r is None:
        return ""
    if r["status"] == "wrong":
        return f"**WRONG** {_error_values(r)}"
    if "more us" in r:
        return f"{r['more us']:+.1f} us, {r['more percent']:+.1f} %"
    if "time" not in r:
        return _error_values(r) if r["status"] == "right" else r["status"]
    t = r["time"]
    floor = f", {r['times floor']:.3g}x" if "times floor" in r else ""
    memory = f", {r['MiB']:.0f} MiB" if not in_list and "MiB" in r else ""
    called = ", called" if not in_list and r.get("mode") == CALL else ""
    passes = "" if t.get("agree", True) else ", **passes differ:** " + " / ".join(number(m) for m in t["passes"])
    return f"{number(t['median'])} ({number(t['p10'])} - {number(t['p90'])}){floor}{memory}{called}{passes}"


def _error_values(r: Row) -> str:
    return ", ".join(f"{n} {e:.2g}" for n, e in r["errors"].items())


def number(value: Any) -> str:
    """Three digits of a float, none after the point from 100 on; anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _noise(rows: list[Row]) -> list[str]:
    """Return a line on the largest difference between the medians of a contender that took part twice."""
    apart = [abs(r["time"]["again"] / r["time"]["median"] - 1) for r in rows if "again" in r.get("time", {})]
    return [f"one contender entered twice: medians at most {max(apart):.1%} apart"] if apart else []


def _errors(rows: list[Row]) -> list[str]:
    """The largest errors of each contender that was timed."""
    worst: dict[str, dict[str, float]] = {}
    for r in rows:
        if r["status"] == "timed":
            found = worst.setdefault(label(r), {})
            for n, e in r["errors"].items():
                found[n] = max(e, found.get(n, 0.0))
    return [f"largest errors, {who}: " + ", ".join(f"{n} {e:.2g}" for n, e in es.items()) for who, es in worst.items()]


def _not_timed(rows: list[Row], columns: tuple[str, ...]) -> list[str]:
    """Who has no result where, and why; equal reasons together. And notes on those who have."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    entered: Counter[str] = Counter()
    for r in rows:
        who = label(r)
        entered[who] += 1
        case = "/".join(str(r[c]) for c in columns if r.get(c, "") != "")
        if r["status"] not in RESULT:
            cases.setdefault((who, r["status"], r["reason"]), []).append(case)
        for note in (n for n in ("note", "reason") if n in r and r["status"] in RESULT):
            cases.setdefault((who, "note", r[note]), []).append(case)
    return [
        f"{who}, {status} {_where(where, entered[who])}: {why}" for (who, status, why), where in cases.items()
    ]  # fmt: skip


def _where(cases: list[str], of: int) -> str:
    return f"in all {of} cases" if len(cases) == of > 1 else f"at {', '.join(cases)}"


# ---------------------------------------------------------------- where the operator overtakes softmax attention


def crossover(T: list[int], ours: list[float], other: list[float]) -> float | None:
    """The T from which ours takes less time at every longer T measured, interpolated where the logarithms of T and of
    the ratio of times cross; the first T if ours always does, None if it does not at the last."""
    if not len(T) == len(ours) == len(other) or not T or sorted(T) != T:
        raise ValueError(f"T must ascend and have a time of each, got T = {T}, {len(ours)} and {len(other)} times")
    ratios = [math.log(a / b) for a, b in zip(ours, other, strict=True)]
    slower = [i for i, ratio in enumerate(ratios) if ratio >= 0]
    if not slower:
        return float(T[0])
    last = slower[-1]
    if last == len(T) - 1:
        return None
    part = ratios[last] / (ratios[last] - ratios[last + 1])
    return math.exp(math.log(T[last]) + part * math.log(T[last + 1] / T[last]))


def crossovers(rows: list[Row]) -> list[str]:
    """For each pass and contender, from which T it is faster than softmax attention."""
    lines = []
    for pass_ in dict.fromkeys(r["pass"] for r in rows):
        times = medians(rows, pass_)
        softmax = times.pop(SOFTMAX, {})
        for name, by_T in times.items():
            shared = sorted(by_T.keys() & softmax.keys())
            if not shared:
                continue
            found = crossover(shared, [by_T[T] for T in shared], [softmax[T] for T in shared])
            said = "at no T measured" if found is None else f"from T = {found:.0f}"
            said += ", the shortest measured" if found == shared[0] else ""
            lines.append(f"{pass_}: {name} is faster than softmax attention {said}")
    return lines


def medians(rows: list[Row], pass_: str) -> dict[str, dict[int, float]]:
    """{contender: {T: median}} of the context section's timed rows of a pass."""
    found: dict[str, dict[int, float]] = {}
    for r in rows:
        if r["section"] == "context" and r["pass"] == pass_ and r["status"] == "timed":
            found.setdefault(label(r), {})[r["T"]] = r["time"]["median"]
    return found
