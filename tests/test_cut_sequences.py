"""Programs that run in several processes over one sequence: benchmarks/parallel.py and examples/train_long.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import parallel, report, timing
from tests.processes import run_two
from tests.ranks import Ranks, outcomes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


def test_a_sequence_over_two_processes_is_timed_beside_one(tmp_path: Path) -> None:
    cases = "operator:256,model:256,model:128*,FSDP2:512,heads:512,decode:4"
    command = ["--device", "cpu", "--cases", cases, "--commit", "0000000", "--output", str(tmp_path)]
    run_two("-m", "benchmarks.parallel", *command, cwd=ROOT)
    rows = report.load(tmp_path / "cpu-parallel.json")["rows"]
    lengths = [("operator", 256, 256), ("model", 256, 256), ("model", 128, 256), ("FSDP2", 512, 512)]
    lengths += [("heads", 512, 512), ("decode", 4, 4)]
    wanted = [(what, T[n - 1], n) for what, *T in lengths for n in (1, 2)]
    assert [(r["what"], r["T"], r["ranks"]) for r in rows] == wanted
    for alone, both in zip(rows[::2], rows[1::2], strict=True):
        assert alone["speedup"] == 1
        assert both["speedup"] == pytest.approx(alone["ms"] / both["ms"] * both["T"] / alone["T"])
        assert both["of one rank's"] == pytest.approx(both["speedup"] / 2)
        assert ("exchange %" in both) == (both["what"] in ("operator", "model"))
        assert "exchange %" not in alone
    assert all(rows[n]["error"] < 1e-6 for n in (0, 1))
    assert [r["scaling"] for r in rows[::2]] == ["strong", "strong", "weak", "strong", "strong", "strong"]
    assert not any("reason" in r for r in rows)


def no_memory(T: int, group: Any, device: str) -> Any:
    """Work that one rank has no memory for."""

    def run() -> None:
        if group is None:
            raise torch.OutOfMemoryError("1 EiB")

    return run


def longer_than_one_rank_holds(ranks: Ranks) -> None:
    groups: Any = {1: None, 2: dist.group.WORLD}
    with mock.patch.dict(parallel.WORK["model"], {parallel.OURS: no_memory}):
        alone, both = parallel.measure("model", {1: 64, 2: 64}, groups, "cpu")
        with mock.patch.object(parallel, "PASS_S", 0):
            _, long = parallel.measure("model", {1: 64, 2: 64}, groups, "cpu")
    reason = "not served on other ranks" if ranks.rank else "out of memory"
    ranks.check(alone.get("reason") == reason and "ms" not in alone, str(alone))
    ranks.check(both["ms"] > 0 and both["tokens/s"] > 0 and "speedup" not in both, str(both))
    calls = both["wall"]["calls"], long["wall"]["calls"]  # with and without exchanges, so three entries
    ranks.check(calls == (timing.PASSES * timing.rounds_of(2), timing.PASSES), f"calls {calls}")


def test_work_that_does_not_run_has_a_reason(tmp_path_factory: pytest.TempPathFactory) -> None:
    cases = {"no memory": longer_than_one_rank_holds, "fails": work_that_fails}
    assert outcomes(tmp_path_factory, "cut_sequences", 2, cases) == {"no memory": [], "fails": []}


def fails(T: int, group: Any, device: str) -> Any:
    raise KeyError("q_proj")


def work_that_fails(ranks: Ranks) -> None:
    with mock.patch.dict(parallel.WORK["model"], {parallel.OURS: fails}):
        rows = parallel.measure("model", {2: 64}, {2: dist.group.WORLD}, "cpu")
    ranks.check([r.get("reason") for r in rows] == ["failed: KeyError: 'q_proj'"], str(rows))


def test_the_cost_model() -> None:
    """One GPU's share, a wait for the scans of one layer, and a sum of gradients."""
    assert parallel.predicted_ms(1480, 131072, 131072, 1, 0) == 1480
    assert parallel.predicted_ms(1480, 131072, 131072, 2, 700_000_000) == pytest.approx(740 + 3.54 + 7.87, abs=0.01)
    assert parallel.predicted_ms(1480, 131072, 8 * 131072, 8, 0) == pytest.approx(1480 + 49.5, abs=0.1)


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


def test_no_process_group_outlives_its_example() -> None:
    """torch.distributed.nn's default arguments keep the group that exists when it is imported, with its threads."""
    code = """
import sys
sys.path.insert(0, "examples")
import train_long
assert train_long.main(["--cpu", "--steps", "1", "--seq-len", "64"]) == 0
from torch.distributed.nn.functional import broadcast
assert broadcast.__defaults__ == (None,), broadcast.__defaults__
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
