"""The benchmark of loss curves: what it computes from them, and a whole run at a tiny size on a CPU."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import lm
from benchmarks import training_curves as curves
from benchmarks.training_curves import LMSettings, Run, load_corpus
from kda_layers.kernels.registry import requested

pytestmark = pytest.mark.slow

CONFIG = dict(
    model_type="kda_lm", vocab_size=256, hidden_size=32, num_hidden_layers=1, linear_num_heads=2, linear_head_dim=16,
    intermediate_size=48, num_attention_heads=2,
)  # fmt: skip


def data_of(**losses: list[float]) -> dict[str, Any]:
    """Return what the benchmark writes of runs with these losses; "a_rounding" is a run of "a" with that change."""
    runs = []
    for name, values in losses.items():
        run = Run(*name.split("_"))
        runs.append(
            dict(name=run.name, backend=run.backend, change=run.change, dtype=run.dtype, steps=len(values),
                 losses=values, status="finished", steps_per_s=2.0, peak_gib=None, at_once=1, stamp={"commit": "abc"})
        )  # fmt: skip
    steps = max(map(len, losses.values()))
    settings = dict(batch_size=1, seq_len=8, asked_steps=steps)
    return dict(settings=settings, steps=steps, parameters=5, runs=runs)


def test_smoothed() -> None:
    assert curves.smoothed([4.0, 2.0, 0.0, 1.0], 2) == [4.0, 3.0, 1.0, 0.5]
    assert curves.smoothed([4.0, 2.0], 1) == [4.0, 2.0]


def test_the_first_difference_that_counts_is_of_a_whole_window() -> None:
    assert curves.largest([9.0, -2.0, 1.0], 2) == 2.0
    assert curves.largest([9.0], 2) == 9.0


def test_table() -> None:
    """80 steps: a smoothed loss is the mean of two."""
    a = [5.0] * 78 + [2.0, 4.0]
    data = data_of(a=a, a_rounding=[x + 0.25 for x in a], eager=[5.0] * 38 + [8.0, 4.0])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in curves.table(data).splitlines() if "|" in line]
    assert rows[2] == ["a", "bfloat16", "80", "3.0000", "5.0000", "2", ""]
    assert rows[4] == ["eager", "float32", "40", "6.0000", "6.0000", "2", ""]
    assert ["a, other rounding - a", "80", "0.25", "+0.25", "noise"] in rows
    assert ["eager - a", "40", "1.5", "+1", ""] in rows
    assert "eager made 40 steps of 80" in curves.table(data)
    data["runs"][2]["at_once"] = 3
    data["settings"] |= {"cuda_graph": True, "untuned": True}
    for what in ("shared the device (eager)", "replayed from CUDA graphs", "in their first configuration"):
        assert what in curves.table(data)


def test_the_slowest_decides_but_the_reference_does_not() -> None:
    sm90, fla, eager = Run("sm90"), Run("fla"), Run("eager")
    seconds = {sm90: 0.01, fla: 0.05, eager: 1.0}
    assert curves.plan_steps(2000, 50, seconds) == {sm90: 1000, fla: 1000, eager: 50}
    assert curves.plan_steps(20, 50, seconds) == {sm90: 20, fla: 20, eager: 20}
    assert curves.plan_steps(2000, 50, {eager: 1.0}) == {eager: 50}


def test_a_rounding_moves_every_weight_by_one_unit() -> None:
    model = torch.nn.Linear(40, 40)
    before = [p.detach().clone() for p in model.parameters()]
    curves.change_last_bits(model, 0)
    for old, new in zip(before, model.parameters(), strict=True):
        units = new.detach().view(torch.int32) - old.view(torch.int32)
        assert set(units.unique().tolist()) == {-1, 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("curves")
    (path / "tiny.json").write_text(json.dumps(CONFIG))
    (path / "text.txt").write_text("one two three four five six seven, and so on.\n" * 200)
    return path


def run(folder: Path, more: str) -> int:
    command = f"--config {folder}/tiny.json --data {folder}/text.txt --device cpu --tokens 2x32 --lr 5e-3 --commit abc"
    return curves.main(f"{command} --output {folder}/out {more}".split())


def test_a_run_in_float8(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another curve, which is not taken for noise; with no projection to convert, an error."""
    pytest.importorskip("torchao")
    assert run(folder, "--backends eager --float8 --steps 12") == 2
    monkeypatch.setattr(lm, "NARROW", 32)
    assert run(folder, "--backends eager --float8 --steps 12") == 0
    first, rounding, float8 = json.loads((folder / "out" / "training_curves.json").read_text())["runs"]
    assert float8["name"] == "eager, float8"
    gaps = [max(map(abs, curves.difference(first, r, 1))) for r in (rounding, float8)]
    assert gaps[1] > 10 * gaps[0], "float8 rounds more than a change of the last bit"
    rows = (folder / "out" / "training_curves.md").read_text().splitlines()
    assert ["noise" in row for row in rows if row.startswith("| eager, ") and " - " in row] == [True, False, False]


