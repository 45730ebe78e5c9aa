"""A counter of compiled graphs; stock KDA models run transformers' own PyTorch, whatever device and packages.

transformers picks flash-linear-attention's kernels when it imports a model, not when it runs one, so that with that
package installed stock models fail on a CPU. The tests want transformers' definition to compare with; against the
kernels, stock and swapped models are compared in test_stock_on_gpu.py.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.modeling.stock_models import FAMILIES

HIDDEN = "fla"


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Make `import package` raise ImportError."""
    held: dict[str, ModuleType] = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == package}
    for name in held:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(held)


def import_stock_models() -> None:
    for family in FAMILIES:
        name = f"transformers.models.{family}.modeling_{family}"
        if name in sys.modules:
            raise RuntimeError(f"{name} was imported before {HIDDEN} could be hidden from it")
        with hidden(HIDDEN):
            importlib.import_module(name)


import_stock_models()


@pytest.fixture
def counter() -> Iterator[CompileCounterWithBackend]:
    """Counts the compiled graphs. Floats are constants from the start: by default dynamo traces them (nn.RMSNorm's
    epsilon) as variables first, gives up and traces again."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True):
        yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
