"""KDA_LAYERS_REQUIRE="sm90,fla" names the backends that must serve on this machine: their skips are failures."""

from __future__ import annotations

import os

import pytest
import torch

from kda_layers.kernels.dispatch import backends

REQUIRED = frozenset(n.strip() for n in os.environ.get("KDA_LAYERS_REQUIRE", "").split(",") if n.strip())


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # tensors are small, and waiting threads spin where cores are shared or xdist runs
    missing = sorted(REQUIRED - backends().keys())
    if missing:
        raise pytest.UsageError(
            f"KDA_LAYERS_REQUIRE names unknown backends {', '.join(missing)}; known: {', '.join(backends())}"
        )


@pytest.fixture(scope="session")
def required_backends() -> frozenset[str]:
    """Names of the backends whose skips are failures (see `cases.serve`)."""
    return REQUIRED
