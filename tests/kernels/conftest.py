"""Registers an emulated backend for the tests that name it, and for no other test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.emulated_backends import EMULATED, registered


@pytest.fixture(autouse=True)
def _emulated_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    backend = EMULATED.get(parameters.get("backend"))
    if backend is None:
        yield
        return
    with registered(backend):
        yield
