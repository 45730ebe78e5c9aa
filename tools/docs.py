"""`python -m tools.docs`: write every generated part of README and docs; `--check`: exit 1 if a committed one differs.

Committed: README's table, the caption of its figure, docs/assets, docs/guides/what_works.md. Not committed:
docs/benchmarks/runs, a page for each result file.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tools import docs_calls, docs_figures, docs_tables
from tools.docs_tables import ROOT

RUNS = Path("docs/benchmarks/runs")
WHAT_WORKS = Path("docs/guides/what_works.md")


def committed() -> dict[Path, str]:
    """Return {path from the root: text} of each committed file that is generated or holds a generated part."""
    found = docs_tables.results()
    files = {Path(path): figure(found) for path, figure in docs_figures.COMMITTED.items()}
    files[WHAT_WORKS] = docs_calls.page()
    return files | {Path(p): docs_tables.filled(p, (ROOT / p).read_text(), found) for p in docs_tables.BLOCKS}


def runs() -> dict[Path, str]:
    """Return the pages and figures of all result files."""
    found = docs_tables.results()
    files = {RUNS / "index.md": docs_tables.index(found)}
    for name, contents in found.items():
        files[RUNS / f"{name}.md"] = docs_tables.page(contents)
    return files | {RUNS / f"{name}.svg": figure(found) for name, figure in docs_figures.RUNS.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; name committed files that differ")
    args = parser.parse_args(argv)
    if args.check:
        old = [path for path, text in committed().items() if _read(ROOT / path) != text]
        for path in old:
            print(f"{path}: not as generated; run `python -m tools.docs`", file=sys.stderr)
        return int(bool(old))
    shutil.rmtree(ROOT / RUNS, ignore_errors=True)
    for path, text in (committed() | runs()).items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
    return 0


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
