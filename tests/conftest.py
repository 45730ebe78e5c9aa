"""Which tests run, and on what.

--tier chooses: "all", the default, is every test; "test" and "quick" take a share of the cases of each parametrised
test, always the same ones, and leave out what is marked as slower. KDA_LAYERS_REQUIRE="sm90,fla" names the backends
that must serve on this machine: their skips are failures.
"""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections import defaultdict
from typing import Any

import pytest
import torch

from kda_layers.kernels.attention_bias.dispatch import ATTENTION
from kda_layers.kernels.kda.dispatch import KDA

# Tier -> one in so many cases of a test, and the marks that it leaves out.
TIERS: dict[str, tuple[int, frozenset[str]]] = {
    "quick": (24, frozenset(("slow", "thorough"))),
    "test": (4, frozenset(("thorough",))),
    "all": (1, frozenset()),
}

REQUIRED = frozenset(n.strip() for n in os.environ.get("KDA_LAYERS_REQUIRE", "").split(",") if n.strip())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="all", help="how many tests run (%(default)s)")


def chosen(marks: dict[str, set[str]], tier: str) -> set[str]:
    """Of test ids and their marks, the ids that run in a tier: of each test's cases a share, but at least one."""
    share, left_out = TIERS[tier]
    cases: dict[str, list[str]] = defaultdict(list)
    for test in marks:
        if not marks[test] & left_out:
            cases[test.partition("[")[0]].append(test)
    ordered = (sorted(group, key=lambda test: zlib.crc32(test.encode())) for group in cases.values())  # mixes options
    return {test for group in ordered for test in group[: -(-len(group) // share)]}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = chosen({i.nodeid: {m.name for m in i.iter_markers()} for i in items}, config.getoption("--tier"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def take_first_configurations() -> None:
    """Triton's autotuners take the first configuration that fits: results must not depend on which one is fastest, and
    tuning for every shape of the tests would take hours."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def first(self: Any, kwargs: Any) -> Any:
        return prune(self, kwargs)[:1]

    Autotuner.prune_configs = first


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton, which reads it then
    # torch does not collect garbage before a capture. A graph of an earlier test that the collector frees during a
    # capture invalidates it. The setting is per thread; tests run in this one.
    torch.compiler.config.force_cudagraph_gc = True
    torch.set_num_threads(1)  # tensors are small, and waiting threads spin where cores are shared or xdist runs
    if torch.cuda.is_available() and importlib.util.find_spec("triton"):
        take_first_configurations()
    known = KDA.backends() | ATTENTION.backends()
    missing = sorted(REQUIRED - known.keys())
    if missing:
        raise pytest.UsageError(
            f"KDA_LAYERS_REQUIRE names unknown backends {', '.join(missing)}; known: {', '.join(known)}"
        )


@pytest.fixture(scope="session")
def required_backends() -> frozenset[str]:
    """Names of the backends whose skips are failures (see `cases.serve`)."""
    return REQUIRED
