"""The Triton backend: whom it refuses, tiles of other sizes, tiles of packed sequences, and compiling without a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

from kda_layers.kernels import triton_package
from kda_layers.kernels.attention_bias.backends.triton import (
    BACKEND,
    Launch,
    TritonBackend,
    launches,
    sequence_numbers,
    tile_table,
)
from kda_layers.kernels.attention_bias.contract import ATTENTION, default_problem, problem_of
from tests.kernels.attention.cases import BiasedCase, call, expected, make_inputs, run, serve
from tests.kernels.cases import BEST_DEVICE, FP32, FP64, check, ids

GPU = dataclasses.replace(default_problem("cpu"), device="cuda", arch=90)
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")


def test_who_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(**changes: object) -> str:
        return "; ".join(BACKEND.unsupported(dataclasses.replace(GPU, **changes)))

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert reasons() == "triton is not installed"
    assert reasons(arch=75, dtype=FP64, D=512) == (
        "dtype is float64, needs bfloat16, float16 or float32; arch is sm_75, needs sm_80 or newer; "
        "triton is not installed; D is 512, needs at most 256"
    )
    assert reasons(device="mps", arch=0) == "device is mps, needs cuda"
    monkeypatch.undo()
    if importlib.util.find_spec("triton"):
        assert reasons() == reasons(D=256, dtype=FP32, packed=True, bias="per query and key") == ""
        monkeypatch.setattr(triton_package, "interprets", lambda: False)
        assert "device is cpu, needs cuda" in reasons(device="cpu", arch=0)
        monkeypatch.setattr(triton_package, "interprets", lambda: True)
        assert reasons(device="cpu", arch=0, dtype=FP32) == ""
        assert "dtype is bfloat16, which Triton's interpreter" in reasons(device="cpu", arch=0)


def test_the_interpreter_is_for_who_asks_by_name() -> None:
    order = list(ATTENTION.backends())
    assert order == (["triton", "eager"] if torch.cuda.is_available() else ["eager", "triton"])


@pytest.mark.parametrize("offsets", [(0, 40), (0, 0, 1, 33, 33, 65, 65), (0, 0), (0, 16, 32)], ids=str)
@pytest.mark.parametrize("block", [1, 16, 64])
def test_tiles_of_packed_sequences(offsets: tuple[int, ...], block: int) -> None:
    T = offsets[-1]
    table = tile_table(torch.tensor(offsets), T, block).tolist()
    want = [[row, a, b] for a, b in itertools.pairwise(offsets) for row in range(a, b, block)]
    assert table[: len(want)] == want
    assert all(row >= end for row, _, end in table[len(want) :])
    numbers = [n for n, (a, b) in enumerate(itertools.pairwise(offsets), 1) for _ in range(a, b)]
    assert sequence_numbers(torch.tensor(offsets), T).tolist() == numbers


TILED = [
    BiasedCase(T=50, S=70, group=2, bias="1H1S", dtype=FP32),
    BiasedCase(T=50, S=40, group=2, bias="1K1S", dtype=FP32, causal=False),
    BiasedCase(T=40, S=50, bias="11TS", dtype=FP32),
    BiasedCase(lengths=(33, 0, 1, 20), bias="111S", dtype=FP32),
    BiasedCase(T=1, S=70, H_kv=2, group=2, bias="1H1S", dtype=FP32),
]


@needs_triton
@pytest.mark.parametrize("tile", [(16, 32), (64, 16)], ids=str)
@pytest.mark.parametrize("case", **ids(TILED))
def test_results_do_not_depend_on_tiles(
    case: BiasedCase, tile: tuple[int, int], required_backends: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = make_inputs(case, BEST_DEVICE)
    serve("triton", problem_of(x, needs_grad=True), required_backends)
    names = launches(0, FP32, 16, False)
    small = TritonBackend(lambda *_: dict.fromkeys(names, Launch(*tile, 4, 1)))
    monkeypatch.setattr(ATTENTION, "_found", {"triton": small})
    truth, limits = expected(x)
    check(run(lambda x: call(x, "triton"), x), truth, limits)


@needs_triton
def test_bits_of_one_query_depend_neither_on_the_batch_nor_on_empty_slots(required_backends: frozenset[str]) -> None:
    """A decode step has the same bits alone and in a batch, in a cache of 80 slots and in one of 200."""
    x = make_inputs(BiasedCase(T=1, S=200, B=3, H_kv=2, group=2, D=32, bias="B11S", dtype=FP32), BEST_DEVICE)
    serve("triton", problem_of(x), required_backends)
    assert x.bias is not None
    x.bias[..., 80:] = -torch.inf
    many = call(x, "triton")
    for b in range(3):
        for slots in (80, 200):
            cut = {n: getattr(x, n)[b : b + 1, :slots] for n in "kv"}
            alone = x._replace(q=x.q[b : b + 1], bias=x.bias[b : b + 1, ..., :slots], **cut)
            assert call(alone, "triton").equal(many[b : b + 1]), (b, slots)


@needs_triton
@pytest.mark.parametrize("group", [1, 20])
@pytest.mark.parametrize(("name", "value"), [("k", torch.nan), ("k", torch.inf), ("q", torch.nan), ("v", torch.nan)])
def test_one_query_hides_no_nan(name: str, value: float, group: int, required_backends: frozenset[str]) -> None:
    """A key that it sees makes the output NaN; one that a bias hides is not read."""
    x = make_inputs(BiasedCase(T=1, S=200, group=group, bias="111S", dtype=FP32), BEST_DEVICE)
    serve("triton", problem_of(x), required_backends)
    assert x.bias is not None
    getattr(x, name)[0, 0 if name == "q" else 70] = value
    assert call(x, "triton").isnan().all(-1).all()
    x.bias[..., 64:128] = -torch.inf  # all of a split
    assert call(x, "triton").isnan().all() == (name == "q")


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 103, 120])
def test_tiles_are_multiples_of_each_other(arch: int) -> None:
    """The launcher decides by multiples of tiles, powers of two, where a mask is needed."""
    for problem in itertools.product((torch.bfloat16, torch.float16, FP32), (16, 32, 64, 128, 256), (False, True)):
        for launch in launches(arch, *problem).values():
            assert {launch.block_m, launch.block_n} <= {16, 32, 64, 128}
            assert launch.warps in (4, 8)


# Shared memory: what a block may have. Stack: the most that Triton 3.6 and 3.9 leave, up to the next 64 bytes.
@pytest.mark.slow
@pytest.mark.compiles
@needs_triton
@pytest.mark.parametrize(
    ("sm", "bias", "kernels", "shared", "stack"),
    [
        (90, "per key", ["forward", "query", "key", "split"], 232448, 192),
        (90, "per pair", ["forward", "query", "key", "pair"], 232448, 576),
        (100, "per key", ["forward", "key", "split"], 232448, 384),
        (100, "per pair", ["query", "key"], 232448, 320),
        (86, "per pair", ["forward"], 101376, 0),
    ],
)
def test_compiles_without_a_gpu(sm: int, bias: str, kernels: list[str], shared: int, stack: int) -> None:
    """It fits into shared memory, its products run on tensor cores, and not much is spilled."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.attention.compiled", str(sm), bias, *kernels]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        usage = json.loads(line)
        assert usage["shared"] <= shared, line
        assert usage["stack"] <= stack, line
        assert usage["products"] > 0, line
    assert len(done.stdout.splitlines()) == len(kernels)
