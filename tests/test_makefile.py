"""The Makefile's GPU targets, and that tests of stock models pass with flash-linear-attention installed."""

from __future__ import annotations

import os
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
