"""README and docs beside what they describe: figures, code, public names, behaviour."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import kda_layers
from kda_layers import KimiDeltaAttention, kda, versions
from kda_layers.kernels import fla_api, reference
from tests.test_makefile import dry_run, needs_make
from tools import docs, docs_figures, docs_svg, docs_tables

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted(p for p in (ROOT / "docs").rglob("*.md") if docs.RUNS not in p.relative_to(ROOT).parents)
TEXTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES, ROOT / "examples" / "quickstart.py"]
PUBLIC: dict[str, Any] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (kda_layers, *(getattr(kda_layers, name) for name in kda_layers._SUBMODULES), fla_api)
    for name in module.__all__
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---------------------------------------------------------------- promises


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_no_promise_that_does_not_hold(path: Path) -> None:
    text = " ".join(path.read_text().split())
    assert "drop-in" not in text
    assert not re.search(r"exactly the greedy|give the greedy tokens(?!, up to ties)", text)
    assert not re.search(r"pip install '?kda_layers", text)


def test_the_layer_has_the_same_shapes_in_and_out_but_not_the_call_of_attention() -> None:
    """README sends models to `swap_attention`: transformers' slots pass positions and want a pair back."""
    layer, x = KimiDeltaAttention(32, 2, 16), torch.randn(1, 5, 32)
    assert layer(x).shape == x.shape
    with pytest.raises(TypeError, match="position_ids"):
        layer(x, position_ids=torch.arange(5)[None])


def test_what_a_bad_token_reaches_is_documented() -> None:
    """The behaviour: tests/kernels/test_not_finite.py."""
    text = " ".join(str(kda.__doc__).split())
    assert "NaN and inf" in text
    assert "chunk of 64 tokens" in text
    assert "recurrence" in text
    assert "first" in " ".join(str(reference.recurrence.__doc__).split())


def test_the_tested_versions_begin_with_the_lower_bounds_and_hold_the_pins() -> None:
    """README's line is generated from them."""
    bounds = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pins = (ROOT / "constraints.txt").read_text()
    for package in ("torch", "transformers"):
        lowest = re.search(rf"'{package}>=([\d.]+)[',]", str(bounds))
        pinned = re.search(rf"^{package}==(\d+\.\d+)", pins, re.M)
        assert lowest
        assert pinned
        tested = [".".join(version.split(".")[:2]) for version in versions.tested(package)]
        assert tested[0] == lowest[1]
        assert pinned[1] in tested


# ---------------------------------------------------------------- figures


@needs_make
@pytest.mark.parametrize("target", ["demo", "test"])
def test_readme_names_two_commands_that_set_up_what_they_need(target: str) -> None:
    assert f"\nmake {target} " in README.read_text()
    commands = dry_run(target)
    assert "-m venv .venv" in commands
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in commands  # without an NVIDIA GPU
    assert re.search(r'\.venv/bin/pip install .* -e "\.\[', commands)


def test_readme_takes_two_minutes() -> None:
    assert len(README.read_text().splitlines()) <= 120


@pytest.mark.parametrize("path", docs.committed(), ids=str)
def test_what_is_generated_is_as_the_script_writes_it(path: Path) -> None:
    """After a change: `python -m tools.docs`."""
    assert (ROOT / path).read_text() == docs.committed()[path]


def test_another_time_gives_another_readme() -> None:
    found = docs_tables.results()
    for row in found["gpu-training-h32"]["rows"]:
        if "time" in row:
            row["time"] = row["time"] | {"median": 2 * row["time"]["median"]}
    assert docs_tables.filled("README.md", README.read_text(), found) != README.read_text()


@pytest.mark.parametrize("path", [README, *(p for p in PAGES if "internals" not in p.parts)], ids=name_of)
def test_a_text_states_no_measured_figure_of_its_own(path: Path) -> None:
    """Outside of generated blocks. Internals hold dated records."""
    text = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->|```.*?```", "", path.read_text(), flags=re.S)
    assert not re.findall(r"\d[\d.,]* ?(?:%|x faster|(?:ms|us|s|times|fold|MiB|GiB|MB|tokens/s)\b)", text)


