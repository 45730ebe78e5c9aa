"""Versions of the package in turns, on a CPU with the eager backend."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import versions
from benchmarks.gpu.cases import Case

ROOT = Path(__file__).resolve().parents[1]
MACHINE = "tests.test_benchmarks:WallClock"


def copy_of(folder: Path, source: str = "", *change: str) -> Path:
    """A folder with the package, one of its files changed."""
    shutil.copytree(ROOT / "kda_layers", folder / "kda_layers", ignore=shutil.ignore_patterns("__pycache__"))
    if source:
        path = folder / source
        text = path.read_text()
        assert text.count(change[0]) == 1
        path.write_text(text.replace(*change))
    return folder


def rows(text: str) -> dict[str, list[str]]:
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:])
    return {row[1]: row for row in cells}


@pytest.mark.slow
def test_versions_are_the_packages_of_their_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that normalises with another epsilon has other results; an equal one has the same bits."""
    source = "kda_layers/kernels/kda/reference.py", "L2NORM_EPS = 1e-6", "L2NORM_EPS = 1e-2"
    named = {"now": ROOT, "equal": copy_of(tmp_path / "equal"), "other": copy_of(tmp_path / "other", *source)}
    options = ["--backend", "eager", "--cases", "training:1,66,1:gates=fast"]
    assert versions.main([*(f"{name}={folder}" for name, folder in named.items()), *options], MACHINE) == 0
    found = rows(capsys.readouterr().out)
    assert list(found) == list(named)
    assert [row[5] for row in found.values()][:2] == ["same bits"] * 2
    assert "apart" in found["other"][5]
    assert all(float(row[2]) > 0 for row in found.values())
    assert found["now"][4]  # the first is entered twice


def test_what_a_version_raises_is_raised() -> None:
    with pytest.raises(RuntimeError, match="Refusal: there is no backend 'sm91'"):
        versions.main([f"now={ROOT}", "--backend", "sm91", "--cases", "forward:1,66,1"], MACHINE)


def test_a_version_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    folder = copy_of(tmp_path)
    (folder / "kda_layers" / "__init__.py").write_text("raise SystemExit(7)\n")
    with pytest.raises(RuntimeError, match="the process of now ended with 7: prepare forward:1,66,1"):
        versions.main([f"now={folder}", "--backend", "eager", "--cases", "forward:1,66,1"], MACHINE)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert versions.main([f"now={ROOT}", "--cases", "forward:1,66,1"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("texts", [["now"], ["=."], ["now="], ["now=.", "now=HEAD"]])
def test_versions_that_are_none(texts: list[str]) -> None:
    with pytest.raises(ValueError, match="NAME=COMMIT or NAME=FOLDER with names that differ"):
        versions.main([*texts, "--cases", "forward:1,66,1"])


def test_a_commit_that_does_not_exist() -> None:
    with (
        pytest.raises(ValueError, match=r"got 'no-such-commit': .*no-such-commit"),
        versions.folder_of("no-such-commit"),
    ):
        pass


def test_a_commit_is_unpacked() -> None:
    with versions.folder_of("HEAD") as folder:
        assert (folder / "kda_layers" / "__init__.py").is_file()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ("forward:1,8192,32", ("forward", Case(1, 8192, 32), "never")),
        ("prefill:1,256,2:lengths=2x128", ("prefill", Case(1, 256, 2, lengths=(128, 128)), "never")),
        ("training:1,65536,8:kept:segments=always", ("training", Case(1, 65536, 8, kept=True), "always")),
        ("backward:1,263,2:gates=fast:group=2:lengths=2x128+7",
         ("backward", Case(1, 263, 2, "fast", 2, lengths=(128, 128, 7)), "never")),
    ],
)  # fmt: skip
def test_cases(text: str, case: tuple[str, Case, str]) -> None:
    assert versions.parse_case(text) == case


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sideways:1,2,3", "case must begin with one of forward, prefill, training, backward, got 'sideways:1,2,3'"),
        ("forward:1,2,3:fast", "case must have fields of B, T, .*, got 'fast'"),
        ("forward:1,2", "case must have sizes B,T,H after its pass, got 'forward:1,2'"),
    ],
)
def test_cases_that_are_none(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        versions.main(["now=.", "--cases", text])
