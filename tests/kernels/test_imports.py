"""Who imports whom, what importing costs, and rules of style that the source alone can show."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kda_layers

PACKAGE = Path(kda_layers.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
KERNELS = [f for f in FILES if f.is_relative_to(PACKAGE / "kernels")]
BACKENDS = [f for f in KERNELS if f.parent.name == "backends" and f.name != "__init__.py"]
HEAVY = {"triton", "fla", "cuda", "cupy", "pynvml"}  # only inside functions, and only where a backend needs them
# Triton compiles functions of a module that has imported it: so these modules are only imported inside functions.
TRITON = [f for f in KERNELS if f.parent.name == "triton" and "@triton.jit" in f.read_text()]

# kernels.X -> what of kda_layers.kernels it may import at all; a backend's own rule is below
LAYERS = {
    "kernels": {"attention.op"},
    "contract": set(),
    "reference": {"contract"},
    "registry": set(),
    "library": set(),
    "dispatch": {"contract", "registry", "attention.contract", "attention.dispatch"},
    "checks": {"contract", "library", "registry"},
    "torch_ops": {"checks", "contract", "dispatch", "library"},
    "op": {"checks", "contract", "dispatch", "reference", "torch_ops"},
    "fla_api": {"checks", "contract", "fla_gate", "op"},
    "fla_gate": {"checks", "contract", "reference"},
    "toolchain": {"dispatch", "cuda.build", "cuda.cache", "cuda.launch"},
    "layer_kernels": {"checks", "contract", "registry", "fla.chunk_table", "fla.package"},
    "short_conv": {"contract", "layer_kernels"},
    "attention.contract": set(),
    "attention.dispatch": {"attention.contract", "registry"},
    "attention.checks": {"attention.contract", "checks", "contract"},
    "attention.torch_ops": {"attention.contract", "attention.dispatch", "checks", "library"},
    "attention.op": {*(f"attention.{n}" for n in ("checks", "contract", "dispatch", "torch_ops")), "checks"},
}

# Who reads the environment: which backend is asked for, and where compiled kernels are kept, which changes no result.
READERS = {"kda_layers.kernels.registry", "kda_layers.kernels.cuda.cache"}


def name_of(file: Path) -> str:
    """kda_layers.kernels.op for .../kda_layers/kernels/op.py."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, file: Path) -> Iterator[str]:
    """Full names of the modules that a tree imports, and of the names that it takes from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} line {node.lineno}: a relative import"
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(file: Path) -> set[str]:
    """The modules of kda_layers that a file imports, as kernels.contract, modeling.layer, ..."""
    known = {name_of(f) for f in FILES}
    found = set()
    for name in imports(ast.parse(file.read_text()), file):
        while name and name not in known:
            name = name.rpartition(".")[0]
        if name:
            found.add(name.removeprefix("kda_layers").removeprefix("."))
    return found


def of_kernels(file: Path) -> set[str]:
    """What a file below kernels imports from kernels, as contract, eager.chunks, ...; and it imports nothing else."""
    found = ours(file)
    assert [n for n in found if not n.startswith("kernels.")] == [], "kernels import nothing above them"
    return {n.removeprefix("kernels.") for n in found}


def test_the_files_are_found() -> None:
    assert {"contract", "op", "reference", "dispatch"} <= {f.stem for f in KERNELS}
    assert "eager" in {f.stem for f in BACKENDS}
    assert "contract" in of_kernels(PACKAGE / "kernels" / "op.py")
    assert {"forward", "backward"} <= {f.stem for f in TRITON}


@pytest.mark.parametrize("file", KERNELS, ids=name_of)
def test_kernels_import_downwards(file: Path) -> None:
    found, name = of_kernels(file), name_of(file).removeprefix("kda_layers.").removeprefix("kernels.")
    if file in BACKENDS:
        operator = name.partition("backends.")[0]  # "attention." or, of KDA, nothing
        own = {n for n in found if n.removeprefix(operator).split(".")[0] in (file.stem, "cuda")}
        assert found - own <= {"contract", "reference", f"{operator}contract"}, (
            "a backend sees contract and own kernels"
        )
    elif name in LAYERS:
        assert found <= LAYERS[name]
    else:  # kernels of one backend, or something new
        parts = {n.removeprefix("attention.").split(".")[0] for n in found}
        assert (
            parts & {"dispatch", "op", "backends", "fla_api", *({b.stem for b in BACKENDS} - {file.parent.name})}
            == set()
        )


@pytest.mark.parametrize("file", [f for f in FILES if f not in KERNELS], ids=name_of)
def test_what_is_above_the_kernels_knows_no_backend(file: Path) -> None:
    inside = {"backends", "cuda", "reference", *(b.stem for b in BACKENDS)}
    assert {n for n in ours(file) if n.startswith("kernels.") and n.split(".")[1] in inside} == set()


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_heavy_imports_live_in_functions(file: Path) -> None:
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = []  # what is left runs when the file is imported
    found = list(imports(tree, file))
    if file in TRITON:
        assert {n.split(".")[0] for n in found} & HEAVY == {"triton"}
    else:
        assert {n for n in found if n.split(".")[0] in HEAVY} == set()
        assert [n for n in found if n.startswith(tuple(map(name_of, TRITON)))] == []


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_the_environment_is_read_where_it_is_said(file: Path) -> None:
    tree = ast.parse(file.read_text())
    readers = {"environ", "environb", "getenv", "putenv"}
    reads = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in readers}
    reads |= {n.rpartition(".")[2] for n in imports(tree, file) if n.startswith("os.")} & readers
    assert reads == ({"environ"} if name_of(file) in READERS else set())


@pytest.mark.parametrize("file", KERNELS, ids=name_of)
def test_every_argument_has_a_name(file: Path) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    takers = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, functions) and n.args.kwarg]
    assert [f"line {n.lineno}: **{n.args.kwarg.arg}" for n in takers] == []


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120, cwd=PACKAGE.parent
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_brings_no_gpu_library_and_leaves_the_gpu_alone() -> None:
    code = f"""
import sys, torch
before = set(sys.modules)  # torch itself imports pynvml where it is installed
import kda_layers
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(sorted(new & {HEAVY}), torch.cuda.is_initialized())
"""
    assert run_python(code) == "[] False"


def test_importing_and_calling_work_without_gpu_libraries() -> None:
    """Where importing any of them fails."""
    code = f"""
import sys, torch
sys.modules.update(dict.fromkeys({sorted(HEAVY - {"triton"})}))  # None: an import of it raises
import kda_layers
q, v = torch.ones(1, 3, 1, 4), torch.ones(1, 3, 1, 4)
print(kda_layers.kda(q, q, v, q, v[..., 0], lower_bound=-5.0, backend="eager").o.shape[1])
"""
    assert run_python(code) == "3"
