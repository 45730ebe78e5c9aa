"""The CUDA toolchain: compiling, the report of the compiler, the cache, and what is missing where it does not work.

All of it runs without a GPU. Launching is in test_launch.py.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kda_layers import __main__
from kda_layers.kernels.cuda import build, cache, gpu, params, toolchain
from kda_layers.kernels.cuda.arch import TARGETS

pytestmark = pytest.mark.compiles

pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")

HERE = Path(__file__).parent
ARCHS = list(TARGETS)
SOURCE = '#include "part.cuh"\nextern "C" __global__ void kernel(float* x) { x[0] = NUMBER + part(); }\n'
PART = "__device__ float part() { return 1.0f; }\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_LAYERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_memory", {})


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "number.cu").write_text(SOURCE)
    (tmp_path / "part.cuh").write_text(PART)
    return str(tmp_path / "number.cu")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variants that NVRTC has been run for."""
    run, found = build._run_nvrtc, []

    def counting(variant: str, files: dict[str, str], options: list[str]) -> tuple[bytes, str]:
        found.append(variant)
        return run(variant, files, options)

    monkeypatch.setattr(build, "_run_nvrtc", counting)
    return found


def compiled(source: str, number: int = 2, arch: str = "sm_90a") -> build.Cubin:
    return build.compile(source, {"NUMBER": number}, arch)


# ---------------------------------------------------------------- compiling


def test_every_wrapper_is_called() -> None:
    header = (build.FOLDER / "ptx.cuh").read_text()
    wrappers = set(re.findall(r"\bDEVICE\s+\w+\s+(\w+)\(", header))
    assert {"mma", "cp_async_wait", "cp_async_bulk_multicast"} <= wrappers
    calls = set(re.findall(r"(\w+)(?:<[^>]*>)?\(", (HERE / "every_wrapper.cu").read_text()))
    assert wrappers - calls == set(), "functions of ptx.cuh that every_wrapper.cu does not call"


# what the arch has beyond the others
FEATURES = [(arch, ()) for arch in ARCHS] + [
    ("sm_90a", ("HAS_WGMMA", "HAS_SETMAXNREG")), ("sm_100a", ("HAS_SETMAXNREG",)),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "features"), FEATURES)
def test_every_wrapper_compiles(arch: str, features: tuple[str, ...]) -> None:
    cubin = build.compile(str(HERE / "every_wrapper.cu"), dict.fromkeys(features, 1), arch)
    assert cubin.code.startswith(b"\x7fELF")
    assert f"for '{arch}'" in cubin.log
    warnings = [line for line in cubin.log.splitlines() if "warning" in line]
    # sm_120 has multicast copies, but is slow at them.
    assert all(arch == "sm_120a" and "'.multicast::cluster' modifier" in line for line in warnings), warnings
    assert build.resources(cubin)["every_wrapper"].spill_stores == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_resources(arch: str) -> None:
    """80 numbers a thread fit in what 128 threads may have of registers, and not in what 1024 may."""
    few, many = (
        build.resources(build.compile(str(HERE / "spills.cu"), {"THREADS": threads}, arch)) for threads in (128, 1024)
    )
    assert few.keys() == many.keys() == {"spills", "small"}
    assert few["spills"].registers > 80
    assert few["spills"].shared_bytes == 400
    assert few["spills"][2:] == (0, 0, 0)
    assert many["spills"].registers <= 64
    assert many["spills"].shared_bytes == 400
    assert min(many["spills"][2:]) >= 4 * (80 - 64)
    assert many["small"].registers < 32
    assert many["small"][1:] == (0, 0, 0, 0)


def test_spills_of_called_functions_count() -> None:
    log = """ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 20 registers, used 1 barriers, 48 bytes cumulative stack size, 400 bytes smem
ptxas info    : Function properties for called
ptxas         .     32 bytes stack frame, 3 bytes spill stores, 5 bytes spill loads"""
    assert build.resources(build.Cubin(b"", log)) == {"f": build.Resources(20, 400, 48, 11, 9)}


