"""The Hugging Face kernel: its sources, its metadata, and what it does without the package (tests/loaded_kernel.py)."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import loaded_kernel
from tests.kernels.test_imports import HEAVY
from tests.processes import once
from tools import docs_tables, kernel_package

ROOT = Path(__file__).parents[1]
SOURCES = kernel_package.sources()
PYTHON = [path for path in SOURCES if path.endswith(".py")]
AT_IMPORT = {"torch", "einops", *sys.stdlib_module_names}
# Inside of functions: libraries of optional backends, and what only `python -m kda_layers` and the constructor of
# `KimiDeltaAttention` run, which a kernel does not have.
OPTIONAL = HEAVY | {"tqdm"}

# A second version of the kernel: its operator returns twice the output.
DOUBLED = """

class Doubled(EagerBackend):
    def forward(self, x: Inputs, save: bool) -> tuple[KDAOutput, list[Tensor]]:
        out, saved = super().forward(x, save)
        return out._replace(o=2 * out.o), saved


BACKEND = Doubled()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the kernel in `first` and another version of it in `second`."""

    def make(folder: Path) -> None:
        package = folder / "package"
        shutil.copytree(kernel_package.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        backend = package / "kernels" / "kda" / "backends" / "eager.py"
        backend.write_text(backend.read_text() + DOUBLED)
        kernel_package.build(folder / "first")
        kernel_package.build(folder / "second", version=2, package=package)

    return once(tmp_path_factory, "hub_kernel", make)


# ---------------------------------------------------------------- sources


def imports(tree: ast.AST, path: str) -> Iterator[str]:
    """The modules that a shipped file imports: `torch.nn`, or the path of a shipped file or folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module)
        elif isinstance(node, ast.ImportFrom):
            folder = "/".join(Path(path).parts[: -node.level])
            assert len(Path(path).parts) >= node.level, "above the kernel"
            base = "/".join(part for part in (folder, (node.module or "").replace(".", "/")) if part)
            for alias in node.names:
                inside = f"{base}/{alias.name}".lstrip("/")
                yield f"/{inside if f'{inside}.py' in SOURCES or f'{inside}/__init__.py' in SOURCES else base}"


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def running(path: str, functions: bool) -> ast.AST:
    """A file without what only type checkers read, and, unless `functions`, without the bodies of its functions."""
    tree = ast.parse(SOURCES[path])
    for node in ast.walk(tree):
        if is_for_type_checkers(node) or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not functions):
            node.body = []
    return tree


def missing(found: set[str]) -> list[str]:
    """The files of ours among these that do not ship."""
    paths = [name.strip("/") for name in found if name.startswith("/")]
    written = kernel_package.NAMESPACE_FILE.removesuffix(".py")  # for each variant
    return [p for p in paths if p not in ("", written) and not {f"{p}.py", f"{p}/__init__.py"} & SOURCES.keys()]


def others(found: set[str]) -> set[str]:
    return {name.split(".")[0] for name in found if not name.startswith("/")}


def test_what_ships_imports_the_standard_library_torch_einops_and_itself() -> None:
    wrong = {}
    for path in PYTHON:
        found = set(imports(running(path, functions=False), path))
        # Folders `triton` are imported where a backend launches what is in them, as in the package.
        allowed = AT_IMPORT | ({"triton"} if Path(path).parent.name == "triton" else set())
        wrong[path] = [*(others(found) - allowed), *missing(found)]
    assert {"kernels/kda/op.py", "modeling/layer/layer.py", "hub_kernel/layers.py"} <= wrong.keys()
    assert {path: names for path, names in wrong.items() if names} == {}


def test_functions_of_what_ships_import_nothing_that_is_missing() -> None:
    wrong = {}
    for path in PYTHON:
        found = set(imports(running(path, functions=True), path))
        allowed = AT_IMPORT | OPTIONAL | ({"transformers"} if path == "modeling/layer/layer.py" else set())
        wrong[path] = [*(others(found) - allowed), *missing(found)]
    assert {path: names for path, names in wrong.items() if names} == {}


def test_every_cuda_source_ships() -> None:
    kernels = ROOT / "kda_layers" / "kernels"
    there = {p.relative_to(kernels.parent).as_posix() for p in kernels.rglob("*") if p.suffix in (".cu", ".cuh")}
    assert there
    assert there <= SOURCES.keys()


def test_an_id_tells_sources_backends_and_versions_apart() -> None:
    changed = SOURCES | {"kernels/kda/op.py": b""}
    ids = [
        kernel_package.identifier(files, backend, version)
        for files in (SOURCES, changed)
        for backend in kernel_package.BACKENDS
        for version in (1, 2)
    ]
    assert len(set(ids)) == len(ids)
    assert all(name.isidentifier() for name in ids)
    assert kernel_package.identifier(SOURCES, "cpu", 1) == ids[0]