def test_a_run_of_the_eager_backend(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same data gives the same curve but for rounding; other data another; and all is there to see."""
    asked: set[str | None] = set()
    trained = curves.KDAForCausalLM.forward
    monkeypatch.setattr(curves.KDAForCausalLM, "forward", lambda *a, **k: (asked.add(requested()), trained(*a, **k))[1])
    assert run(folder, "--backends eager --noise rounding,data --steps 30") == 0
    assert asked == {"eager"}
    data = json.loads((folder / "out" / "training_curves.json").read_text())
    first, rounding, other = data["runs"]
    assert [r["name"] for r in data["runs"]] == ["eager", "eager, other rounding", "eager, other data"]
    assert all(r["status"] == "finished" and r["steps"] == 30 and r["steps_per_s"] > 0 for r in data["runs"])
    assert first["losses"][-1] < first["losses"][0] - 1
    gaps = [max(map(abs, curves.difference(first, r, 1))) for r in (rounding, other)]
    assert 0 < gaps[0] < 1e-3 < gaps[1]
    for name in ("training_curves.md", "training_curves.png"):
        (folder / "out" / name).unlink(missing_ok=True)
    assert curves.main(["--plot", str(folder / "out")]) == 0
    assert "| eager, other rounding - eager | 30 |" in (folder / "out" / "training_curves.md").read_text()
    pytest.importorskip("matplotlib")
    assert (folder / "out" / "training_curves.png").read_bytes().startswith(b"\x89PNG")


def test_two_at_once(folder: Path) -> None:
    """Inputs and results of a training go from one process to another, and results come in their order."""
    s = LMSettings(config=str(folder / "tiny.json"), steps=6)
    corpus = load_corpus(str(folder / "text.txt"), 1, 1, None, 8, folder)
    given = (curves.train, Run("eager", "data"), s, corpus, torch.device("cpu"))
    again = pickle.loads(pickle.dumps(given))
    assert again[:3] == given[:3]
    assert torch.equal(again[3].train, corpus.train)
    with curves.mapping(2, untuned=True) as map_runs:
        assert list(map_runs(math.sqrt, [4, 1, 9])) == [2, 1, 3]


def test_resuming_makes_what_is_missing(folder: Path) -> None:
    """A run that was cut short is made again; whole ones stay, unless the training is another."""
    path = folder / "out" / "training_curves.json"
    options = "--backends eager --steps 8 --budget-s 1000"
    assert run(folder, options) == 0
    before = json.loads(path.read_text())
    cut = json.loads(path.read_text())
    cut["runs"][0]["stamp"]["commit"] = "kept"
    cut["runs"][1] |= {"steps": 7, "losses": cut["runs"][1]["losses"][:7]}
    path.write_text(json.dumps(cut))
    assert run(folder, f"{options} --resume") == 0
    after = json.loads(path.read_text())
    assert [r["losses"] for r in after["runs"]] == [r["losses"] for r in before["runs"]]
    assert [r["stamp"]["commit"] for r in after["runs"]] == ["kept", "abc"]
    text = (folder / "out" / "training_curves.md").read_text()
    assert "eager: " in text
    assert "commit kept" in text
    assert "shared the device" not in text
    assert run(folder, f"{options} --resume --seed 5") == 0
    assert [r["stamp"]["commit"] for r in json.loads(path.read_text())["runs"]] == ["abc", "abc"]


def test_a_small_budget_means_fewer_steps(folder: Path) -> None:
    assert run(folder, "--backends eager --noise= --steps 5000 --budget-s 0.2") == 0
    data = json.loads((folder / "out" / "training_curves.json").read_text())
    assert data["settings"]["steps"] == data["steps"] == data["runs"][0]["steps"] < 5000
    assert "5000 steps were asked for" in (folder / "out" / "training_curves.md").read_text()


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("--backends eager,none", "unknown backend 'none'"),
        ("--backends sm90 --steps 20", "cannot serve"),
        ("--steps 3 --backends eager", "--steps 3"),
    ],
)
def test_what_cannot_be_run_is_explained(
    more: str, problem: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, more) == 2
    assert problem in capsys.readouterr().err
