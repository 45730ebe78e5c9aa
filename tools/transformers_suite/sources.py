"""transformers' own tests of models: in no wheel, but in the source distribution of each version."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers

CACHE = Path(__file__).resolve().parents[2] / "build" / "transformers_suite"  # git ignores it
PACKAGE = "transformers_tests"

# Modules that the tests import and that no source distribution has, with the names that are read from them.
ABSENT: dict[str, dict[str, Any]] = {
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "utils.test_configuration_utils": {
        "config_common_kwargs": {"return_dict": False, "output_hidden_states": True, "dtype": "float16"}
    },
}


def fetch() -> Path:
    """The folder of the installed version's tests as a package, downloaded with pip if it is not there yet.

    Raises:
        RuntimeError: pip could not download the source distribution.
    """
    version = transformers.__version__
    home = CACHE / version
    if not home.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            new = Path(folder) / "new"
            _unpack(_download(version, Path(folder)), new / PACKAGE)
            new.rename(home)
    return home


def load(name: str) -> ModuleType:
    """A module of the tests by its file's name, with stand-ins for the modules that are absent."""
    home = str(fetch())
    if home not in sys.path:
        sys.path.insert(0, home)
    for path, names in ABSENT.items():
        parent, _, _ = path.partition(".")
        for module in (f"{PACKAGE}.{parent}", f"{PACKAGE}.{path}"):
            sys.modules.setdefault(module, ModuleType(module))
        vars(sys.modules[f"{PACKAGE}.{path}"]).update(names)
    return importlib.import_module(f"{PACKAGE}.{name}")


def _download(version: str, folder: Path) -> Path:
    requirement = f"transformers=={version}"
    options = ["--no-deps", "--no-binary", "transformers", "--dest", str(folder)]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, requirement], capture_output=True, text=True, check=False
    )
    archives = list(folder.glob("transformers-*.tar.gz"))
    if not archives:
        raise RuntimeError(f"pip download must give the source distribution of {requirement}, got:\n{pip.stderr}")
    return archives[0]


def _unpack(archive: Path, package: Path) -> None:
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts[1:]
            source = tar.extractfile(member)
            if source is not None and len(parts) == 2 and parts[0] == "tests" and parts[1].endswith(".py"):
                with (package / parts[1]).open("wb") as file:
                    shutil.copyfileobj(source, file)
