"""Everyday calls of transformers, TRL, PEFT and accelerate, and what models of this package do with them.

A call is a function of a `Subject`: it makes the call, checks the result, and returns what has to be as on a stock
Llama (shapes, dtypes, kinds, names). A model of this package does what the Llama does, or raises an error that says why
not, which the call declares. tests/parity/test_calls.py holds the models to it, and `python -m tools.docs` writes the
page "What works" from the same table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

GROUPS = ("loading", "weights", "forward", "generating", "serving", "training", "adapting", "deploying")
_found: list[Call] = []


@dataclass(frozen=True)
class Refusal:
    """An error that a model raises instead: part of its message, and the reason in the words of the page."""

    message: str
    reason: str


@dataclass(frozen=True, eq=False)
class Call:
    """A row of the table.

    Attributes:
        group: heading on the page.
        title: the call in Markdown.
        run: what makes and checks it.
        refused: {subject: refusal} for each subject that cannot do it.
        absent: {subject: reason} for a subject that the call cannot be made with.
        since: first version of transformers that has what the call needs.
        heavy: True for a call that takes seconds: its tests are marked slow.
    """

    group: str
    title: str
    run: Callable[[Any], Any]
    refused: dict[str, Refusal] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    since: str | None = None
    heavy: bool = False


def calls_of(group: str) -> Callable[..., Callable[[Any], Any]]:
    """Return the decorator of a group: `@call(title, refused=..., ...)` adds a function to the table."""

    def call(title: str, **options: Any) -> Callable[[Any], Any]:
        def add(run: Any) -> Any:
            _found.append(Call(group, title, run, **options))
            return run

        return add

    return call


def table() -> list[Call]:
    """Return all calls, in the order of the page."""
    for name in GROUPS:
        importlib.import_module(f"tests.parity.{name}")
    return _found
