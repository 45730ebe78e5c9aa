"""Draws runs of train_lm.py into one picture and one table, and prints where they are not comparable.

python examples/compare_runs.py runs/*/run.json --output runs
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from common.cli import InputError, check_writable, exit_status
from common.plots import plot_comparison
from common.report import run_table

PARTS = ("corpus", "losses", "windows", "unigram_nats_per_token")  # of a report, besides those of its table


def load_report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
        run_table(report)
        for part in PARTS:
            report[part]
        return report
    except OSError as error:
        raise InputError(f"{path}: expected a readable file, got: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: expected a run.json of train_lm.py, got: {error!r}") from error


def compare(args: argparse.Namespace) -> int:
    names = [path.parent if path.name == "run.json" else path.with_suffix("") for path in args.runs]
    reports = {str(name): load_report(path) for name, path in zip(names, args.runs, strict=True)}
    first, *others = reports.values()
    for part in ("settings", "corpus", "machine"):
        different = [n for n, value in first[part].items() if any(o[part].get(n) != value for o in others)]
        if different:
            print(f"these runs differ in {part}: {', '.join(different)}")
    check_writable(args.output)
    plot_comparison(reports, args.output / "comparison.png")
    rows = [run_table(report).splitlines() for report in reports.values()]
    (args.output / "comparison.md").write_text("\n".join([*rows[0][:2], *(row[2] for row in rows)]) + "\n")
    print(f"comparison.png and comparison.md are in {args.output}")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN.JSON", type=Path, nargs="+", help="reports of train_lm.py")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("runs"), help="(%(default)s)")
    return exit_status("compare_runs.py", lambda: compare(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
