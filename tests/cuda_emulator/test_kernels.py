"""The package's kernels with order checks, and the command line that runs them."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest

from tests import cuda_emulator
from tests.cuda_emulator.__main__ import main

pytestmark = pytest.mark.emulated

SMALL = ("--K", "64", "--H", "1")
PACKED = ("--lengths", "70,0,200", "--group", "2", "--state", "--processors", "4")


def succeeds(*arguments: str) -> bool:
    return main(arguments) == 0


@pytest.mark.parametrize("arch", ["90", "100", "80"])
def test_backward_is_ordered(arch: str) -> None:
    """Forward, reverse scan and gradients, with wgmma, with bulk copies alone, and with neither."""
    assert succeeds("backward", *SMALL, *PACKED, "--arch", arch, "--order", "--draws", "1", "--seeds", "2")


def test_forward_of_a_cluster_is_ordered() -> None:
    """Two blocks share each copy where there are many heads for the processors; chunks in the ring are recycled."""
    assert succeeds("forward", *SMALL, "--T", "900", "--B", "3", "--slow", "--processors", "4", "--order")


def test_decode_is_ordered() -> None:
    assert succeeds("decode", "--K", "64", "--T", "9", "--order", "--seeds", "2")


def test_every_result_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert succeeds("decode", "--K", "64", "--T", "3", "--gate", "softplus", "--seed", "3", "--seeds", "2")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        *(["seed", "3:"], ["o", "error"], ["state", "error"]),
        *(["seed", "4:"], ["o", "error"], ["state", "error"]),
    ]


def test_a_failure_says_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The scan forgets fence_proxy_async_shared."""
    read = cuda_emulator._closure

    def forgetful(source: Path, macros: str) -> dict[str, str]:
        files = read(source, macros)
        return files | {"scan.cuh": files["scan.cuh"].replace("fence_proxy_async_shared();", "")}

    arguments = ["forward", *SMALL, "--T", "70", "--order", "--seed=5", "--seeds", "3"]
    with mock.patch.object(cuda_emulator, "_closure", forgetful):
        assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "without fence_proxy_async_shared in between" in out
    assert "replay: python -m tests.cuda_emulator forward --K 64 --H 1 --T 70 --order --seed 5\n" in out


def test_an_error_beyond_the_budget_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("tests.cuda_emulator.kernels.limits_of", lambda _, truth, __: dict.fromkeys(truth, 0.0)):
        assert main(["decode", "--K", "64"]) == 1
    out = capsys.readouterr().out
    assert "too large" in out
    assert "replay: python -m tests.cuda_emulator decode --K 64 --seed 0\n" in out


def test_gdb_runs_the_same_command_line() -> None:
    with mock.patch("os.execvp") as execute, mock.patch("shutil.which", lambda name: name):
        main(["decode", "--K", "64", "--gdb", "--seed", "2"])
    program, command = execute.call_args.args
    assert program == "gdb"
    after = command[command.index("--args") + 1 :]
    assert after == [sys.executable, "-m", "tests.cuda_emulator", "decode", "--K", "64", "--seed", "2", "--debug"]
    assert "break emulator::fail_plainly" in command
