"""Tests that `make quick`, `make test`, `make test-all` and `make test-gpu` run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.conftest import ALL_TESTS, dealt
from tests.test_makefile import ROOT, dry_run, needs_make

MARKED = """
import pytest

BACKENDS = ["plain", *(pytest.param(n, marks=pytest.mark.emulated) for n in "xyz")]

@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize(("a", "rest"), [(0, 0), (0, 1), (1, 1)])
def test_all(a, b, rest, backend): pass

@pytest.mark.slow
@pytest.mark.parametrize("b", range(2))
@pytest.mark.parametrize("a", range(2))
def test_slow(a, b): pass

@pytest.mark.compiles
def test_compiles(): pass

@pytest.mark.gpu
def test_gpu(): pass
"""

ON_A_GPU = """
import pytest

BACKENDS = ["ours", pytest.param("eager", marks=pytest.mark.fallback), pytest.param("fla", marks=pytest.mark.compiles)]

@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("b", range(2))
@pytest.mark.parametrize("a", [0, 1])
def test_all(a, b, backend): pass

@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow
def test_slow(backend): pass

@pytest.mark.emulated
def test_emulated(): pass
"""


def pytest_runs(folder: Path, text: str, *runs: list[str], **environment: str) -> str:
    """The output of pytest on one file with the project's hooks and settings, once for each list of arguments."""
    (folder / "test_new.py").write_text(text)
    same = [
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        folder,
        "-c",
        ROOT / "pyproject.toml",
        folder,
    ]
    code = (
        f"import pytest; [print('run', pytest.main({list(map(str, same))} + run), flush=True) for run in {list(runs)}]"
    )
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")} | environment
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    return done.stdout + done.stderr


def expression(target: str) -> str:
    """The marks that the last command of a target chooses by."""
    words = shlex.split(dry_run(target).replace("\\\n", "").rstrip().splitlines()[-1])
    return words[words.index("-m", words.index("pytest")) + 1]


@needs_make
def test_what_targets_run(tmp_path: Path) -> None:
    targets = ("quick", "test", "test-models", "test-all")
    arguments = ["--collect-only", "-q", "-o", "addopts=--strict-markers", "-m"]
    output = pytest_runs(tmp_path, MARKED, *([*arguments, expression(target)] for target in targets))
    ids = [re.findall(r"::(\S+)", part) for part in re.split(r"^run .*$", output, flags=re.MULTILINE)]
    runs = dict(zip(targets, ids, strict=False))
    # Each row of a table and each other value runs once, in a combination that is the same in every run.
    plain = [f"test_all[{row}-{b}-plain]" for row, b in (("0-0", 0), ("0-1", 1), ("1-1", 2), ("0-0", 3))]
    assert sorted(runs["quick"]) == sorted([*plain, "test_gpu"]), output
    assert sorted(runs["test"]) == sorted([*plain, "test_compiles", "test_gpu"])
    emulated = [test for test in runs["test-all"] if test[-2] in "xyz"]
    assert len(emulated) == 4
    for part, values in ((0, {"0-0", "0-1", "1-1"}), (1, set("0123")), (2, set("xyz"))):
        assert {test[9:-1].rsplit("-", 2)[part] for test in emulated} == values
    assert sum(test.startswith("test_slow") for test in runs["test-all"]) == 2
    assert sorted(runs["test"] + runs["test-models"] + emulated) == sorted(runs["test-all"])
    assert expression("test-all") == ALL_TESTS


@needs_make
def test_what_the_target_of_a_gpu_runs(tmp_path: Path) -> None:
    """All cases of our kernels; of fla, which compiles, no combinations; of eager nothing slow, either."""
    arguments = ["--collect-only", "-q", "-o", "addopts=--strict-markers", "-m", expression("test-gpu")]
    ids = re.findall(r"::(\S+)", pytest_runs(tmp_path, ON_A_GPU, arguments))
    for backend, cases in (("ours", 4), ("fla", 2), ("eager", 2)):
        assert len([i for i in ids if i.startswith("test_all") and i.endswith(f"{backend}]")]) == cases, ids
    assert sorted(i for i in ids if not i.startswith("test_all")) == ["test_slow[fla]", "test_slow[ours]"]


def test_every_process_starts_with_its_share_of_what_takes_long() -> None:
    def item(long: bool) -> SimpleNamespace:
        return SimpleNamespace(long=long, get_closest_marker=lambda name: (name == "compiles" and long) or None)

    items = [item(n < 8) for n in range(40)]
    order = dealt(items, 4)
    assert sorted(map(id, order)) == sorted(map(id, items))
    for first in range(0, 40, 10):
        assert [item.long for item in order[first : first + 10]] == [True] * 2 + [False] * 8


FAILS = """
import pytest

@pytest.mark.emulated
def test_emulated(): pass

def test_emulates_without_a_mark():
    from tests.kernels import emulated
    emulated.Emulator().load("a.cu", "kernel", {}, None)

def test_fails(): assert 0, "on purpose"
"""


def test_a_run_on_a_gpu_names_what_it_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = ("eager cannot serve [cuda, K=4]: K is 4", "eager cannot serve [cuda, K=5]: K is 4")
    reports = [
        SimpleNamespace(nodeid=f"a.py::test[{n}]", longrepr=("a.py", 1, f"Skipped: {r}")) for n, r in enumerate(reasons)
    ]
    lines: list[str] = []
    reporter: Any = SimpleNamespace(stats={"skipped": reports}, section=lines.append, line=lines.append)
    for on_gpu in (False, True):
        monkeypatch.setattr(conftest, "ON_GPU", on_gpu)
        assert lines == []
        conftest.pytest_terminal_summary(reporter)
    assert lines == ["2 skipped", "a.py::test (2): eager cannot serve: K is 4"]


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["alone", "workers"])
def test_failures_are_in_a_file_as_they_come(workers: tuple[str, ...], tmp_path: Path) -> None:
    failures = tmp_path / "failures.txt"
    output = pytest_runs(tmp_path, FAILS, [*workers, "-m", "not emulated"], KDA_LAYERS_FAILURES=str(failures))
    assert "2 failed" in output, output
    assert "passed" not in output
    text = failures.read_text()
    assert "test_new.py::test_fails (call)" in text
    assert "on purpose" in text
    assert "expected @pytest.mark.emulated on a test that runs a kernel in the emulator, got none" in text
