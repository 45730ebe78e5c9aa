"""The page "What works", from the table of calls that tests/parity holds models to."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tests.parity.calls import Call, table

COLUMNS = {
    "kda": "`KDAForCausalLM`",
    "hybrid": "hybrid",
    "converted": "converted Llama",
    "kimi": "swapped Kimi-Linear",
}
HEAD = """\
# What works

Everyday calls of transformers, TRL, PEFT and accelerate, each tried by a test on tiny models of four kinds and on a
stock Llama, on a CPU. "yes": the result is checked, and of the same kind as the Llama's. A letter: the call raises an
error that says why not, or cannot be made; the reason is given below the table.

The models are a `KDAForCausalLM` of KDA layers alone; one with a softmax layer (a hybrid); a model that
`convert_attention(llama, layers="1:1")` made; and a Kimi-Linear after `swap_attention(model)`, or from
`load_pretrained`, which stands for `from_pretrained` in its column.

Generated from `tests/parity` by `python -m tools.docs`.
"""


def page() -> str:
    """Return the page."""
    groups = itertools.groupby(table(), key=lambda call: call.group)
    return "\n".join([HEAD, *(section(group, calls) for group, calls in groups)])


def section(group: str, calls: Iterable[Call]) -> str:
    """Return a heading, a table with a row for each call, and the reasons."""
    lines = [f"## {group}", "", "| call | " + " | ".join(COLUMNS.values()) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    reasons: dict[str, str] = {}
    for call in calls:
        title = call.title + (f" (transformers {call.since} or newer)" if call.since else "")
        lines.append(
            f"| {title.replace('|', chr(92) + '|')} | " + " | ".join(cell(call, n, reasons) for n in COLUMNS) + " |"
        )
    notes = [f"- **{letter}**: {reason}." for reason, letter in reasons.items()]
    return "\n".join([*lines, "", *notes, *([""] if notes else [])])


def cell(call: Call, name: str, reasons: dict[str, str]) -> str:
    """Return "yes", or the letter of the reason, which is added to `reasons` ({reason: letter}) if it is new."""
    if name in call.refused:
        reason = call.refused[name].reason
    elif name in call.absent:
        reason = call.absent[name]
    else:
        return "yes"
    return reasons.setdefault(reason, chr(ord("a") + len(reasons)))
