"""Choice of the tests that run, and of their devices.

--tier chooses: "all", the default, is every test but most emulated cases, which "every" adds; "test" and "quick" take a
share of the cases of each parametrised test, always the same ones, and leave out what is slow. "test" takes least of
tests/kernels: CI runs it only where the kernels, their tests and the emulator are unchanged, and "all" elsewhere. "gpu"
leaves out what a GPU does not change, and names what is skipped.
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
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from kda_layers import versions
from kda_layers.kernels.attention_bias.dispatch import ATTENTION
from kda_layers.kernels.kda.dispatch import KDA
from tests import cuda_emulator
from tests.parity.calls import HEAVY

ROOT = Path(__file__).resolve().parents[1]

if not torch.cuda.is_available():
    # Triton reads it when it is imported, which the conftest of a folder may do, before any hook is called.
    os.environ.setdefault("TRITON_INTERPRET", "1")

EMULATED = "@emulator"  # ends the names of backends whose CUDA kernels run in the emulator
# Tier -> end of an id (for the emulator any part) -> of such cases, the tier takes one in so many. On a GPU,
# flash-linear-attention's kernels, which have tests of their own, take 20 s to compile for a case, and plain PyTorch
# computes what it does on a CPU.
FEWER = {"all": {EMULATED: 8}, "gpu": {"fla": 3, "eager": 2}}
# What compiles, trains or starts processes of its own: parts of test ids. `make quick` leaves it out.
SLOW = (
    "cuda_emulator/", "test_cuda_", "kernels/test_build", "attention/test_tr", "kernels/test_property",
    "modeling/test_distributed", "modeling/test_hub", "modeling/test_s", "modeling/test_training",
    "tests/test_benchmarks", "tests/test_docs_code", "tests/test_examples", "tests/test_finetune",
    "tests/test_makefile", "tests/test_package",
    "tests/test_serve", "tests/test_swap_example", "tests/test_train", "tests/test_cut", "test_over_ranks",
    "test_context_parallel", "builds_without_warnings", "compil", "every_element", "flash_linear_attention",
    "fresh_process", "importing", "new_family", "requiring", "short_conv_triton", "tensor_parallel",
    "tests/parity", "two_processes", EMULATED,
)  # fmt: skip
# What "test" leaves out beside the training curves and the emulated cases, by seconds of CPU: other tests of the same
# file run the same emulated kernels (95 s), a compiler again (45 s), processes that only build kernels (15 s), or the
# operator over ranks, which models over ranks run, too (60 s).
OF_KERNELS = (
    "cuda_emulator/test_kernels", "test_cuda_chunk.py", "test_cuda_gradients.py::test_near_zero",
    "test_cuda_gradients.py::test_resets", "test_cuda_gradients.py::test_same_bits",
    "test_cuda_reverse.py::test_nan", "test_cuda_reverse.py::test_packed", "test_cuda_reverse.py::test_resets",
    "test_cuda_reverse.py::test_saved", "test_cuda_reverse.py::test_the_scan", "test_cuda_step.py::test_tilings",
    "kernels/test_compile.py::test_compiled_by_inductor", "attention/test_training.py::test_compiled_by_inductor",
    "test_triton.py::test_compiles_without", "test_short_conv_triton.py::test_compiles_without",
    "test_build.py::test_two_processes", "test_dispatch.py::test_requiring_known",
    "test_recompute.py::test_gradients_have_the_same_bits", "kernels/test_over_ranks",
)  # fmt: skip
# A model takes dynamo 10 s; without these cases the share is one model, not two.
COMPILED_TWICE = ("test_models.py::test_compiled_model[key_bias",)
# What runs without a GPU, beside the emulated cases and those on the CPU: it compiles, or starts processes on the CPU.
WITHOUT_GPU = (
    "compiles_without", "test_cuda_compile", "kernels/test_build", "kernels/test_imports", "test_over_ranks",
    "test_context_parallel", "test_tensor_parallel",
)  # fmt: skip
# What takes longest on a GPU, mostly by its compilers: the processes share it out and start with it.
LONG_ON_GPU = ("[fla]", "-fla]", "-static-", "by_inductor", "compiled", "flash_linear_attention", "process")
# Tier -> one in so many cases of a test, the same of tests/kernels, and parts of the ids that it leaves out.
TIERS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "quick": (24, 24, SLOW),
    "test": (6, 24, (*OF_KERNELS, *COMPILED_TWICE, "tests/test_training_curves", "tests/test_cut", EMULATED, HEAVY)),
    "all": (1, 1, ()),
    "every": (1, 1, ()),
    "gpu": (1, 1, (EMULATED, *WITHOUT_GPU)),
}

REQUIRED = frozenset(n.strip() for n in os.environ.get("KDA_LAYERS_REQUIRE", "").split(",") if n.strip())
FAILURES = "" if "PYTEST_XDIST_WORKER" in os.environ else os.environ.get("KDA_LAYERS_FAILURES", "")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="all", help="how many tests run (%(default)s)")
    parser.addoption("--record-versions", action="store_true", help="note the versions that the tests have passed with")


def chosen(tests: Iterable[str], tier: str) -> set[str]:
    """The ids of tests that run in a tier: of each test's cases a share, but at least one. Some backends have a share
    of their own, and their cases replace no others."""
    share, share_of_kernels, left_out = TIERS[tier]
    fewer = FEWER.get(tier, {})
    cases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for test in tests:
        if not any(part in test for part in left_out):
            ends = (end for end in fewer if test.rstrip("]").endswith(end))
            backend = EMULATED if EMULATED in test else next(ends, "")
            cases[test.partition("[")[0], backend].append(test)
    kept: set[str] = set()
    for (name, backend), group in cases.items():
        one_in = share_of_kernels if name.startswith("tests/kernels/") else share
        one_in = fewer.get(backend, one_in)
        group.sort(key=lambda test: zlib.crc32(test.encode()))  # mixes options
        kept.update(group[: -(-len(group) // one_in)])
    return kept


def runs_alike_without_gpu(item: pytest.Item) -> bool:
    """True for a case in the emulator, and for one on the CPU of a test that also runs on the GPU."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return item.get_closest_marker("emulator") is not None or parameters.get("device") == "cpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("--tier")
    kept = chosen([item.nodeid for item in items if tier != "gpu" or not runs_alike_without_gpu(item)], tier)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]
    if tier == "gpu":
        items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def dealt(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Order tests for processes that each begin with a slice of the list: an equal share of the long ones is first in
    every slice."""
    ordered = sorted(items, key=lambda item: not any(part in item.nodeid for part in LONG_ON_GPU))
    return [item for first in range(processes) for item in ordered[first::processes]]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("emulator") and (why := cuda_emulator.unavailable()):
        pytest.skip(why)


@pytest.fixture(autouse=True)
def _only_marked_tests_emulate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that uses the emulator without its marker, which leaves it out of the tests on a GPU."""
    if EMULATED in request.node.nodeid or request.node.get_closest_marker("emulator"):
        return

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("expected @pytest.mark.emulator on a test that runs a kernel in the emulator, got none")

    monkeypatch.setattr(cuda_emulator, "compile_kernel", refuse)


def pytest_configure(config: pytest.Config) -> None:
    # torch does not collect garbage before a capture. A graph of an earlier test that the collector frees during a
    # capture invalidates it. The setting is per thread; tests run in this one.
    torch.compiler.config.force_cudagraph_gc = True
    torch.set_num_threads(1)  # tensors are small, and waiting threads spin where cores are shared or xdist runs
    if torch.cuda.is_available() and importlib.util.find_spec("triton"):
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
    whole = config.getoption("--tier") in ("all", "every") and not (config.option.keyword or config.option.markexpr)
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what a run on a GPU has skipped: each test with the number of its cases and the reason."""
    if config.getoption("--tier") != "gpu":
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
