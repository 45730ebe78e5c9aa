"""Tests that `make quick`, `make test`, `make test-all` and `make test-gpu` run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import TIERS, chosen, dealt
from tests.test_makefile import ROOT, dry_run, needs_make

MANY = 100
SLOW, THOROUGH = "tests/test_examples.py::one", "tests/cuda_emulator/test_kernels.py::one"
PLACES = ("tests/a.py", "tests/kernels/a.py")
TESTS = [*(f"{place}::many[{n}]" for place in PLACES for n in range(MANY)), "tests/a.py::one", SLOW, THOROUGH]


def test_a_tier_runs_a_share_of_every_test() -> None:
    quick, some, most, every, on_gpu = (chosen(TESTS, tier) for tier in TIERS)
    assert quick < some < most == every == on_gpu == set(TESTS)
    for name, tier in (("quick", quick), ("test", some)):
        for place, share in zip(PLACES, TIERS[name][:2], strict=True):
            assert sum(test.startswith(f"{place}::many") for test in tier) == -(-MANY // share)
    assert {t for t in quick if "many" not in t} == {"tests/a.py::one"}
    assert {t for t in some if "many" not in t} == {"tests/a.py::one", SLOW}


def test_the_choice_does_not_depend_on_the_order() -> None:
    assert all(chosen(TESTS[::-1], tier) == chosen(TESTS, tier) for tier in TIERS)


@needs_make
@pytest.mark.parametrize(("target", "tier"), [("quick", "--tier quick"), ("test", "--tier test"), ("test-all", "")])
def test_targets(target: str, tier: str) -> None:
    last = dry_run(target).rstrip().splitlines()[-1]
    assert last.endswith(f"-m pytest -n 2 --dist worksteal {tier}".rstrip())


def test_emulated_cases_are_fewer_and_replace_no_others() -> None:
    plain = [f"tests/test_any.py::one[{n}-eager]" for n in range(60)]
    emulated = [f"tests/test_any.py::one[{n}-sm90@emulator]" for n in range(60)]
    kept = {tier: chosen([*plain, *emulated], tier) for tier in TIERS}
    assert all(kept[tier] & set(plain) == chosen(plain, tier) for tier in TIERS)
    counts = {tier: len(kept[tier] & set(emulated)) for tier in TIERS}
    assert counts == {"quick": 0, "test": 0, "all": 8, "every": 60, "gpu": 0}
    of_fla = [f"tests/kernels/test_any.py::one[{n}-cuda-fla]" for n in range(60)]
    kept = {tier: chosen([*plain, *of_fla], tier) for tier in TIERS}
    assert (len(kept["gpu"] & set(of_fla)), len(kept["gpu"] & set(plain))) == (20, 30)
    assert kept["all"] == {*plain, *of_fla}


def test_every_process_starts_with_its_share_of_what_takes_long() -> None:
    items = [SimpleNamespace(nodeid=f"tests/a.py::test[{n}-{'fla' if n < 8 else 'eager'}]") for n in range(40)]
    order = dealt(items, 4)
    assert sorted(map(id, order)) == sorted(map(id, items))
    for first in range(0, 40, 10):
        assert [item.nodeid.endswith("-fla]") for item in order[first : first + 10]] == [True] * 2 + [False] * 8


RUNS_ON_A_GPU = """
import pytest

@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_devices(device): pytest.skip(f"eager cannot serve [{device}, K=4]: K is 4")

@pytest.mark.emulator
def test_emulated(): pass

def test_emulates_without_a_mark():
    from tests.kernels import emulated
    emulated.Emulator().load("a.cu", "kernel", {}, None)

def test_fails(): assert 0, "on purpose"
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_a_run_on_a_gpu(workers: tuple[str, ...], tmp_path: Path) -> None:
    """It leaves out what a GPU does not change, names what it skips, and has failures in a file as they come."""
    (tmp_path / "test_new.py").write_text(RUNS_ON_A_GPU)
    failures = tmp_path / "failures.txt"
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--tier", "gpu", *workers, str(tmp_path)]
    run = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-c", str(ROOT / "pyproject.toml")], cwd=ROOT, capture_output=True,
        text=True, env=environment | {"KDA_LAYERS_FAILURES": str(failures)},
    )  # fmt: skip
    assert "2 failed, 1 skipped" in run.stdout, run.stdout + run.stderr
    assert "test_new.py::test_devices (1): eager cannot serve: K is 4" in run.stdout
    text = failures.read_text()
    assert "test_new.py::test_fails (call)" in text
    assert "on purpose" in text
    assert "expected @pytest.mark.emulator on a test that runs a kernel in the emulator, got none" in text


def test_heavy_calls_run_in_the_whole_suite_alone() -> None:
    calls = [f"tests/parity/test_calls.py::test_call[{call}-kda]" for call in ("from_pretrained", "serve@heavy")]
    assert {tier: len(chosen(calls, tier)) for tier in TIERS} == {"quick": 0, "test": 1, "all": 2, "every": 2, "gpu": 2}
