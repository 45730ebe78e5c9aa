"""Count the wrong programs that the tests notice: `python -m tools.mutate --seed 0 --mutants 40`.

Draws files of the package by seed, one small change in each (a comparison, an operator, a constant, a condition, a
call left out), and runs the tests that reach the changed line, in random order, until one fails or the time is up.
Prints a line for each mutant and writes all of them to a JSON file. Coverage of the suite comes first and takes
minutes; `--map` keeps it. Needs `pip install coverage`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

PACKAGE = "kda_layers"
SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "//": "*",
    "/": "*", "%": "+", "and": "or", "or": "and", "is": "is not", "is not": "is", "in": "not in", "not in": "in",
    "&&": "||", "||": "&&", ">>": "<<", "<<": ">>",
}  # fmt: skip
CPP_OPERATOR = re.compile(r"(?<= )(<=|>=|==|!=|&&|\|\||<<|>>|[-+*/%<>])(?= )")
CPP_NUMBER = re.compile(r"(?<![\w.\"])\d+(?![\w.\"])")
CPP_WAIT = re.compile(r"^ +\w*(?:sync|fence|wait|commit|arrive)\w*\([^;]*\);$", re.MULTILINE)
MARKS = "not combination"  # the tests of `make test-all`
GRACE = 240  # seconds after the tests' time before a mutant counts as hanging: imports and compilers


class Mutant(NamedTuple):
    """One change of one file: the text from start to end becomes `new`."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {' '.join(self.old.split())[:60]!r} -> {self.new[:60]!r}"


def python_mutants(path: str, text: str) -> Iterator[Mutant]:
    """Changes of what Python executes; annotations and docstrings stay."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    raw = text.encode()

    def span(node: ast.AST) -> tuple[int, int]:
        return (
            starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def change(node: ast.AST, start: int, end: int, new: str) -> Mutant:
        return Mutant(path, node.lineno, start, end, raw[start:end].decode(), new)  # type: ignore[attr-defined]

    def between(node: ast.AST, left: ast.AST, right: ast.AST) -> Iterator[Mutant]:
        start, end = span(left)[1], span(right)[0]
        operator = raw[start:end].decode().strip(" ()\n")
        if operator in SWAPS:
            start += raw[start:end].index(operator.encode())
            yield change(node, start, start + len(operator), SWAPS[operator])

    def visit(node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
            case ast.Compare(left=left, comparators=[right]):
                yield from between(node, left, right)
            case ast.BinOp(left=left, right=right):
                yield from between(node, left, right)
            case ast.BoolOp(values=[left, right]):
                yield from between(node, left, right)
            case ast.Constant(value=bool(value)):
                yield change(node, *span(node), str(not value))
            case ast.Constant(value=int(value) | float(value)):
                yield change(node, *span(node), repr(value + 1))
            case ast.If(test=test) | ast.IfExp(test=test):
                yield change(node, *span(test), f"(not ({raw[slice(*span(test))].decode()}))")
            case ast.Expr(value=ast.Call()):
                yield change(node, *span(node), "pass")
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child)

    yield from visit(ast.parse(text))


def cuda_mutants(path: str, text: str) -> Iterator[Mutant]:
    """Changes of CUDA code: operators between blanks, integers, and barriers, waits and fences left out."""
    code = re.sub(r"//.*|/\*.*?\*/|^ *#.*|static_assert.*?;", lambda m: " " * len(m[0]), text, flags=re.M)
    for pattern in (CPP_OPERATOR, CPP_NUMBER, CPP_WAIT):
        for match in pattern.finditer(code):
            old = match[0]
            new = SWAPS[old] if old in SWAPS else str(int(old) + 1) if old.isdigit() else ""
            start, end = (len(code[:i].encode()) for i in match.span())
            yield Mutant(path, code.count("\n", 0, match.start()) + 1, start, end, old, new)


def draw(tree: Path, seed: int, count: int) -> list[Mutant]:
    """One mutant in each of `count` files, and again from the first when all files have one."""
    rng = random.Random(seed)
    sites: dict[str, list[Mutant]] = {}
    for file in sorted((tree / PACKAGE).rglob("*")):
        if file.suffix in (".py", ".cu", ".cuh"):
            find = python_mutants if file.suffix == ".py" else cuda_mutants
            if found := list(find(str(file.relative_to(tree)), file.read_text())):
                sites[found[0].path] = found
    paths = sorted(sites)
    rng.shuffle(paths)
    return [rng.choice(sites[paths[i % len(paths)]]) for i in range(count)]


def coverage_map(tree: Path, arguments: list[str]) -> dict[str, dict[str, list[str]]]:
    """File -> line -> test functions that execute it, from one run of the suite in this process's environment."""
    config = tree / ".mutate-coverage"
    config.write_text(f"[run]\nsource = {PACKAGE}\ndynamic_context = test_function\n")
    subprocess.run(
        [sys.executable, "-m", "coverage", "run", f"--rcfile={config}", "-m", "pytest", "-q", "-m", MARKS, *arguments],
        cwd=tree, env=environment(tree), check=False,
    )  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "coverage", "json", f"--rcfile={config}", "--show-contexts", "-o", "map.json"],
        cwd=tree, check=True,
    )  # fmt: skip
    files = json.loads((tree / "map.json").read_text())["files"]
    return {path: {n: [c for c in names if c] for n, names in f["contexts"].items()} for path, f in files.items()}