def commit_time(commit: str) -> int | None:
    """The time of a commit; None where git does not know it."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct", commit.removesuffix("-dirty")]
    done = subprocess.run(command, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip() else None


def test_no_figure_stands_beside_rows_that_are_newer() -> None:
    """Rows on a GPU have its GPU and no later date; of one day no later commit, where git knows both; and where
    both show the same, training at 8192 tokens, times that differ by at most a tenth."""
    found = docs_tables.results()
    shown, apart = "docs/assets/time.svg" in README.read_text(), docs_tables.rows_apart(found)
    assert shown == (not apart), [row.name for row in apart]
    figure = found[docs_figures.README_RUN]
    for row in docs_tables.measured(found) if shown else ():
        stamp = found[row.name]["stamp"]
        times = [commit_time(s["commit"]) for s in (figure["stamp"], stamp)]
        if "gpu" in stamp and stamp["date"] == figure["stamp"]["date"] and all(times):
            assert times[0] >= times[1], f"{docs_figures.README_RUN} is of an older commit than {row.name}"
        if row.name == "gpu-training-h32":
            ours = docs_figures.by_length(figure["rows"], contender="sm90", **{"pass": "forward + backward"})
            assert ours[8192] == pytest.approx(row.ours, rel=0.1)


@pytest.mark.parametrize("change", [{"date": "2999-01-01"}, {"gpu": "NVIDIA Another"}], ids=lambda c: next(iter(c)))
def test_a_figure_leaves_the_table_and_returns_when_it_is_run_again(change: dict[str, str]) -> None:
    found = docs_tables.results()
    figure, row = (found[name]["stamp"] for name in (docs_figures.README_RUN, "gpu-training-h32"))
    figure["date"] = max(found[r.name]["stamp"]["date"] for r in docs_tables.measured(found))
    beside = docs_tables.filled("README.md", README.read_text(), found)
    assert "](docs/assets/time.svg)" in beside
    assert len(beside.splitlines()) <= 120
    row.update(change)
    without = docs_tables.filled("README.md", README.read_text(), found)
    assert "time.svg" not in without
    assert f"It is of {figure['date']}, on an NVIDIA H200" in without
    assert "GPU: `gpu-training-h32`." in without


def test_both_ratios_of_training_are_told() -> None:
    """The peer's backward recomputes by default, ours does not at this size."""
    rows = [row for row in docs_tables.measured(docs_tables.results()) if row.name == "gpu-training-h32"]
    assert ["recomputing nothing" in row.what for row in rows] == [True, False]
    assert rows[0].ours == rows[1].ours
    assert rows[0].theirs < rows[1].theirs


# Measured before this was checked. A run of one of these again, from a commit, takes it off the list.
UNCOMMITTED = {"cpu-swap", "gpu-layer-model"}


def test_results_are_of_commits() -> None:
    found = docs_tables.results()
    assert {name for name, contents in found.items() if docs_tables.is_dirty(contents)} == UNCOMMITTED
    for row in docs_tables.measured(found):
        told = f"`{row.name}`, of uncommitted sources" in README.read_text()
        assert told == docs_tables.is_dirty(found[row.name])


def colors(text: str, attribute: str) -> set[str]:
    return set(re.findall(rf'{attribute}="(#\w+)"', text))


