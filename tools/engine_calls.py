"""The calls of an engine's KDA functions, from an unpacked wheel: which of them our plug-ins serve, and what moved.

    pip download --no-deps --only-binary=:all: -d wheel vllm==0.33.0
    unzip -q wheel/*.whl '*.py' '*METADATA' -d unpacked
    python -m tools.engine_calls unpacked          # against the record of the version that the plug-in was written for
    python -m tools.engine_calls unpacked --write  # a record for the version of the wheel

The exit code is 1 if a call differs from the record, does not bind to our function, or is neither served nor explained.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kda_layers.engines import sglang, sglang_kernel, vllm, vllm_functions

RECORDS = Path(__file__).resolve().parents[1] / "tests" / "engine_calls"
PLUGINS = {"vllm": vllm, "sglang": sglang}

# Why a call stays with the engine.
FLAG = "another implementation, which the engine prefers or its flags choose"
STAYS = {
    "vllm": {
        "_flashkda_prefill": FLAG,
        "_flashinfer_kda_prefill": FLAG,
        "flashinfer_recurrent_kda": FLAG,
        "flashinfer_fused_kda_decode": FLAG,
        "flashinfer_packed_fused_kda_decode": FLAG,
        "fused_kda_decode": FLAG,
        "kda_recoverssm_verify": "drafts of RecoverSSM, which keeps keys, decays and errors instead of states",
        "fused_kda_gate": "Ling's gate, one elementwise launch: what is called next gets its result, not A_log",
        "bailing_v3_kda_attention": "the operator around Ling's layer, which calls what is served",
        "get_fused_recurrent_kda_fwd_warmup_profiles": "sizes for warming up",
        "run_kda_projection_overlap": "projections",
    },
    "sglang": {
        "kda_fused_decode": FLAG,
        "fused_kda_decode_mtp_dspark": FLAG,
        "_fused_chain_verify_fn": "convolution and verification in one, unless SGLANG_OPT_FUSED_KDA_VERIFY=0",
    },
}
# Names with "kda" that compute nothing of the operator: classes, questions, sizes.
NOT_KERNELS = re.compile(
    "_?[A-Z]|_?(is|has|get|resolve|hybrid|validate|build)_|kda_(state|prefill_checkpoint|track|extend)|flashinfer_kda_prefill_d"
)
METHODS = {"extend", "decode", "packed_decode", "target_verify"}
OTHERS = "/amd/", "/test/", "/npu/", "/xpu/", "_gfx950", "ascend"  # hardware that we do not serve, and tests


class Call(NamedTuple):
    """A call site; `positional` is a count."""

    file: str
    function: str
    calls: str
    positional: int
    keywords: list[str]
    served_by: str | None
    stays: str | None


def find(folder: Path, engine: str) -> list[Call]:
    """Return the calls of KDA functions in an unpacked wheel, sorted."""
    found = set()
    for path in sorted((folder / engine).rglob("*.py")):
        file = path.relative_to(folder).as_posix()
        if any(part in file for part in OTHERS) or "kda" not in (source := path.read_text()):
            continue
        tree = ast.parse(source)
        targets = _vllm_targets(tree, file) if engine == "vllm" else _sglang_targets(file)
        for function, call in _calls(tree):
            if target := targets(call.func):
                name = target.rpartition(".")[2]
                keywords = sorted(keyword.arg or "**" for keyword in call.keywords)
                ours = serving(engine, target)
                stays = None if ours else STAYS[engine].get(name)
                found.add((file, function, target, len(call.args), tuple(keywords), ours or "", stays or ""))
    return [Call(*c[:4], list(c[4]), c[5] or None, c[6] or None) for c in sorted(found)]


def _calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Calls with the names of the classes and functions that they are in."""

    def walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield ".".join(names), child
            named = isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            yield from walk(child, (*names, child.name) if named else names)  # type: ignore[attr-defined]

    return walk(tree, ())