def test_an_unknown_report_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="expected registers and spills of f in ptxas' report, got:  in other words"):
        build.resources(build.Cubin(b"", "Compiling entry function 'f' in other words"))


def test_a_broken_source_names_variant_and_lines(tmp_path: Path, source: str) -> None:
    (tmp_path / "part.cuh").write_text("\n__device__ float part() { return nothing; }\n")
    with pytest.raises(RuntimeError) as error:
        compiled(source)
    message = str(error.value)
    assert message.startswith("compiling number [-DNUMBER=2] for sm_90a failed: NVRTC_ERROR_COMPILATION\n")
    assert 'part.cuh(2): error: identifier "nothing" is undefined' in message
    assert cache.entries() == []


def test_a_wrong_encoding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cp.async to the sum of a register and a uniform register, whose opcode differs in one bit from that to one."""
    run = build._run_nvrtc
    source = str(HERE / "every_wrapper.cu")

    def wrong(*args: Any) -> tuple[bytes, str]:
        code, log = run(*args)
        words = [low.to_bytes(8, "little") for low, _ in build._instructions(code) if low & 0xFFF == 0xFAE]
        assert words, "no cp.async"
        at = code.index(words[0])
        return code[: at + 1] + bytes([code[at + 1] - 2]) + code[at + 2 :], log

    monkeypatch.setattr(build, "_run_nvrtc", wrong)
    with pytest.raises(RuntimeError, match=r"NVRTC 1\d\.\d encoded a cp.async of every_wrapper .* for sm_90a wrongly"):
        build.compile(source, {}, "sm_90a")
    assert cache.entries() == []
    build.compile(source, {}, "sm_100a")  # has another encoding


def test_a_missing_header_is_named(tmp_path: Path, source: str) -> None:
    (tmp_path / "part.cuh").unlink()
    with pytest.raises(RuntimeError, match=r'number.cu\(1\): .*cannot open source file "part.cuh"'):
        compiled(source)


def test_an_unknown_arch_is_named(source: str) -> None:
    with pytest.raises(RuntimeError, match=r"for sm_10 failed(.|\n)*gpu-architecture"):
        compiled(source, arch="sm_10")


# ---------------------------------------------------------------- the cache


def test_a_hit_does_not_compile(source: str, runs: list[str]) -> None:
    first = compiled(source)
    assert compiled(source) == first
    assert runs == ["number [-DNUMBER=2] for sm_90a"]
    (entry,) = cache.entries()
    assert entry.name.startswith("number-sm_90a-")
    assert [p for p in cache.folder().iterdir() if p != entry] == [], "nothing but the entry is left"


@pytest.mark.parametrize("change", ["define", "arch", "source", "header", "options", "NVRTC"])
def test_what_makes_another_entry(
    change: str, source: str, tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(source)
    match change:
        case "source":
            (tmp_path / "number.cu").write_text(SOURCE.replace("x[0]", "x[1]"))
        case "header":
            (tmp_path / "part.cuh").write_text(PART.replace("1.0f", "2.0f"))
        case "options":
            monkeypatch.setattr(build, "OPTIONS", (*build.OPTIONS, "--use_fast_math"))
        case "NVRTC":
            monkeypatch.setattr(build, "nvrtc_version", lambda: (99, 9))
    compiled(source, 3 if change == "define" else 2, "sm_80" if change == "arch" else "sm_90a")
    assert len(runs) == len(cache.entries()) == 2


def test_headers_of_headers_count(source: str, tmp_path: Path, runs: list[str]) -> None:
    (tmp_path / "part.cuh").write_text('#include "deep.cuh"\n  #  include "ptx.cuh"\n' + PART)
    for text in ("", "// changed"):
        (tmp_path / "deep.cuh").write_text(text)
        compiled(source)
    assert len(runs) == 2


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit": lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:],
    "checksum": lambda data: bytes(32) + data[32:],
    "cut by one": lambda data: data[:-1],
    "cut short": lambda data: data[:20],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_rebuilt(damage: str, source: str, runs: list[str]) -> None:
    first = compiled(source)
    (entry,) = cache.entries()
    data = entry.read_bytes()
    entry.write_bytes(DAMAGES[damage](data))
    again = compiled(source)
    assert len(runs) == 2
    assert again.code == first.code
    assert compiled(source) == again
    assert len(runs) == 2, "and then it is whole again"


@pytest.mark.parametrize("obstacle", ["folder", "write"])
def test_an_unwritable_folder_falls_back_to_memory(
    obstacle: str, source: str, runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if obstacle == "folder":  # a file is in its way, which holds back root too
        (tmp_path / "cache").write_text("")
    else:
        monkeypatch.setattr("os.replace", lambda a, b, **_: (_ for _ in ()).throw(OSError(f"no space for {b}")))
    with pytest.warns(UserWarning, match="compiled kernels cannot be kept") as caught:
        cubins = [compiled(source, number) for number in (2, 3, 2)]
    assert cubins[0] == cubins[2] != cubins[1]
    assert len(caught) == 1
    assert str(tmp_path / "cache") in str(caught[0].message)
    assert len(runs) == 2
    assert cache.entries() == []
    if obstacle == "write":
        assert list(cache.folder().iterdir()) == [], "no part of an entry is left"


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `path` look like another user's: only root could really give it away."""
    fstat, inode = os.fstat, path.stat().st_ino

    def fstat_of_another_user(descriptor: int) -> os.stat_result:
        found = fstat(descriptor)
        fields = list(found)
        if found.st_ino == inode:
            fields[stat.ST_UID] = os.geteuid() + 1
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", fstat_of_another_user)


