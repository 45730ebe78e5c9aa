"""The rule of every comparison: right first, then timed in turns; who refuses is listed with the reason.

All contenders of a case are prepared, and each is warmed up at the very shape, before any is timed
(benchmarks/timing.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks import timing
from benchmarks.gpu.cases import Sizes
from benchmarks.gpu.contenders import Contender, Prepared, Refusal
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.truth import Results, error
from benchmarks.timing import Times

Row = dict[str, Any]
Pick = Callable[[Results], Results]

LIMIT = 3e-2  # relative L2 error beyond which a contender is wrong
# Sums over all tokens of terms of either sign keep less of what rounding leaves of the terms.
LIMITS = {"d_A_log": 0.1, "d_dt_bias": 0.1, "d_parameters": 0.2}
EVERY_ONE = "every contender"  # in the row of a case that was not run or has no truth
RESULT = ("timed", "right")  # states of a row with something to report


class ContextLost(Exception):
    """An error has taken the device away from this process: nothing more can run in it."""


@dataclass(frozen=True)
class Setup:
    """The arguments from which a section makes its jobs."""

    machine: Machine
    sizes: Sizes
    backends: list[str]  # ours


class Job(NamedTuple):
    """One case of a section; `run` returns its rows, each holding `fields`."""

    fields: Row
    run: Callable[[], list[Row]]


class Budget:
    """A time after which no job is started."""

    def __init__(self, seconds: float | None):
        self.seconds, self.start = seconds, time.monotonic()

    def spent(self) -> bool:
        return self.seconds is not None and time.monotonic() - self.start > self.seconds


def wrong(errors: dict[str, float], limit: float = LIMIT) -> bool:
    """Return True if any error is beyond its limit, or NaN."""
    return not all(e <= max(limit, LIMITS.get(n, 0)) for n, e in errors.items())


def admit(
    c: Contender, truth: Results, machine: Machine, pick: Pick | None = None, limit: float = LIMIT
) -> tuple[Prepared | None, Row]:
    """The contender ready to be timed, or None; and what is known of it: status, errors, reason.

    `pick` chooses from its results what the truth holds, unless the contender has a truth of its own.

    Raises:
        ContextLost: the device is gone.
    """
    row: Row = {"contender": c.name, "ours": c.ours} | c.fields
    try:
        prepared = c.prepare()
        if prepared.restore is not None:
            prepared.restore()
        results = prepared.results(prepared.run())
        row |= prepared.fields or {}
        if c.truth is not None:
            truth = c.truth
        elif pick is not None:
            results = pick(results)
        row["errors"] = {n: error(results[n], t) for n, t in truth.items()}
    except Exception as problem:
        status = "refused" if isinstance(problem, (Refusal, ImportError)) else "failed"
        row |= {"status": status, "reason": reason(problem)}
        if not machine.alive():
            raise ContextLost(f"{c.name}: {row['reason']}") from problem
        return None, row
    if wrong(row["errors"], limit):
        return None, row | {"status": "wrong", "reason": errors_text(row["errors"])}
    return prepared, row | {"status": "right"}


def take_turns(prepared: dict[int, Prepared], machine: Machine) -> dict[int, Times | Exception]:
    """The times of contenders that were admitted, or why one has none."""
    broken: dict[int, Exception] = {}
    calls: dict[int, int] = {}
    for i, p in prepared.items():
        try:
            calls[i] = machine.warm_up(p.run, p.before)
        except Exception as problem:
            broken[i] = problem
    turns = timing.PASSES * timing.rounds_of(len(calls))

    def turn(i: int) -> Callable[[], list[float]]:
        return lambda: machine.turn(prepared[i].run, prepared[i].before, -(-calls[i] // turns))

    return broken | timing.in_turns({i: turn(i) for i in calls})


def timed(times: Times | Exception, floor_ms: float | None = None) -> Row:
    """The part of a row that says how long it took, and its ratio to the floor.

    Raises:
        Exception: what the contender raised while it was timed.
    """
    if isinstance(times, Exception):
        raise times
    row: Row = {"status": "timed", "time": times.summary()}
    if floor_ms is not None:
        row |= {"floor ms": floor_ms, "times floor": row["time"]["median"] / floor_ms}
    return row


def compete(
    fields: Row,
    contenders: Iterable[Contender],
    truth: Results,
    machine: Machine,
    *,
    pick: Pick | None = None,
    limit: float = LIMIT,
    floor_ms: float | None = None,
    memory: bool = False,
    more: Callable[[Contender, Prepared], Row] | None = None,
) -> list[Row]:
    """A row for each contender: admitted and timed, or why not. `more` adds to the row of one that was timed."""
    rows: list[Row] = []
    ready: dict[int, tuple[Contender, Prepared]] = {}
    for i, c in enumerate(contenders):
        prepared, row = admit(c, truth, machine, pick, limit)
        rows.append(fields | row)
        if prepared is not None:
            ready[i] = c, prepared
        if row["status"] == "failed":  # perhaps for want of memory, of which the next one should have all
            machine.collect()
    for i, times in take_turns({i: p for i, (_, p) in ready.items()}, machine).items():
        c, prepared = ready[i]
        try:
            rows[i] |= timed(times, None if c.truth is not None else c.floor_ms or floor_ms)
            if memory:
                rows[i]["MiB"] = machine.peak_extra_mib(prepared.call or prepared.run)
            rows[i] |= more(c, prepared) if more is not None else {}
        except Exception as problem:
            rows[i] |= {"status": "failed", "reason": reason(problem)}
            if not machine.alive():
                raise ContextLost(f"{c.name}: {rows[i]['reason']}") from problem
    return rows


def reason(problem: BaseException) -> str:
    """The exception's text on one line, its type first unless it is a refusal; cut where it is a page."""
    text = " ".join(str(problem).split()) or "no text"
    text = text if isinstance(problem, Refusal) else f"{type(problem).__name__}: {text}"
    return text if len(text) <= 400 else text[:400] + " ..."


