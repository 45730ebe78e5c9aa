"""`python -m tools.kernel_package`: build the Hugging Face kernel, for the `kernels` library, into build/.

    build/README.md, build/LICENSE       the model card and the licence
    build/torch-cpu/, build/torch-cuda/  a variant: Python and CUDA sources, and metadata.json

The variants hold the same sources, in the folders that they have in `kda_layers`, whose imports among themselves are
relative. A variant differs in its id, which is also its namespace in torch.ops, and which contains a digest of all
sources: so versions and variants can be loaded into one process.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import docs_tables
from tools.docs_tables import ROOT

PACKAGE = ROOT / "kda_layers"
CARD = Path(__file__).with_name("kernel_card.md")
NAME = "kda-layers"
VERSION = 1  # of the interface; raise it where a caller has to change
BACKENDS = ("cpu", "cuda")
OLDEST_LIBRARY = "0.16.2"  # of the versions of `kernels` that the kernel was loaded with
REQUIRES = ("einops",)  # beside torch; of the names that the `kernels` library allows
SUFFIXES = (".py", ".cu", ".cuh")
FOLDERS = ("kernels", "hub_kernel")
# What the forward of a layer needs; the rest of modeling imports transformers.
MODELING = (
    "checks", "inputs/__init__", "inputs/arguments", "layer/__init__", "layer/decode_plan", "layer/fast_paths",
    "layer/forward", "layer/fused_sums", "layer/layer", "layer/remembered", "layer/slots", "layer/states",
    "layer/weights", "swap/__init__", "swap/stock_layer",
)  # fmt: skip
# Files in which the kernel differs from the package; namespace.py is a variant's own.
WRITTEN = {
    "__init__.py": '"""Kimi Delta Attention as a Hugging Face kernel."""\n\nfrom .hub_kernel import *\n',
    "modeling/__init__.py": '"""What the forward of a KDA layer needs."""\n',
}
NAMESPACE_FILE = "kernels/namespace.py"


def sources(package: Path = PACKAGE) -> dict[str, bytes]:
    """Return {path in a variant: contents} of what all variants share."""
    paths = [p for folder in FOLDERS for p in (package / folder).rglob("*") if p.suffix in SUFFIXES]
    paths += [package / "modeling" / f"{name}.py" for name in MODELING]
    files = {p.relative_to(package).as_posix(): p.read_bytes() for p in paths}
    del files[NAMESPACE_FILE]
    return dict(sorted((files | {path: text.encode() for path, text in WRITTEN.items()}).items()))


def identifier(files: Mapping[str, bytes], backend: str, version: int) -> str:
    """Return the id of a variant: a Python identifier that other sources, backends and versions do not have."""
    digest = hashlib.sha256(json.dumps([version, {p: _sha256(text) for p, text in files.items()}]).encode())
    return f"{NAME.replace('-', '_')}_{backend}_{digest.hexdigest()[:12]}"


def metadata(files: Mapping[str, bytes], name: str, backend: str, version: int) -> dict[str, Any]:
    """Return metadata.json of a variant as the `kernels` library reads it."""
    return {
        "name": NAME,
        "id": name,
        "version": version,
        "kernels-minver": OLDEST_LIBRARY,
        "license": "Apache-2.0",
        "python-depends": list(REQUIRES),
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": {path: _sha256(text) for path, text in files.items()}},
    }


def build(output: Path, version: int = VERSION, package: Path = PACKAGE) -> dict[str, str]:
    """Write the kernel of the sources in `package` into the folder `output`.

    Folders of earlier builds in `output` are replaced, and nothing else there is touched.

    Returns:
        {backend: id} of the variants.
    """
    shared, names = sources(package), {}
    for backend in BACKENDS:
        names[backend] = name = identifier(shared, backend, version)
        text = f'"""The name under which torch knows this build."""\n\nNAMESPACE = "{name}"\n'
        files = dict(sorted((shared | {NAMESPACE_FILE: text.encode()}).items()))
        folder = output / f"torch-{backend}"
        shutil.rmtree(folder, ignore_errors=True)
        for path, contents in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(contents)
        (folder / "metadata.json").write_text(json.dumps(metadata(files, name, backend, version), indent=2) + "\n")
    (output / "README.md").write_text(card(docs_tables.results()))
    shutil.copy(ROOT / "LICENSE", output / "LICENSE")
    return names


def card(found: Mapping[str, Any]) -> str:
    """Return the model card, with what is measured taken from the result files `found`."""
    return docs_tables.with_blocks(CARD.name, CARD.read_text(), {"measured": measured}, found)


def measured(found: Mapping[str, Any]) -> str:
    """Return the card's tables: times of the operator, and on what and when each was taken."""
    rows = [row for row in docs_tables.measured(found) if row.name != "gpu-swap"]  # of a swapped model, not of a kernel
    fields = ("torch", "cuda", "driver", "flash-linear-attention", "transformers", "date", "commit")
    lines = [docs_tables.speed_of(rows, found), "", f"| run | device | {' | '.join(fields)} |", "|" + " --- |" * 9]
    for name in dict.fromkeys(row.name for row in rows):
        stamp = found[name]["stamp"]
        cells = (f"`{name}`", stamp.get("gpu") or stamp["cpu"], *(stamp.get(field, "none") for field in fields))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _sha256(contents: bytes) -> str:
    return base64.b64encode(hashlib.sha256(contents).digest()).decode()


def main(argv: Sequence[str] | None = None) -> int:
    """Build the kernel and print where its variants are."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.kernel_package", description="Build the Hugging Face kernel of this package."
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="folder (%(default)s)")
    parser.add_argument("--version", type=int, default=VERSION, help="version of the interface (%(default)s)")
    args = parser.parse_args(argv)
    if args.version < 1:
        parser.error(f"--version must be 1 or more, got {args.version}")
    for backend, name in build(args.output, args.version).items():
        print(f"{args.output / f'torch-{backend}'}: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