def luminance(color: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("path", docs_figures.COMMITTED, ids=str)
def test_figures_have_colors_for_a_dark_ground(path: str) -> None:
    text = (ROOT / path).read_text()
    style = re.search(r"<style>@media \(prefers-color-scheme: dark\) \{(.*)\}</style>", text)
    assert style
    for attribute in ("fill", "stroke"):
        assert colors(text, attribute) <= docs_svg.DARK.keys()
        for light in colors(text, attribute):
            assert f'[{attribute}="{light}"]{{{attribute}:{docs_svg.DARK[light]}}}' in style[1]
    dark = luminance(docs_svg.DARK[docs_svg.WHITE])
    for light in colors("".join(re.findall("<text .*", text)), "fill"):
        assert (luminance(docs_svg.DARK[light]) + 0.05) / (dark + 0.05) >= 4.5


def test_missing_and_ambiguous_rows_are_named() -> None:
    found = docs_tables.results()
    with pytest.raises(ValueError, match=r"gpu-training: expected one timed row with .*'T': 3.*, got 0"):
        docs_tables.median(found, "gpu-training", contender="sm90", T=3)
    with pytest.raises(ValueError, match="got "):
        docs_tables.median(found, "gpu-training", contender="sm90")
    with pytest.raises(
        ValueError, match=r"expected <!-- figure --> and <!-- /figure --> once in docs/benchmarks/index\.md"
    ):
        docs_tables.filled("docs/benchmarks/index.md", "no markers", found)


def test_every_result_has_a_page_with_its_figures() -> None:
    files = docs.runs()
    for name, contents in docs_tables.results().items():
        text = files[docs.RUNS / f"{name}.md"]
        assert text.removeprefix(docs_tables.UNSEARCHED).startswith(f"# {contents['title']}\n")
        assert contents["stamp"]["commit"] in text
        assert f"]({name}.md)" in files[docs.RUNS / "index.md"]
        assert (f"]({name}.svg)" in text) == (docs.RUNS / f"{name}.svg" in files)
    times = docs_tables.results()["cpu-operator"]["rows"][0]
    row = f"| forward | 1 | 1024 | 4 | slow | {times['kda_layers ms']:.3g} | {times['transformers ms']:.3g} |"
    assert row in files[docs.RUNS / "cpu-operator.md"]


def test_a_file_that_was_edited_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in docs.committed():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((ROOT / path).read_text())
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    assert docs.main(["--check"]) == 0
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text().replace("| H200 |", "| H100 |"))
    assert docs.main(["--check"]) == 1
    assert capsys.readouterr().err == "README.md: not as generated; run `python -m tools.docs`\n"
    assert docs.main([]) == 0
    assert readme.read_text() == README.read_text()


# ---------------------------------------------------------------- reference and links


def test_every_public_name_has_one_entry() -> None:
    entries = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]
    assert sorted(entries) == sorted(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_described_parameters_exist(name: str) -> None:
    """One line may describe several, which mkdocstrings cannot check."""
    public = PUBLIC[name]
    assert public.__doc__
    section = re.search(r"^Args:\n(.*?)(?:\n\n|\Z)", inspect.cleandoc(public.__doc__), re.S | re.M)
    if section is None or name == "kda_layers.KDAConfig":  # a config's are fields, of its base class too
        return
    lines = re.findall(r"^    ((?:[A-Za-z_]\w*)(?:, [A-Za-z_]\w*)*):", section[1], re.M)
    described = {n for line in lines for n in line.split(", ")}
    assert described
    assert described <= set(inspect.signature(public).parameters)


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [p for part in (entry.values() if isinstance(entry, dict) else entry) for p in pages(part)]

    nav = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    written = [p.relative_to(ROOT / "docs").as_posix() for p in PAGES]
    studies = [page for page in written if re.match(r"internals/studies/\d", page)]
    assert sorted([*nav, *studies]) == sorted(written)


@pytest.mark.parametrize("path", [README, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"], ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    """mkdocs checks those of docs."""
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / link).exists(), link


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: extra `docs`")
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    assert docs.main([]) == 0
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    index = tmp_path / "search" / "search_index.json"
    assert "<code" in (tmp_path / "reference" / "operators" / "index.html").read_text()
    layer = (tmp_path / "reference" / "layer" / "index.html").read_text()
    assert "Bases:" not in layer
    assert "MIN_LOWER_BOUND" not in layer
    found = {entry["location"].partition("#")[0] for entry in json.loads(index.read_text())["docs"]}
    assert {"quickstart/", "install/", "limits/", "guides/training/"} <= found
    assert not [page for page in found if page.startswith(("benchmarks/runs/", "internals/studies/"))]
