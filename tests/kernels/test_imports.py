"""Who imports whom, what importing costs, and rules of style that the source alone can show."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import kda_layers

PACKAGE = Path(kda_layers.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
KERNELS = [f for f in FILES if f.is_relative_to(PACKAGE / "kernels")]
TESTING = sorted(PACKAGE.glob("testing/*.py"))  # stands beside the package, and nothing of it imports it
BACKENDS = [f for f in KERNELS if f.parent.name == "backends" and f.name != "__init__.py"]
HEAVY = {"triton", "fla", "cuda", "cupy", "pynvml"}  # only inside functions, and only where a backend needs them
# Triton compiles functions of a module that has imported it: so these modules are only imported inside functions.
TRITON = [f for f in KERNELS if f.parent.name == "triton" and "@triton.jit" in f.read_text()]

# A folder for each operator; the rest of kernels serves all of them and knows none.
OPERATORS = ("kda", "attention_bias")
# In `fused`, where a file is an operator: what serves all of them, and the other operators that one uses.
FUSED_PARTS, FUSED_OF = {"mechanism", "rows", "triton"}, {"linear_step": {"swiglu"}}
LAYER_STEP = "kernels.kda.cuda.layer_step"  # an operator that is made of parts of kda
ABOVE = {"over_ranks": {"kda"}, "fused": {"kda"}}  # folders that use operators, and which
FLA = "kda.fla"  # flash-linear-attention's kernels, for the fused operators too, and the interface of its functions
FLA_INTERFACE = f"{FLA}.api", f"{FLA}.gated_delta_rule"
WITH_OPERATORS = LAYER_STEP, *(f"kernels.{name}" for name in FLA_INTERFACE)  # not kernels of one backend
# Inside an operator's folder: X -> what of that folder it may import.
INSIDE = {
    "activations": set(),
    "int8_state": set(),
    "contract": {"activations"},
    "reference": {"activations", "contract"},
    "checks": {"activations", "contract"},
    "drafts": {"checks", "contract", "reference"},
    "op": {"checks", "contract", "reference"},
    "slots": {"contract"},
}
# Front doors: what users import by these paths.
DOORS = {"kernels", "kernels.fla_api", "kernels.reference"}

# Modules that read the environment: for the requested backend, the engines to plug into and the directory of the
# kernel cache, which affect no result.
READERS = {
    "kda_layers.kernels.registry",
    "kda_layers.engines",
    "kda_layers.kernels.cuda.cache",
}


def name_of(file: Path) -> str:
    """kda_layers.kernels.kda.op for .../kda_layers/kernels/op.py."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, file: Path) -> Iterator[str]:
    """Full names of the modules that a tree imports, and of the names that it takes from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parts = file.relative_to(PACKAGE.parent).parts[: -node.level]
                module = ".".join([*parts, module] if module else parts)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def ours(file: Path) -> set[str]:
    """The modules of kda_layers that a file imports, as kernels.contract, modeling.layer.layer, ..."""
    known = {name_of(f) for f in FILES}
    found = set()
    for name in imports(ast.parse(file.read_text()), file):
        while name and name not in known:
            name = name.rpartition(".")[0]
        if name:
            found.add(name.removeprefix("kda_layers").removeprefix("."))
    return found


def of_kernels(file: Path) -> set[str]:
    """Return a file's imports from kernels, as kda.contract, cuda.build, ...; fail if it imports from above them."""
    found = ours(file)
    assert [n for n in found if not n.startswith("kernels")] == [], "kernels import nothing above them"
    return {n.removeprefix("kernels.") for n in found}