def test_a_build_is_whole_and_the_same_again(built: Path, tmp_path: Path) -> None:
    stale = tmp_path / "torch-cuda" / "stale.py"
    stale.parent.mkdir()
    stale.write_text("")
    (tmp_path / "site").mkdir()  # mkdocs writes there
    names = kernel_package.build(tmp_path)
    for backend, name in names.items():
        folder = tmp_path / f"torch-{backend}"
        files = {p.relative_to(folder).as_posix() for p in folder.rglob("*.*")}
        assert files == {*SOURCES, kernel_package.NAMESPACE_FILE, "metadata.json"}
        for path in files:
            again = (built / "first" / f"torch-{backend}" / path).read_bytes()
            assert (folder / path).read_bytes() == again
        assert f'NAMESPACE = "{name}"' in (folder / kernel_package.NAMESPACE_FILE).read_text()
    assert (tmp_path / "site").exists()
    assert (tmp_path / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel_package.main(["--output", str(tmp_path), "--version", "3"]) == 0
    (name,) = re.findall(r"torch-cpu: (kda_layers_cpu_\w+)", capsys.readouterr().out)
    found = json.loads((tmp_path / "torch-cpu" / "metadata.json").read_text())
    assert (found["id"], found["version"]) == (name, 3)
    with pytest.raises(SystemExit):
        kernel_package.main(["--output", str(tmp_path), "--version", "0"])
    assert "--version must be 1 or more, got 0" in capsys.readouterr().err


def test_the_card_takes_its_figures_from_result_files() -> None:
    found = docs_tables.results()
    card = kernel_package.card(found)
    assert kernel_package.CARD.read_text().split("<!-- measured -->")[0] in card
    runs = set(re.findall(r"`((?:gpu|cpu)-[\w-]+)`", card))
    assert {"gpu-context", "gpu-training-h32", "gpu-decode-host", "cpu-operator"} == runs
    for name in runs:
        stamp = found[name]["stamp"]
        assert f"{stamp['date']} | {stamp['commit']} |" in card
        assert f"{stamp.get('gpu') or stamp['cpu']} | {stamp['torch']} |" in card
    template = re.sub(r"```.*?```", "", kernel_package.CARD.read_text(), flags=re.S)
    assert not re.findall(r"\d[\d.,]* ?(?:%|x faster|(?:ms|us|times|fold|MiB|GiB|MB|tokens/s)\b)", template)


def test_the_oldest_version_of_the_library_is_the_same_everywhere() -> None:
    assert f'"kernels>={kernel_package.OLDEST_LIBRARY}"' in (ROOT / "pyproject.toml").read_text()
    assert f"`kernels` {kernel_package.OLDEST_LIBRARY}" in (ROOT / "docs" / "guides" / "hub_kernel.md").read_text()


# ---------------------------------------------------------------- loaded


def library() -> Any:
    return pytest.importorskip("kernels", reason="the `kernels` library of the dev extra is not installed")


@pytest.mark.parametrize("backend", kernel_package.BACKENDS)
def test_the_library_accepts_the_metadata(built: Path, backend: str) -> None:
    library()
    pytest.importorskip("kernels._rust", reason="`kernels` has digests of its own from 0.17 on")
    from kernels._rust import Digest, Metadata
    from kernels.python_deps import validate_dependencies
    from kernels.variants import get_variants_local

    folder = built / "first" / f"torch-{backend}"
    found = Metadata.read_from_file(folder / "metadata.json")
    assert found.name.python_name == "kda_layers"
    assert (found.version, found.license, found.python_depends) == (kernel_package.VERSION, "Apache-2.0", ["einops"])
    assert str(found.backend.backend_type).lower().endswith(backend)
    found.digest.validate(Digest.hash_variant(found.digest.algorithm, folder))
    validate_dependencies("kda_layers", found.python_depends, type("Backend", (), {"name": backend}))
    assert {v.variant_str for v in get_variants_local(built / "first")} == {"torch-cpu", "torch-cuda"}


def results(factory: pytest.TempPathFactory, built: Path, group: str) -> dict[str, str]:
    def make(folder: Path) -> None:
        found = loaded_kernel.run(group, built / "first", built / "second")
        (folder / "results.json").write_text(json.dumps(found))

    return json.loads((once(factory, f"hub_kernel_{group}", make) / "results.json").read_text())


CHECKS = [(group, f.__name__) for group, checks in loaded_kernel.GROUPS.items() for f in checks]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "check"), CHECKS)
def test_loaded_in_a_fresh_process(
    group: str, check: str, built: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    library()
    if group == "cuda" and not torch.cuda.is_available():
        pytest.skip("the torch-cuda variant launches kernels on an NVIDIA GPU only")
    assert results(tmp_path_factory, built, group)[check] == ""


def test_transformers_takes_this_version_of_the_library() -> None:
    """The checks of `functions` above lower transformers' bound in their process if this version is too old for it."""
    installed = library().__version__
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        bound = f"{import_utils.KERNELS_MIN_VERSION} <= kernels < {import_utils.KERNELS_MAX_VERSION}"
        pytest.skip(f"transformers asks for {bound}; the tests have {installed}, and ran with its bound lowered")