def tests_of(mutant: Mutant, reached: dict[str, dict[str, list[str]]]) -> set[str]:
    """Test functions that reach the line; for what only an import reaches, those that reach the file or, failing that,
    its folder or the nearest one above it. Of CUDA code, those that emulate what is launched from there."""
    if names := set(reached.get(mutant.path, {}).get(str(mutant.line), ())):
        return names
    for place in (mutant.path, *map(str, Path(mutant.path).parents)):
        files = [f for path, f in reached.items() if path == place or path.startswith(place + "/")]
        names = {name for f in files for tests in f.values() for name in tests}
        if ".cu" in mutant.path:
            names = {name for name in names if any(part in name for part in ("cuda_emulator", "test_cuda", "matrix"))}
        if names:
            return names
    return set()


def environment(tree: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


PLUGIN = """
import os, random, time, pytest
wanted, seed, seconds = set(os.environ["TESTS"].split()), os.environ["SEED"], float(os.environ["SECONDS_"])
started = 0.0

def name(item):
    cls = f"{item.cls.__name__}." if getattr(item, "cls", None) else ""
    return f"{item.module.__name__}.{cls}{item.originalname}"

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if name(item) in wanted]
    random.Random(seed).shuffle(items)
    global started
    started = time.monotonic()  # imports take as long as many tests

def pytest_runtest_logfinish(nodeid, location):
    if time.monotonic() - started > seconds:
        pytest.exit("time is up", returncode=0)
"""


def killed_by(tree: Path, tests: set[str], seed: int, seconds: float) -> str | None:
    """Return what notices the mutant: a test's id, "import" or "hangs"; None if it survives."""
    files = sorted({name.rpartition(".")[0].replace(".", "/") + ".py" for name in tests})
    present = [file for file in files if (tree / file).exists()]
    env = environment(tree) | {"TESTS": " ".join(tests), "SEED": str(seed), "SECONDS_": str(seconds)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", MARKS, "-p", "mutate_plugin", *present]
    try:
        run = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=seconds + GRACE)
    except subprocess.TimeoutExpired:
        return "hangs"
    if run.returncode in (0, 5):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    return failed[1] if failed else "import"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=Path.cwd(), help="checkout to change a copy of (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutants", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=120, help="of tests for each mutant (%(default)s)")
    parser.add_argument("--map", type=Path, help="JSON file that keeps the coverage between runs")
    parser.add_argument("--output", type=Path, default=Path("runs/mutants.json"))
    parser.add_argument("pytest", nargs="*", help="arguments of the run that measures coverage, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(args.tree, tree, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "build", "__pycache__"))
        (tree / "mutate_plugin.py").write_text(PLUGIN)
        if args.map and args.map.exists():
            reached = json.loads(args.map.read_text())
        else:
            reached = coverage_map(tree, args.pytest)
            if args.map:
                args.map.write_text(json.dumps(reached))
        rows = []
        for mutant in tqdm(draw(tree, args.seed, args.mutants), unit="mutant"):
            file = tree / mutant.path
            original = file.read_bytes()
            file.write_bytes(original[: mutant.start] + mutant.new.encode() + original[mutant.end :])
            start = time.monotonic()
            tests = tests_of(mutant, reached)
            killer = killed_by(tree, tests, args.seed, args.seconds) if tests else None
            file.write_bytes(original)
            rows.append({"mutant": str(mutant), "tests": len(tests), "killed_by": killer})
            tqdm.write(f"{killer or 'SURVIVES':50.50} {time.monotonic() - start:4.0f} s  {mutant}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{sum(row['killed_by'] is None for row in rows)} of {len(rows)} survive")


if __name__ == "__main__":
    main()