def rule_of(files: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make a test of a rule that every one of the files keeps; it names all that break it."""

    def test_of(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            broken = {}
            for file in files:
                try:
                    rule(file)
                except AssertionError as error:
                    broken[name_of(file)] = str(error)
            assert broken == {}

        test.__name__, test.__doc__ = rule.__name__, rule.__doc__
        return test

    return test_of


def test_the_files_are_found() -> None:
    assert {"contract", "op", "reference", "registry"} <= {f.stem for f in KERNELS}
    assert "eager" in {f.stem for f in BACKENDS}
    assert "kda.contract" in of_kernels(PACKAGE / "kernels" / "kda" / "op.py")
    assert {"forward", "backward"} <= {f.stem for f in TRITON}


@rule_of(KERNELS)
def test_kernels_import_each_other_relatively(file: Path) -> None:
    """The folder can be moved as a whole."""
    absolute = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom) and not n.level]
    assert [n.module for n in absolute if n.module and n.module.startswith("kda_layers")] == []


@rule_of(KERNELS)
def test_kernels_import_downwards(file: Path) -> None:
    found, name = of_kernels(file), name_of(file).removeprefix("kda_layers.")
    if name in DOORS:
        return
    folder, *inside = name.removeprefix("kernels.").split(".")
    operators = {n.split(".")[0] for n in found} & set(OPERATORS)
    fused = {n.split(".")[1] for n in found if n.startswith("fused.")}
    if folder == "fused" and inside:
        assert {n for n in found if n.startswith("kda.")} <= {f"{FLA}.package"}
        of_all = set(inside) & FUSED_PARTS
        assert fused <= (FUSED_PARTS if of_all else FUSED_PARTS | FUSED_OF.get(inside[0], set())) | {inside[-1]}
    if folder not in OPERATORS:
        assert operators <= ABOVE.get(folder, set()), "what serves all operators knows none"
        return
    assert operators <= {folder}, "operators do not know each other"
    own = {n.removeprefix(f"{folder}.") for n in found if n.startswith(f"{folder}.")}
    if file in BACKENDS:
        parts = {n.split(".")[0] for n in own}
        assert parts & {"op", "backends"} == set()
        assert found.isdisjoint(FLA_INTERFACE)
        others = {b.stem for b in BACKENDS if b.parent == file.parent} - {file.stem}
        assert parts & others == set(), "a backend knows no other one"
    elif len(inside) == 1 and not file.name.startswith("__init__"):
        assert own <= INSIDE[inside[0]]
    elif inside and not name.startswith(WITH_OPERATORS):
        assert {n.split(".")[0] for n in own} & {"op", "backends"} == set()


@rule_of([f for f in FILES if f not in KERNELS + TESTING])
def test_what_is_above_the_kernels_knows_no_backend(file: Path) -> None:
    inside = {"backends", "cuda", "reference", *(b.stem for b in BACKENDS)}
    found = {n for n in ours(file) if n.startswith("kernels.") and set(n.split(".")[1:]) & inside}
    found.discard(f"{LAYER_STEP}.op")
    assert found == ({"kernels.cuda.toolchain"} if file.name == "__main__.py" else set())


@rule_of([f for f in FILES if f not in TESTING])
def test_the_package_does_not_need_its_testing(file: Path) -> None:
    assert [n for n in ours(file) if n.startswith("testing")] == []


@rule_of(FILES)
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


@rule_of(FILES)
def test_the_environment_is_read_where_it_is_said(file: Path) -> None:
    tree = ast.parse(file.read_text())
    readers = {"environ", "environb", "getenv", "putenv"}
    reads = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in readers}
    reads |= {n.rpartition(".")[2] for n in imports(tree, file) if n.startswith("os.")} & readers
    assert reads == ({"environ"} if name_of(file) in READERS else set())


@rule_of(KERNELS)
def test_every_argument_has_a_name(file: Path) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    takers = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, functions) and n.args.kwarg]
    assert [f"line {n.lineno}: **{n.args.kwarg.arg}" for n in takers] == []


VAGUE = re.compile(r"(What|Of|Which|Where|How|Those|Whether)\b")


def vague_docstrings(source: str) -> list[str]:
    """Return the first lines of docstrings that begin with neither a verb nor a noun."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return [text.splitlines()[0] for text in texts if VAGUE.match(text)]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    root = PACKAGE.parent
    folders = ("kda_layers", "tools", "benchmarks", "examples", "tests")
    files = [file for folder in folders for file in (root / folder).rglob("*.py")]
    assert len(files) > 100
    found = {str(file.relative_to(root)): vague_docstrings(file.read_text()) for file in files}
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_vague_docstrings_are_found() -> None:
    source = '"""{}"""\nclass A:\n    """{}"""\n    def f(self):\n        """{}"""\nasync def g():\n    """{}"""\n'
    texts = ["What it is.", "Of a class.", "Where it lies.", "Whether it holds."]
    assert sorted(vague_docstrings(source.format(*texts))) == sorted(texts)
    assert vague_docstrings(source.format("Howls.", "Offsets.", "", "Return what it is.")) == []


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
    """Both work in a process in which importing any of these libraries fails."""
    code = f"""
import sys, torch
sys.modules.update(dict.fromkeys({sorted(HEAVY - {"triton"})}))  # None: an import of it raises
import kda_layers
q, v = torch.ones(1, 3, 1, 4), torch.ones(1, 3, 1, 4)
print(kda_layers.kda(q, q, v, q, v[..., 0], lower_bound=-5.0, backend="eager").o.shape[1])
"""
    assert run_python(code) == "3"


# The rooms of modeling, lowest first: a file imports from its own room, from rooms below, and from those beside it as
# far as these do not import from its own.
FLOORS = (
    {"seams", "checks", "inputs"},
    {"layer"},
    {"cuda_graphs", "parallel"},
    {"models"},
    {"swap", "serving", "checkpoints", "explanation"},
)
ROOMS = [f for f in FILES if f.is_relative_to(PACKAGE / "modeling") and f.stem != "__init__"]


def room_of(module: str) -> str:
    """inputs for modeling.inputs.sequences."""
    return module.split(".")[1]


@rule_of(ROOMS)
def test_modeling_imports_downwards(file: Path) -> None:
    room = room_of(name_of(file).removeprefix("kda_layers."))
    floor = next((i for i, rooms in enumerate(FLOORS) if room in rooms), None)
    assert floor is not None, f"{room} is on no floor"
    reached = set.union(*FLOORS[: floor + 1])
    assert {room_of(n) for n in ours(file) if n.startswith("modeling.")} <= reached


def test_rooms_beside_each_other_import_one_way() -> None:
    edges = {
        (room_of(name_of(f).removeprefix("kda_layers.")), room_of(n))
        for f in ROOMS
        for n in ours(f)
        if n.startswith("modeling.")
    }
    assert ("models", "layer") in edges
    assert {(a, b) for a, b in edges if a != b and (b, a) in edges} == set()
