"""The Python of documentation pages, run as a reader would: in order, from the page's top, with what the page installs.

A block whose title is "Needs ..." is not run, and says why. A title "In each of 2 processes ..." runs the whole page in
so many processes, as torchrun would start them. As a script (`python -PS tests/doc_pages.py FILE`) this runs pages in
forked processes, each page in a folder of its own: torch and transformers are imported once.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r'^```python(?: title="(?P<title>[^"\n]*)")?\n(?P<code>.*?)^```$', re.S | re.M)
SECONDS = 120


class Block(NamedTuple):
    """A Python block of a page: its first line in the file, its code, and why it is not run ("" if it is)."""

    line: int
    code: str
    needs: str


def blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        title, line = match["title"] or "", text.count("\n", 0, match.start()) + 2
        needs = title.removeprefix("Needs ") if title.startswith("Needs ") else ""
        found.append(Block(line, match["code"], needs))
    return found


def processes(text: str) -> int:
    """Return in how many processes the page's code runs."""
    return max([int(n) for n in re.findall(r'^```python title="In each of (\d+) processes', text, re.M)], default=1)


def said(code: str) -> list[str]:
    """Return what the lines `print(...)  # text` say that they print."""
    return re.findall(r"^print\(.*\)  # (.*)$", code, re.M)


# ---------------------------------------------------------------- what a page installs


def installs(text: str) -> set[str]:
    """Return the requirements that a page's `pip install` lines name; the package's own are always among them."""
    wanted = {"."}
    for line in re.findall(r"pip install ([^`\n#]*)", text):
        words = [word.strip("'\"") for word in line.split()]
        wanted |= {word for word in words if not word.startswith(("-", "http")) and "==" not in word}
    return wanted


def requirements(wanted: Iterable[str]) -> set[str]:
    """Return requirements with those of this package, and of its extras (`.[plot]`), in place of its path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    for name in wanted:
        if not name.startswith("."):
            found.add(name)
            continue
        found |= set(project["dependencies"])
        for extra in filter(None, name[1:].strip("[]").split(",")):
            found |= set(project["optional-dependencies"][extra])
    return found


def installed(wanted: Iterable[str]) -> dict[str, Path]:
    """Return {entry of site-packages: its path} of distributions and all that they require, where installed here."""
    from packaging.requirements import Requirement

    entries: dict[str, Path] = {}
    open_requirements, seen = [Requirement(name) for name in wanted], set()
    while open_requirements:
        requirement = open_requirements.pop()
        key = requirement.name.lower().replace("_", "-"), tuple(sorted(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform, or of a GPU: a block that needs it says so
        for part in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            entries[part] = Path(str(distribution.locate_file(part)))
        for text in distribution.requires or ():
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                open_requirements.append(needed)
    return entries


# ---------------------------------------------------------------- running


def run(pages: dict[str, str], wanted: Iterable[str], folder: Path) -> dict[str, dict[str, str]]:
    """Run the code of `pages` ({name: Markdown}) where only `wanted` is installed, with what `folder / "given"` holds.

    Returns:
        For each page {"error": what went wrong, or "", "printed": what the first process printed}.
    """
    site = folder / "site"
    site.mkdir()
    for name, path in installed(requirements(wanted)).items():
        (site / name).symlink_to(path)
    (folder / "pages.json").write_text(json.dumps(pages))
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("KDA_LAYERS", "PYTEST"))}
    environment |= {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-PS", __file__, str(folder / "pages.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, dict[str, str]] = json.loads((folder / "results.json").read_text())
    return found


def execute(name: str, text: str, rank: int, ranks: int, port: int, results: str) -> None:
    """Run a page's blocks in this process, and leave {"error", "printed"} in the file `results`."""
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    namespace = {"__name__": "__main__"}
    output, error = io.StringIO(), ""
    with contextlib.redirect_stdout(output):
        for block in blocks(text):
            if block.needs:
                continue
            try:
                exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
            except BaseException:
                error = f"{name}, the block at line {block.line}, rank {rank}:\n{traceback.format_exc()}"
                break
    Path(results).write_text(json.dumps({"error": error, "printed": output.getvalue()}))
    os._exit(0)  # threads of gloo can keep the interpreter from ending


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def working_directory(given: Path) -> Iterator[Path]:
    """Work in a new folder that holds what the folder `given` holds."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for entry in given.iterdir():
            Path(entry.name).symlink_to(entry)
        yield Path(folder)
        os.chdir(before)


def run_page(name: str, text: str, given: Path) -> dict[str, str]:
    """Run a page in as many forked processes as it says."""
    ranks, port = processes(text), free_port()
    fork = multiprocessing.get_context("fork")
    with working_directory(given) as folder:
        files = [folder / f"rank-{rank}.json" for rank in range(ranks)]
        started = [
            fork.Process(target=execute, args=(name, text, rank, ranks, port, str(files[rank])))
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(SECONDS)
            process.kill()
            process.join()
        found = [json.loads(f.read_text()) if f.exists() else {"error": f"{name}: no result"} for f in files]
    return {"error": "\n".join(f["error"] for f in found if f["error"]), "printed": found[0].get("printed", "")}


if __name__ == "__main__":
    for module in ("torch", "transformers.modeling_utils", "transformers.generation"):
        importlib.import_module(module)
    pages_file = Path(sys.argv[1])
    given = pages_file.with_name("given")
    all_results = {name: run_page(name, text, given) for name, text in json.loads(pages_file.read_text()).items()}
    pages_file.with_name("results.json").write_text(json.dumps(all_results))
