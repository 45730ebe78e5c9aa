"""The Makefile's targets, and that tests of stock models pass with flash-linear-attention installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# A package that fails on a CPU as flash-linear-attention does, and is there for whoever asks.
FLA = """
def only_on_a_gpu(*args, **kwargs):
    raise RuntimeError("0 active drivers ([]). There should only be one.")
chunk_kda = fused_recurrent_kda = only_on_a_gpu
"""


def dry_run(target: str, *variables: str) -> str:
    environment = {n: v for n, v in os.environ.items() if n not in ("VENV", "MAKEFLAGS", "TESTS", "WORKERS")}
    command = ["make", "-n", "-B", "--no-print-directory", "-C", str(ROOT), target, *variables]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@needs_make
@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu", "memcheck", "sanitize", "bench-swap"])
def test_a_given_environment_is_taken_as_it_is(target: str) -> None:
    commands = dry_run(target, "VENV=/opt/x")
    assert "/opt/x/bin/python -m" in commands
    assert ".venv" not in commands
    assert "pip" not in commands


@needs_make
def test_without_one_it_is_made() -> None:
    commands = dry_run("test-gpu")
    assert '.venv/bin/pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev,gpu]"' in commands
    assert ".venv/bin/python -m pytest" in commands


@needs_make
def test_a_part_of_the_gpu_tests() -> None:
    assert dry_run("test-gpu", "VENV=/opt/x", "TESTS=tests/modeling").rstrip().endswith("tests/modeling")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what `make demo` reads before it trains, and a Python that records what it is asked to install."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tools/check_python.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f"""#!/bin/sh
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin; ln -sf "$0" .venv/bin/pip; ln -sf "$0" .venv/bin/python ;;
    "install "*) echo "$*" >> installed; case "$*" in *$REFUSED*) exit 1 ;; esac ;;
    "examples/train_lm.py "*) echo "$*" >> trained ;;
    *) exec {sys.executable} "$@" ;;
esac
""")
    python.chmod(0o755)
    (tmp_path / "bin" / "nvidia-smi").write_text('#!/bin/sh\n[ -n "$HAS_GPU" ]\n')
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    return tmp_path


def make_demo(clone: Path, *variables: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", "-C", str(clone), "demo", *variables]
    path = {"PATH": f"{clone / 'bin'}{os.pathsep}{os.environ['PATH']}", "REFUSED": "nothing", "HAS_GPU": ""}
    inherited = {n: v for n, v in os.environ.items() if n not in ("VENV", "MAKEFLAGS", "PYTHON")}
    return subprocess.run(command, capture_output=True, text=True, env=inherited | path | environment)


without_gpu = pytest.mark.skipif(
    sys.platform != "linux" or Path("/proc/driver/nvidia").exists(), reason="needs Linux without an NVIDIA driver"
)


@needs_make
@without_gpu
def test_the_demo_installs_the_cpu_build_without_a_gpu(clone: Path) -> None:
    assert make_demo(clone).returncode == 0
    version = next(x for x in (ROOT / "constraints.txt").read_text().split() if x.startswith("torch=="))
    torch, package = (clone / "installed").read_text().splitlines()
    assert torch.endswith(f"--extra-index-url https://download.pytorch.org/whl/cpu {version}+cpu")
    assert package.endswith("-c constraints.txt -e .[plot]")
    assert (clone / "trained").read_text() == "examples/train_lm.py --output runs/demo\n"


@needs_make
def test_the_demo_takes_torch_from_pypi_on_a_gpu(clone: Path) -> None:
    assert make_demo(clone, HAS_GPU="1").returncode == 0
    (package,) = (clone / "installed").read_text().splitlines()
    assert package.endswith("-c constraints.txt -e .[plot]")


@needs_make
@without_gpu
def test_a_cpu_build_that_is_not_found_is_explained(clone: Path) -> None:
    """Nothing else is installed: pip would take the build with CUDA."""
    done = make_demo(clone, REFUSED="+cpu")
    assert done.returncode != 0
    assert re.search(r"expected torch [\d.]+\+cpu for Python 3[\d.]+ at https://.* or in pip's find-links", done.stderr)
    assert "VENV=" in done.stderr
    assert len((clone / "installed").read_text().splitlines()) == 1
    assert not (clone / "trained").exists()


@needs_make
@pytest.mark.parametrize("bound", [">=3.99", ">=3.11,<3.11.0", "<3"])
def test_the_python_that_is_needed_is_named(bound: str, clone: Path) -> None:
    project = (clone / "pyproject.toml").read_text()
    (clone / "pyproject.toml").write_text(re.sub('requires-python = ".*"', f'requires-python = "{bound}"', project))
    done = make_demo(clone)
    assert done.returncode != 0
    assert f"expected Python {bound}, got " in done.stderr
    assert "PYTHON=python3.12" in done.stderr
    assert not (clone / "installed").exists()


@needs_make
def test_a_python_that_is_not_there_is_named(clone: Path) -> None:
    done = make_demo(clone, "PYTHON=python0")
    assert done.returncode != 0
    assert "expected Python, got no python0; choose another with PYTHON=" in done.stderr


@pytest.mark.slow
def test_stock_models_run_on_a_cpu_with_flash_linear_attention_installed(tmp_path: Path) -> None:
    package = tmp_path / "fla" / "ops" / "kda"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text('__version__ = "0.6.0"\n')
    (package / "__init__.py").write_text(FLA)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    test = "tests/modeling/test_weights.py::test_outputs_are_those_of_the_stock_layer"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", test]
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
