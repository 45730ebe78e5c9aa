"""Pages of docs/benchmarks/runs, and what stands between markers in README and docs, from benchmarks/results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.gpu import tables
from benchmarks.gpu.contenders import CALL
from kda_layers import versions
from kda_layers.kernels.kda.contract import KDA, Backend, Problem, default_problem
from tools.docs_figures import README_RUN, RUNS, common_lengths

ROOT = Path(__file__).parents[1]
Results = Mapping[str, Any]


def results(folder: Path = ROOT / "benchmarks" / "results") -> dict[str, Any]:
    """Return the contents of every result file by name."""
    return {path.stem: report.load(path) for path in sorted(folder.iterdir())}


# ---------------------------------------------------------------- pages

UNSEARCHED = (
    "---\nsearch:\n  exclude: true\n---\n\n"  # words of a record are found before those of the page that says it
)


def page(contents: dict[str, Any]) -> str:
    """Return the page of a result file: figure, table, stamp."""
    name = contents["name"]
    source = f"Generated from `benchmarks/results/{name}.json`."
    figure = f"\n![{contents['title']}]({name}.svg)\n" if name in RUNS else ""
    if not contents["columns"]:
        head, _, body = tables.markdown(contents).partition("\n")
        return f"{UNSEARCHED}{head}\n\n{source}\n{figure}{body}"
    return f"{UNSEARCHED}# {contents['title']}\n\n{source}\n{figure}\n{report.text(contents)}"


def index(found: Results) -> str:
    """Return the page that lists all result files."""
    lines = [f"{UNSEARCHED}# All runs", "", "| run | what was measured | device | date | commit |", "|" + " --- |" * 5]
    for name, contents in found.items():
        stamp = contents["stamp"]
        device = stamp.get("gpu") or stamp["cpu"]
        cells = (f"[{name}]({name}.md)", contents["title"], device, stamp["date"][:10], f"`{stamp['commit']}`")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- README


class Measured(NamedTuple):
    """A row of README's table: two medians in ms of one result file."""

    what: str
    device: str
    ours: float
    peer: str
    theirs: float
    name: str


def median(found: Results, name: str, **wanted: Any) -> float:
    """Return the median of the only timed row of result file `name` with these values."""
    rows = [r for r in found[name]["rows"] if r["status"] == "timed" and all(r.get(n) == v for n, v in wanted.items())]
    if len(rows) != 1:
        raise ValueError(f"{name}: expected one timed row with {wanted}, got {len(rows)}")
    return float(rows[0]["time"]["median"])


def measured(found: Results) -> list[Measured]:
    """Return README's rows."""
    fla = "flash-linear-attention"
    case: dict[str, Any] = dict(B=1, T=8192, H=32, what="", gates="slow")

    def operator(title: str, name: str, peer: str = "FLA", **wanted: Any) -> Measured:
        times = [median(found, name, contender=c, **wanted) for c in ("sm90", peer)]
        return Measured(title, "H200", times[0], fla, times[1], name)

    prefill = next(r for r in found["gpu-swap"]["rows"] if r["case"] == "prefill")
    cpu = next(r for r in found["cpu-operator"]["rows"] if (r["case"], r["T"], r["gates"]) == ("forward", 4096, "slow"))
    return [
        operator("forward, 8192 tokens, 32 heads", README_RUN, B=1, T=8192, H=32, **{"pass": "forward"}),
        operator("forward + backward, both recomputing nothing", "gpu-training-h32", peer="FLA saving more", **case),
        operator("the same, the peer recomputing, its default", "gpu-training-h32", **case),
        operator("decode step, 32 sequences, 32 heads", "gpu-decode-host", section="decode", sequences=32),
        Measured(f"Kimi-Linear, prefill of {prefill['T']} tokens, before and after the swap", "H200",
                 prefill["swapped ms"], f"stock on {fla}", prefill["stock ms"], "gpu-swap"),
        Measured(f"forward, {cpu['T']} tokens, {cpu['H']} heads, fp32", "2 CPU threads", cpu["kda_layers ms"],
                 "transformers' PyTorch", cpu["transformers ms"], "cpu-operator"),
    ]  # fmt: skip


def speed(found: Results) -> str:
    """Return README's table of measured rows."""
    return speed_of(measured(found), found)


def speed_of(rows: Iterable[Measured], found: Results) -> str:
    """Return the table of these rows; it tells of a run whose sources are in no commit."""
    lines = ["| | device | ours, ms | peer | peer, ms | ratio | run |", "|" + " --- |" * 7]
    for row in rows:
        ratio = f"{row.theirs / row.ours:.{1 if row.theirs < 10 * row.ours else 0}f}"
        times = (tables.number(row.ours), row.peer, tables.number(row.theirs))
        run = f"`{row.name}`" + (", of uncommitted sources" if is_dirty(found[row.name]) else "")
        lines.append("| " + " | ".join((row.what, row.device, *times, ratio, run)) + " |")
    return "\n".join(lines)


def is_dirty(contents: Mapping[str, Any]) -> bool:
    """True if a result file was measured with sources that are in no commit."""
    return str(contents["stamp"]["commit"]).endswith("-dirty")


def rows_apart(found: Results) -> list[Measured]:
    """Return the rows of README's table beside which its figure cannot stand: those that were measured on another GPU,
    or on the figure's at a later date."""
    figure = found[README_RUN]["stamp"]
    gpu = [(row, found[row.name]["stamp"]) for row in measured(found) if "gpu" in found[row.name]["stamp"]]
    return [row for row, s in gpu if s["gpu"] != figure["gpu"] or s["date"][:10] > figure["date"][:10]]


