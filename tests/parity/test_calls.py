"""Models of this package do what a stock Llama does, or say why not: every call of the table on every model."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from tests.parity.calls import Call, table
from tests.parity.subjects import OURS, STOCK, subject

CALLS = table()
SLOW = ("Training", "Heads, adapters, preferences, quantisation")  # groups whose calls train


def _rows(call: Call) -> list[Any]:
    """Rows of the call and a model, as most pairs of two parameters would be combinations.

    Calls that take seconds are combinations on all models but one of ours and a swapped one. The Llama, with which each
    is compared, has a row where there is none to compare.
    """
    heavy, first = call.heavy or call.group in SLOW, (OURS[0], "kimi")
    names = [STOCK] * ({*first} <= {*call.refused, *call.absent}) + OURS
    return [
        pytest.param(
            call, name, id=f"{call.run.__name__}-{name}",
            marks=[pytest.mark.slow] * (heavy or name != OURS[0])
            + [pytest.mark.combination] * (heavy and name not in (STOCK, *first)),
        )
        for name in names
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Leave no settings of accelerate's, which are global to a process, and no compiled code to later tests."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.compiler.reset()


def perform(call: Call, name: str) -> Any:
    torch.manual_seed(0)
    return call.run(subject(name))


@functools.cache
def of_stock(call: Call) -> Any:
    return perform(call, STOCK)


@pytest.mark.parametrize(("call", "name"), [row for call in CALLS for row in _rows(call)])
def test_call(call: Call, name: str) -> None:
    if call.since and Version(transformers.__version__).release < Version(call.since).release:
        pytest.skip(f"transformers {transformers.__version__} has no such call: since {call.since}")
    if name in call.absent:
        pytest.skip(call.absent[name])
    if name in call.refused:
        with pytest.raises(Exception, match=re.escape(call.refused[name].message)):
            perform(call, name)
    else:
        assert perform(call, name) == of_stock(call)


def test_the_table() -> None:
    """Ids and titles are unique, the Llama does everything, and a reason says something."""
    assert len(CALLS) >= 60
    for names in ([call.run.__name__ for call in CALLS], [call.title for call in CALLS]):
        assert [name for name, n in Counter(names).items() if n > 1] == []
    for call in CALLS:
        assert {*call.refused, *call.absent} <= set(OURS)
        assert all(len(r.message) >= 10 and len(r.reason) >= 10 for r in call.refused.values())