def _vllm_targets(tree: ast.Module, file: str) -> Callable[[ast.expr], str | None]:
    """Return a test for calls of what the modules that we replace export; in a layer's file, of names with KDA."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if any(module == ops or module.startswith(f"{ops}.") for ops in vllm.FUNCTIONS):
        return lambda _: None  # calls within them
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for ops in vllm.FUNCTIONS:
                if node.module == ops or node.module.startswith(f"{ops}."):
                    imported |= {a.asname or a.name: f"{ops}.{a.name}" for a in node.names if a.name.islower()}

    def target(called: ast.expr) -> str | None:
        name = _name(called)
        if isinstance(called, ast.Name) and name in imported:
            return imported[name]
        return name if module in vllm.LAYERS and _is_kernel(name) else None

    return target


def _sglang_targets(file: str) -> Callable[[ast.expr], str | None]:
    """Methods of kernels and of what chooses among them; where it is chosen, whatever is named after KDA."""
    folder, _, stem = file.removesuffix(".py").rpartition("/")
    if "/srt/layers/attention/linear" not in folder or "kda" not in stem or stem == "kda_triton":
        return lambda _: None

    def target(called: ast.expr) -> str | None:
        name = _name(called)
        if isinstance(called, ast.Attribute) and name in METHODS:
            owner = _name(called.value)
            return f"{sglang.CLASS}.{name}" if re.search("kernel|dispatcher|_triton", owner) else None
        return name if _is_kernel(name) and not folder.endswith("/kernels") else None

    return target


def _name(called: ast.expr) -> str:
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""


def _is_kernel(name: str) -> bool:
    return name == "_fused_chain_verify_fn" or ("kda" in name and not NOT_KERNELS.match(name))


def serving(engine: str, target: str) -> str | None:
    """Name of our function for a call of `target`."""
    module, _, name = target.rpartition(".")
    if engine == "vllm":
        return vllm.FUNCTIONS.get(module, {}).get(name)
    return name if module == sglang.CLASS and name not in STAYS["sglang"] else None


def problems(engine: str, calls: list[Call]) -> list[str]:
    """Calls that do not bind to our functions, and calls that are neither served nor explained."""
    found = []
    kernel = sglang_kernel.kernel(object)
    for call in calls:
        where = f"{call.file}, {call.function}: {call.calls}"
        if call.served_by is None:
            if call.stays is None:
                found.append(f"NOT REPLACED {where}")
            continue
        ours = getattr(vllm_functions if engine == "vllm" else kernel, call.served_by)
        given = [None] * (call.positional + (engine == "sglang"))  # self
        try:
            bind = inspect.signature(ours).bind_partial if "**" in call.keywords else inspect.signature(ours).bind
            bind(*given, **{name: None for name in call.keywords if name != "**"})
        except TypeError as error:
            found.append(f"TypeError {where}: {error}")
    return found


def to_text(engine: str, version: str, calls: list[Call]) -> str:
    """A record as JSON, a line for each call."""
    lines = (json.dumps({k: v for k, v in call._asdict().items() if v is not None}) for call in calls)
    return f'{{"engine": "{engine}", "version": "{version}", "calls": [\n' + ",\n".join(lines) + "\n]}\n"


def from_text(text: str) -> tuple[str, str, list[Call]]:
    """Engine, version and calls of a record."""
    record: dict[str, Any] = json.loads(text)
    calls = [Call(**{"served_by": None, "stays": None} | call) for call in record["calls"]]
    return record["engine"], record["version"], calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an unpacked wheel of vLLM or SGLang")
    parser.add_argument("--write", action="store_true", help="write the record of the wheel's version")
    args = parser.parse_args()
    infos = [info for engine in PLUGINS for info in args.folder.glob(f"{engine}-*.dist-info")]
    if len(infos) != 1:
        parser.error(f"{args.folder} must hold one wheel of {' or '.join(PLUGINS)}, got {len(infos)}")
    engine, version = infos[0].name.removesuffix(".dist-info").split("-")
    calls = find(args.folder, engine)
    text, wrong = to_text(engine, version, calls), problems(engine, calls)
    if args.write:
        (RECORDS / f"{engine}-{version}.json").write_text(text)
    record = RECORDS / f"{engine}-{version if args.write else PLUGINS[engine].TESTED}.json"
    moved = list(
        difflib.unified_diff(record.read_text().split("\n"), text.split("\n"), record.name, str(infos[0]), n=0)
    )
    print("\n".join([*moved, *wrong, f"{engine} {version}: {len(calls)} calls, {len(wrong)} problems"]))
    return bool(moved or wrong)


if __name__ == "__main__":
    sys.exit(main())
