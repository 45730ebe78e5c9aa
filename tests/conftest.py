"""Marks of tests, which the Makefile chooses by, and what a run of tests needs.

A test is marked where it stands: `slow`, `compiles`, `emulated`, `gpu` or `fallback` (see pyproject.toml).
`combination` is set here: a test runs each value of each of its parameters in one case at least, and its other cases
are combinations of values that have run. Rows of a table that resemble others have it where they stand. Every target
leaves these to plain `pytest`.
KDA_LAYERS_REQUIRE="sm90,fla" names the backends that must serve on this machine: their skips are failures.
KDA_LAYERS_FAILURES=FILE collects failures as they come.
--record-versions adds the installed torch and transformers to `kda_layers/tested_versions.json` if the tests pass that
stand for them: those of models for transformers, and those of kernels, too, for torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from kda_layers import versions
from kda_layers.kernels.attention_bias.contract import ATTENTION
from kda_layers.kernels.kda.contract import KDA
from tests import cuda_emulator

ROOT = Path(__file__).resolve().parents[1]
ON_GPU = torch.cuda.is_available()
ALL_TESTS = "not combination"  # of `make test-all`

if not ON_GPU:
    # Triton reads it when it is imported, which the conftest of a folder may do, before any hook is called.
    os.environ.setdefault("TRITON_INTERPRET", "1")

REQUIRED = frozenset(n.strip() for n in os.environ.get("KDA_LAYERS_REQUIRE", "").split(",") if n.strip())
FAILURES = "" if "PYTEST_XDIST_WORKER" in os.environ else os.environ.get("KDA_LAYERS_FAILURES", "")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-versions", action="store_true", help="note the versions that the tests have passed with")


def combinations(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases whose every parameter has its value in another case of the test that is not yielded.

    Cases on another backend or device are a test of their own, and so are slow ones; emulated backends take turns.
    """
    tests: dict[tuple[str, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            slow, emulated = (item.get_closest_marker(name) is not None for name in ("slow", "emulated"))
            place = (str(item.callspec.params.get(name)) for name in ("device", *["backend"] * (not emulated)))
            tests[item.nodeid.partition("[")[0], str(slow), str(emulated), *place].append(item)
    for cases in tests.values():
        values = {item: [*enumerate(item.callspec._idlist)] for item in cases}  # type: ignore[attr-defined]
        times: Counter[tuple[int, str]] = Counter()
        while values:
            case = max(values, key=lambda c: (sum(not times[v] for v in values[c]), -sum(times[v] for v in values[c])))
            if all(times[value] for value in values[case]):
                break
            times.update(values.pop(case))
        yield from values


@pytest.hookimpl(tryfirst=True)  # before pytest reads -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in combinations(items):
        item.add_marker("combination")
    if ON_GPU:
        items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def dealt(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Order tests for processes that each begin with a slice of the list: an equal share of the long ones, which are
    those of compilers on a GPU, is first in every slice."""
    ordered = sorted(items, key=lambda item: not any(map(item.get_closest_marker, ("compiles", "slow"))))
    return [item for first in range(processes) for item in ordered[first::processes]]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not ON_GPU:
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("emulated") and (why := cuda_emulator.unavailable()):
        pytest.skip(why)


@pytest.fixture(autouse=True)
def _only_marked_tests_emulate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that uses the emulator without its marker, which leaves it out of the tests on a GPU."""
    if request.node.get_closest_marker("emulated"):
        return

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("expected @pytest.mark.emulated on a test that runs a kernel in the emulator, got none")

    monkeypatch.setattr(cuda_emulator, "compile_kernel", refuse)


def pytest_configure(config: pytest.Config) -> None:
    # torch does not collect garbage before a capture. A graph of an earlier test that the collector frees during a
    # capture invalidates it. The setting is per thread; tests run in this one.
    torch.compiler.config.force_cudagraph_gc = True
    torch.set_num_threads(1)  # tensors are small, and waiting threads spin where cores are shared or xdist runs
    if ON_GPU and importlib.util.find_spec("triton"):
        # Results must not depend on which configuration is fastest, and tuning for every shape would take hours.
        from benchmarks.timing import take_first_configurations

        take_first_configurations()
    known = KDA.backends() | ATTENTION.backends()
    missing = sorted(REQUIRED - known.keys())
    if missing:
        raise pytest.UsageError(
            f"KDA_LAYERS_REQUIRE names unknown backends {', '.join(missing)}; known: {', '.join(known)}"
        )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Leave failures in a file as they come: a run that is stopped has no summary."""
    if FAILURES and report.failed:
        with open(FAILURES, "a") as file:
            file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n\n")


def recorded_packages(config: pytest.Config) -> list[str]:
    """Return the packages whose versions a run without failures may record: none if it left tests out."""
    given = {Path(arg).resolve().relative_to(ROOT).as_posix() for arg in config.args}
    whole = config.option.markexpr in ("", ALL_TESTS) and not config.option.keyword
    if not whole or config.option.ignore_glob or config.option.deselect:
        return []
    models = given & {"tests", "tests/modeling"}
    kernels = given & {"tests", "tests/kernels"}
    return ["transformers", "torch"] if models and kernels else ["transformers"] if models else []


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or not session.config.getoption("--record-versions"):
        return
    packages = recorded_packages(session.config)
    if exitstatus != 0 or not packages:
        raise pytest.UsageError("--record-versions: versions are recorded by a whole run of tests/modeling that passes")
    found = json.loads(versions.FILE.read_text())
    for package in packages:
        new = ".".join(map(str, versions.installed(package)))
        found[package] = sorted({*found[package], new}, key=versions.release)
    rows = (f"  {json.dumps(package)}: {json.dumps(numbers)}" for package, numbers in found.items())
    versions.FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what a run on a GPU has skipped: each test with the number of its cases and the reason."""
    if not ON_GPU:
        return
    reports = terminalreporter.stats.get("skipped", [])
    problem = re.compile(r" \[[^]]*\](?=:)")  # differs from case to case
    skipped = Counter((r.nodeid.partition("[")[0], problem.sub("", str(r.longrepr[2]))) for r in reports)
    terminalreporter.section(f"{len(reports)} skipped")
    for (test, reason), cases in sorted(skipped.items()):
        terminalreporter.line(f"{test} ({cases}): {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session")
def required_backends() -> frozenset[str]:
    """Names of the backends whose skips are failures (see `cases.serve`)."""
    return REQUIRED