def forge(entry: Path) -> bytes:
    """Fill an entry with other contents and their checksum, as anyone who knows the public format can."""
    code = b"log\0forged"
    entry.write_bytes(hashlib.sha256(code).digest() + code)
    return b"forged"


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o602, None], ids=lambda mode: "owner" if mode is None else oct(mode))
def test_an_entry_that_others_may_have_written_is_rebuilt(
    mode: int | None, source: str, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled(source)
    (entry,) = cache.entries()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    forged = forge(entry)
    if mode == 0o600:  # what this user wrote is read: the file is forged well enough
        assert compiled(source).code == forged
        return
    if mode is None:
        give_away(entry, monkeypatch)
        reason = f"it belongs to user {os.geteuid() + 1}, neither this user"
    else:
        entry.chmod(mode)
        reason = f"it can be written by other users .mode {mode:o}., needs chmod go-w"
    with pytest.warns(UserWarning, match=f"{entry} is compiled again, not read: {reason}"):
        assert compiled(source).code == first.code
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(source).code == first.code
    assert len(runs) == 2, "the entry has been replaced"


def test_an_entry_is_no_link(source: str, runs: list[str], tmp_path: Path) -> None:
    first = compiled(source)
    (entry,) = cache.entries()
    elsewhere = entry.rename(tmp_path / "elsewhere")
    forge(elsewhere)
    forged = elsewhere.read_bytes()
    entry.symlink_to(elsewhere)
    assert compiled(source).code == first.code
    assert len(runs) == 2
    assert not entry.is_symlink()
    assert elsewhere.read_bytes() == forged


@pytest.mark.parametrize("mode", [0o775, 0o1777, None], ids=lambda mode: "owner" if mode is None else oct(mode))
def test_a_folder_that_others_may_write_to_is_not_used(
    mode: int | None, source: str, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled(source)
    (entry,) = cache.entries()
    forge(entry)
    forged = entry.read_bytes()
    if mode is None:
        give_away(cache.folder(), monkeypatch)
        reason = f"belongs to user {os.geteuid() + 1}, neither this user"
    else:
        cache.folder().chmod(mode)
        reason = f"can be written by other users .mode {mode:o}., needs chmod go-w"
    with pytest.warns(UserWarning, match=f"cannot be kept .{cache.folder()}: {reason}.*KDA_LAYERS_CACHE") as caught:
        again = [compiled(source, number) for number in (2, 2, 3)]
    assert again[0].code == again[1].code == first.code != again[2].code
    assert len(caught) == 1
    assert len(runs) == 3
    assert cache.entries() == []
    assert entry.read_bytes() == forged, "nothing is written there"


@pytest.mark.parametrize("mode", [0o755, 0o700, 0o555])
def test_a_folder_that_others_may_read_is_used(mode: int, source: str, runs: list[str]) -> None:
    compiled(source)
    cache.folder().chmod(mode)
    compiled(source)
    assert len(runs) == 1


def test_the_folder_is_private_whatever_the_umask(source: str) -> None:
    before = os.umask(0)
    try:
        compiled(source)
    finally:
        os.umask(before)
    (entry,) = cache.entries()
    assert (stat.S_IMODE(cache.folder().stat().st_mode), stat.S_IMODE(entry.stat().st_mode)) == (0o700, 0o600)


@pytest.mark.slow
def test_two_processes_at_once(source: str, tmp_path: Path) -> None:
    code = f"""
import hashlib, os, time
from pathlib import Path
from kda_layers.kernels.cuda.arch import TARGETS
from kda_layers.kernels.cuda import build
build.nvrtc_version()
Path({str(tmp_path)!r}, f"ready{{os.getpid()}}").touch()
while not Path({str(tmp_path)!r}, "go").exists():
    time.sleep(0.001)
for number in range(4):
    cubin = build.compile({source!r}, {{"NUMBER": number}}, "sm_90a")
    print(build.resources(cubin), hashlib.sha256(cubin.code).hexdigest())
"""
    root = Path(build.__file__).parents[3]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-W", "ignore:kda_layers was tested", "-c", code], cwd=root, text=True,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        while len(list(tmp_path.glob("ready*"))) < 2:
            assert all(p.poll() is None for p in processes), "a process ended before it began"
        (tmp_path / "go").touch()
        first, second = (p.communicate(timeout=120)[0] for p in processes)
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0]
    assert first == second
    assert len(first.splitlines()) == 4
    assert len(cache.entries()) == len(list(cache.folder().iterdir())) == 4
    assert all(cache._read(entry.stem) for entry in cache.entries())


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    monkeypatch.setenv("KDA_LAYERS_CACHE", "~/kernels")
    assert cache.folder() == Path("/home/someone/kernels")
    monkeypatch.setenv("KDA_LAYERS_CACHE", "")
    assert cache.folder() == Path("/var/caches/kda_layers")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")  # to be ignored, its specification says
    assert cache.folder() == Path("/home/someone/.cache/kda_layers")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == Path("/home/someone/.cache/kda_layers")


def test_a_relative_folder_is_refused(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KDA_LAYERS_CACHE", "kernels")
    message = "KDA_LAYERS_CACHE must be an absolute path, got 'kernels'"
    with pytest.raises(ValueError, match=message):
        compiled(source)
    with pytest.raises(SystemExit) as stopped:
        main(monkeypatch)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not Path("kernels").exists()


# ---------------------------------------------------------------- what is missing


@pytest.fixture
def asked_again() -> Any:
    """Reasons are found once for a process; here for each test."""
    caches = (build.problems, gpu.problems, build.nvrtc_version)
    for f in caches:
        f.cache_clear()
    yield
    for f in caches:
        f.cache_clear()


def driver_of(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    from cuda.bindings import driver

    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (driver.CUresult.CUDA_SUCCESS, version))


@pytest.mark.usefixtures("asked_again")
def test_with_all_of_it_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    major, _ = build.nvrtc_version()
    driver_of(monkeypatch, 1000 * major)
    assert build.problems() == gpu.problems() == []


@pytest.mark.usefixtures("asked_again")
def test_missing_cuda_bindings_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    (reason,) = gpu.problems()
    assert re.fullmatch(r"cuda-bindings cannot be imported \(.+\), needs pip install cuda-bindings", reason)
    assert build.problems() == [reason]
    assert toolchain.explain() == f"cannot: {reason}"
    with pytest.raises(RuntimeError, match="cuda-bindings cannot be imported"):
        toolchain.precompile(["sm_90a"])


@pytest.mark.usefixtures("asked_again")
def test_missing_nvrtc_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def raises() -> None:
        raise RuntimeError("no libnvrtc.so.13\n  searched here\n  and there")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", raises)
    assert gpu.problems() == ["NVRTC cannot be loaded (no libnvrtc.so.13), needs pip install nvidia-cuda-nvrtc"]


@pytest.mark.usefixtures("asked_again")
def test_an_old_nvrtc_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "nvrtc_version", lambda: (12, 8))
    assert gpu.problems() == ["NVRTC is 12.8, needs 12.9 or newer"]


@pytest.mark.usefixtures("asked_again")
def test_a_missing_driver_is_a_reason_not_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    def raises() -> None:
        raise RuntimeError("no libcuda.so.1\nanywhere")

    monkeypatch.setattr(driver, "cuDriverGetVersion", raises)
    assert gpu.problems() == ["the NVIDIA driver cannot be loaded (no libcuda.so.1), needs one"]
    assert build.problems() == []
    assert "; cannot launch: the NVIDIA driver cannot be loaded" in toolchain.explain()


@pytest.mark.usefixtures("asked_again")
@pytest.mark.parametrize(
    ("nvrtc", "driver", "needed"),
    [((13, 5), 13000, None), ((13, 0), 12090, "13.0"), ((12, 9), 13000, None), ((12, 9), 12030, "12.4")],
)
def test_an_old_driver_is_a_reason_not_to_launch(
    nvrtc: tuple[int, int], driver: int, needed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "nvrtc_version", lambda: nvrtc)
    driver_of(monkeypatch, driver)
    has = f"{driver // 1000}.{driver % 100 // 10}"
    reason = (
        f"the NVIDIA driver is of CUDA {has}, needs {needed} or newer for the cubins of NVRTC {build.dotted(nvrtc)}"
    )
    assert gpu.problems() == ([] if needed is None else [reason])


# ---------------------------------------------------------------- python -m kda_layers


@pytest.fixture
def few_variants(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two variants for sm_80 and one for every other arch."""

    def variants(arch: str) -> list[tuple[str, dict[str, str | int]]]:
        return [(source, {"NUMBER": n}) for n in range(2 if arch == "sm_80" else 1)]

    backends = {"new": SimpleNamespace(variants=variants), "old": SimpleNamespace(variants=lambda arch: ())}
    monkeypatch.setattr(toolchain, "registries", lambda: [SimpleNamespace(backends=lambda: backends)])


@pytest.mark.usefixtures("few_variants")
def test_precompile_fills_the_cache(runs: list[str]) -> None:
    assert toolchain.precompile(["sm_80", "sm_90a"]).startswith("3 variants for sm_80, sm_90a, 3 of them new, ")
    assert runs == [f"number [-DNUMBER={n}] for {arch}" for n, arch in ((0, "sm_80"), (1, "sm_80"), (0, "sm_90a"))]
    line = toolchain.precompile(["sm_80"])
    assert line.startswith("2 variants for sm_80, 0 of them new, ")
    assert line.endswith(str(cache.folder()))
    assert len(runs) == 3
    version = build.dotted(build.nvrtc_version())
    assert toolchain.explain().startswith(f"NVRTC {version}, 3 cubins in {cache.folder()}")


@pytest.mark.slow
@pytest.mark.usefixtures("few_variants")
@pytest.mark.parametrize("cpus", [1, 2])
def test_precompile_uses_every_cpu(cpus: int, runs: list[str], source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes compile; what one of them cannot compile is an error here."""
    monkeypatch.setattr(toolchain, "PER_PROCESS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    assert toolchain.precompile(["sm_80", "sm_90a"]).startswith("3 variants for sm_80, sm_90a, 3 of them new, ")
    assert len(runs) == (3 if cpus == 1 else 0)
    Path(source).write_text("nonsense")
    with pytest.raises(RuntimeError, match=r"compiling number \[-DNUMBER=0\] for sm_80 failed"):
        toolchain.precompile(["sm_80"])


def test_members_of_a_struct_are_packed_by_name() -> None:
    """Pack in the order of the declaration, 0 for what is left out; refuse an unknown name."""
    p = params.Params("ByName", "const float *a, *b; Pair pair; int n; float f;", "struct Pair { u32 x, y; };")
    t = torch.zeros(1)
    assert p.point(b=t, a=None) == struct.pack("@2Q", 0, t.data_ptr())
    assert p.point() == bytes(16)
    assert p.set(f=2.0, pair=(3, 4)) == struct.pack("@IIif0Q", 3, 4, 0, 2.0)
    assert p.set(n=True) == struct.pack("@IIif0Q", 0, 0, 1, 0.0)
    for pack in (p.point, p.set):
        with pytest.raises(TypeError, match="unexpected keyword argument 'c'"):
            pack(c=t)


@pytest.mark.slow
def test_other_processes_find_the_structs_of_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has imported no launcher compiles a kernel that includes its parameters."""
    kernels = [v for v in toolchain.variants_for("sm_90a") if Path(v[0]).name in ("chunk_sums.cu", "order.cu")][:2]
    monkeypatch.setenv("KDA_LAYERS_CACHE", str(tmp_path))
    monkeypatch.setattr(toolchain, "PER_PROCESS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(toolchain, "_jobs", lambda archs: [("sm_90a", *kernel) for kernel in kernels])
    assert toolchain.precompile(["sm_90a"]).startswith("2 variants for sm_90a, 2 of them new, ")


@pytest.mark.usefixtures("few_variants")
@pytest.mark.filterwarnings("ignore:compiled kernels cannot be kept")
def test_precompile_fails_where_nothing_can_be_kept(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("")
    for _ in range(2):  # also if an earlier kernel of the process has used up the warning
        with pytest.raises(SystemExit) as stopped:
            main(monkeypatch, "--precompile", "--arch", "sm_80")
        assert stopped.value.code == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert "python -m kda_layers: error: kernels cannot be kept for other processes: " in err
        assert str(tmp_path / "cache") in err
    assert len(runs) == 1, "the first one tells"


def test_a_backend_without_cuda_kernels_has_no_variants() -> None:
    from kda_layers.kernels.kda.contract import KDA

    assert list(KDA.backends()["eager"].variants("sm_90a")) == []


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["kda_layers", *arguments])
    __main__.main()


@pytest.mark.usefixtures("few_variants")
def test_main_lists_resources(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    main(monkeypatch, "--resources", "--arch", "sm_80")
    header, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["arch", "kernel", "registers", "shared", "stack", "spilled", "macros"]
    assert [(line[0], line[1], line[3:]) for line in lines] == [
        ("sm_80", "kernel", ["0", "0", "0", f"NUMBER={n}"]) for n in range(2)
    ]
    assert all(0 < int(line[2]) < 64 for line in lines)


def test_main_precompiles(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(toolchain, "precompile", lambda archs: f"for {archs}")
    monkeypatch.setattr(toolchain, "archs_here", lambda: ["sm_90a"])
    main(monkeypatch, "--precompile")
    main(monkeypatch, "--precompile", "--arch", "sm_80", "sm_120a")
    assert capsys.readouterr().out == "for ['sm_90a']\nfor ['sm_80', 'sm_120a']\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_90a"], "--arch is for --precompile and --resources"),
        (["--precompile", "--arch", "sm_70"], "invalid choice: 'sm_70'"),
        (["--precompile"], "there is no GPU here to compile for, --arch names some: sm_80 sm_90a"),
    ],
)
def test_main_names_wrong_arguments(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(toolchain, "archs_here", list)
    with pytest.raises(SystemExit):
        main(monkeypatch, *arguments)
    assert message in capsys.readouterr().err


def test_the_archs_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = [(9, 0), (8, 9), (7, 5), (9, 0)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
    assert toolchain.archs_here() == ["sm_90a", "sm_80"]