def errors_text(errors: dict[str, float]) -> str:
    return "relative L2 error " + ", ".join(f"{n} {e:.2g}" for n, e in errors.items())


def run_job(section: str, job: Job, machine: Machine) -> list[Row]:
    """The job's rows; where the case itself fails (its inputs or its truth), one row that says so."""
    fields = {"section": section} | job.fields
    try:
        rows = job.run()
    except ContextLost:
        raise
    except Exception as problem:
        if not machine.alive():
            raise ContextLost(reason(problem)) from problem
        rows = [job.fields | {"contender": EVERY_ONE, "ours": True, "status": "failed", "reason": reason(problem)}]
    finally:
        machine.collect()
    return [fields | row for row in rows]


def left_out(section: str, job: Job, why: str) -> Row:
    """The row of a job that was not started."""
    return {
        "section": section, **job.fields, "contender": EVERY_ONE, "ours": False, "status": "left out", "reason": why
    }  # fmt: skip


def run_all(jobs: list[tuple[str, Job]], machine: Machine, budget: Budget, done: Callable[[list[Row]], None]) -> None:
    """Runs jobs in order and hands over each one's rows at once; of those not started, rows that say why."""
    why = None
    for section, job in jobs:
        if why is None and budget.spent():
            why = f"the budget of {budget.seconds:g} s was spent"
        if why is not None:
            done([left_out(section, job, why)])
            continue
        try:
            done(run_job(section, job, machine))
        except ContextLost as lost:
            why = f"the device was lost to {lost}"
            done([left_out(section, job, why) | {"ours": True, "status": "failed"}])
        except KeyboardInterrupt:
            why = "stopped from the keyboard"
            done([left_out(section, job, why)])


def failures(rows: list[Row]) -> list[str]:
    """Return the reasons why a run fails: nothing to report, or something of ours that is wrong or broke."""
    found = [
        f"{r['section']} {r['contender']}: {r['status']}: {r['reason']}"
        for r in rows
        if r["ours"] and r["status"] in ("wrong", "failed")
    ]
    if not any(r["status"] in RESULT for r in rows):
        found.append("nothing was timed")
    return found