def figure(found: Results) -> str:
    """Return README's figure with its caption, or where it is while it cannot stand beside the table."""
    cudnn = ", cuDNN" if _with_cudnn(found) else ""
    what = f"time against length: kda_layers, flash-linear-attention{cudnn} and softmax attention"
    if apart := rows_apart(found):
        stamp = found[README_RUN]["stamp"]
        return (
            f"A figure of {what}, is in [Benchmarks](docs/benchmarks/index.md#time-against-length). It is of "
            f"{stamp['date']}, on an {stamp['gpu']}: not beside the table below, as rows of it are newer or of another "
            f"GPU: {', '.join(dict.fromkeys(f'`{row.name}`' for row in apart))}."
        )
    return f"![{what}](docs/assets/time.svg)\n\n{caption(found)}"


def caption(found: Results) -> str:
    """Return the conditions of README's figure."""
    stamp, rows = found[README_RUN]["stamp"], common_lengths(found[README_RUN]["rows"])
    timed = [r for r in rows if r["status"] == "timed"]
    called = sorted({f"{tables.label(r)} ({r['pass']} at {r['T']})" for r in timed if r["mode"] == CALL})
    how = f", except {', '.join(called)}, launched from Python" if called else ""
    activated = " cuDNN's backward takes activated inputs only: its forward + backward is of these."
    cudnn = activated if _with_cudnn(found) else " cuDNN was not measured."
    left_out = sorted({f"{r['pass']} at {r['T']}" for r in found[README_RUN]["rows"] if r not in rows})
    missing = f" Not shown: {', '.join(left_out)}, where not every contender could be measured." if left_out else ""
    return (
        f"One run on one {stamp['gpu']}, `{README_RUN}` ({stamp['date']}, commit `{stamp['commit']}`): bf16, "
        "slow-decay gates, medians with a cold L2 cache; a dot is a measured length. Every contender is replayed "
        f"from a CUDA graph{how}. Softmax attention is torch's, causal.{cudnn}{missing}"
    )


def _with_cudnn(found: Results) -> bool:
    """True if README's figure has times of cuDNN, which is a peer only where its front end is installed."""
    return any(r["contender"] == "cuDNN" and r["status"] == "timed" for r in found[README_RUN]["rows"])


def caption_alone(found: Results) -> str:
    """Return the caption of the figure where no table is beside it: with the rows of README's that are apart."""
    apart = dict.fromkeys(f"`{row.name}` ({found[row.name]['stamp']['date']})" for row in rows_apart(found))
    return caption(found) + (f" Newer, or of another GPU: {', '.join(apart)}." if apart else "")


WIDTHS = (16, 64, 100, 128, 256, 512)  # K = V that the table asks for
STAR = r"\*"  # in Markdown


def backends(_: Results) -> str:
    """Return README's table of backends, from what they declare."""
    lines = ["| backend | device | forward | training | decode |", "|" + " --- |" * 5]
    for backend in KDA.backends().values():
        archs = getattr(backend, "archs", ())
        problems = [default_problem("cpu")]
        device = "any" if "device" not in backend.serves else "CPU"
        if "device" in backend.serves and backend.serves["device"].refuses("cpu"):
            capabilities = [a.capability for a in archs] or [90]
            problems = [replace(problems[0], device="cuda", arch=c) for c in capabilities]
            device = "NVIDIA GPUs from compute capability 8.0 on"
        if archs:
            device = ", ".join(a.gpus for a in archs) + ("" if all(a.run for a in archs) else "; compiled, never run")
        uses = (dict(needs_grad=False), dict(needs_grad=True), dict(needs_grad=False, decode=True, has_state=True))
        cells = (f"`{backend.name}`", device, *(widths(backend, problems, use) for use in uses))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def widths(backend: Backend, problems: list[Problem], use: dict[str, Any]) -> str:
    """Return the widths K = V that a backend serves, "any width" or "no"; a star: not on all of its GPUs."""
    served = {K: [not backend.refusals(replace(p, K=K, V=K, **use)) for p in problems] for K in WIDTHS}
    texts = [str(K) + ("" if all(on) else STAR) for K, on in served.items() if any(on)]
    if len(texts) > 2:
        return (
            "any width"
            if len(texts) == len(WIDTHS)
            else f"K and V up to {max(K for K, on in served.items() if any(on))}"
        )
    return f"K = V = {', '.join(texts)}" if texts else "no"


def tested(_: Results) -> str:
    """Return the versions that the tests have passed with."""
    ends = {p: [".".join(v.split(".")[:2]) for v in versions.tested(p)] for p in ("torch", "transformers")}
    ranges = ", ".join(f"{package} {numbers[0]} to {numbers[-1]}" for package, numbers in ends.items())
    return f"Linux, Python 3.11 or newer. Tested with {ranges}; a newer one warns once."


BLOCKS: dict[str, dict[str, Callable[[Results], str]]] = {
    "README.md": {"versions": tested, "figure": figure, "backends": backends, "speed": speed},
    "docs/benchmarks/index.md": {"figure": caption_alone},
}


def filled(path: str, text: str, found: Results) -> str:
    """Return `text` of the page `path` with its generated blocks."""
    return with_blocks(path, text, BLOCKS[path], found)


def with_blocks(path: str, text: str, blocks: Mapping[str, Callable[[Results], str]], found: Results) -> str:
    """Return `text` of the file `path` with what stands between markers, <!-- name --> and <!-- /name -->, replaced."""
    for name, block in blocks.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"expected {begin} and {end} once in {path}")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{block(found)}\n{end}{rest.partition(end)[2]}"
    return text
