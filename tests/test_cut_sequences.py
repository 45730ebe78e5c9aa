"""What runs in several processes over one sequence: benchmarks/parallel.py and examples/train_long.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import parallel, report
from tests.processes import run_two

ROOT = Path(__file__).resolve().parents[1]


def test_a_sequence_over_two_processes_is_timed_beside_one(tmp_path: Path) -> None:
    command = ["--device", "cpu", "--tokens", "256", "--commit", "0000000", "--output", str(tmp_path)]
    run_two("-m", "benchmarks.parallel", *command, cwd=ROOT)
    rows = report.load(tmp_path / "cpu-parallel.json")["rows"]
    wanted = [(what, 256, n) for what in ("operator", "model") for n in (1, 2)]
    assert [(r["what"], r["T"], r["ranks"]) for r in rows] == wanted
    for alone, both in zip(rows[::2], rows[1::2], strict=True):
        assert alone["speedup"] == 1
        assert both["speedup"] == pytest.approx(alone["ms"] / both["ms"])
        assert both["exchange %"] < 100
        assert "exchange %" not in alone


def test_a_sequence_over_ranks_is_judged_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = parallel.operator

    def operator(T: int, group: Any, device: str, exact: bool = False) -> Any:
        run, first = whole(T, None, device, exact), 0 if group in (None, "right") else 1
        return run if group is None else lambda: tuple(t[:, first : first + 128] for t in run())

    monkeypatch.setattr(parallel.dist, "get_rank", lambda group=None: 0)
    monkeypatch.setitem(parallel.WORK["operator"], parallel.OURS, operator)
    monkeypatch.setattr(parallel, "operator", operator)
    errors = parallel.check({1: None, 2: "right"}, "cpu")
    assert errors.keys() == {(parallel.OURS, 1), (parallel.OURS, 2)}
    assert all(0 < e < 1e-5 for e in errors.values())
    with pytest.raises(RuntimeError, match="o over 2 ranks is off by"):
        parallel.check({1: None, 2: "one token late"}, "cpu")


def test_two_processes_train_to_the_loss_of_one() -> None:
    command = ["examples/train_long.py", "--cpu", "--steps", "3", "--seq-len", "512"]
    alone = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    both = run_two(*command, cwd=ROOT)
    losses = [re.findall(r"loss ([\d.]+) nats per byte after 3 steps on (\d)", text) for text in (alone, both)]
    (first, one), (second, two) = losses[0][0], losses[1][0]
    assert (one, two) == ("1", "2")
    assert abs(float(first) - float(second)) <= 0.0011, "both are rounded to three places"
