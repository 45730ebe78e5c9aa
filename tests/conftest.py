"""KDA_LAYERS_REQUIRE="sm90,fla" names the backends that must serve on this machine: their skips are failures."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

from kda_layers.kernels.attention_bias.dispatch import ATTENTION
from kda_layers.kernels.kda.dispatch import KDA

REQUIRED = frozenset(n.strip() for n in os.environ.get("KDA_LAYERS_REQUIRE", "").split(",") if n.strip())


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
