"""Linear layers of a decode step: the Triton kernel, on a GPU or in Triton's interpreter, against the plain form."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers.kernels.fused.linear_step import (
    LINEAR_STEP,
    MOST_IDLE,
    Inputs,
    Problem,
    columns,
    linear_step,
    work_of,
)
from tests.kernels.cases import BEST_DEVICE, BF16, FP16, FP32, FP64, budget, error, poisoned_memory

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")


def inputs(B: int, N: int, D: int, dtype: torch.dtype, norm: bool, residual: bool, swiglu: bool) -> dict[str, Any]:
    """Arguments of linear_step for N outputs."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=FP64).to(BEST_DEVICE, dtype)

    return dict(
        x=normal(B, 1, D), weight=normal((1 + swiglu) * N, D), norm_weight=normal(D) if norm else None,
        norm_eps=1e-3, residual=normal(B, 1, N) if residual else None, swiglu=swiglu,
    )  # fmt: skip


def wide(x: dict[str, Any]) -> dict[str, Any]:
    return {name: t.double() if isinstance(t, Tensor) else t for name, t in x.items()}


@needs_triton
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("norm", "residual", "swiglu"), [(1, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1), (0, 0, 0)])
@pytest.mark.parametrize(("B", "N", "D"), [(1, 5, 300), (3, 8, 1100), (2, 1, 1)])
def test_against_fp64(B: int, N: int, D: int, norm: int, residual: int, swiglu: int, dtype: torch.dtype) -> None:
    x = inputs(B, N, D, dtype, bool(norm), bool(residual), bool(swiglu))
    truth, plain = linear_step(**wide(x), backend="eager"), linear_step(**x, backend="eager")
    with poisoned_memory():
        got = linear_step(**x, backend="triton")
    assert got.dtype == dtype
    assert got.shape == (B, 1, N)
    assert error(got, truth) <= budget(error(plain, truth), dtype)


@needs_triton
def test_large_values() -> None:
    """Squares beyond fp16's range, and SiLU's two ends."""
    x = torch.full((1, 1, 64), 1000.0, device=BEST_DEVICE, dtype=FP16)
    weight, ones = torch.ones(2, 64, device=BEST_DEVICE, dtype=FP16), torch.ones(64, device=BEST_DEVICE, dtype=FP16)
    assert linear_step(x, weight, norm_weight=ones, backend="triton").flatten().tolist() == [64, 64]
    gates = torch.tensor([[-1e30], [1e30], [1.0], [2.0]], device=BEST_DEVICE)
    got = linear_step(torch.ones(1, 1, 1, device=BEST_DEVICE), gates, swiglu=True, backend="triton")
    torch.testing.assert_close(got.flatten().cpu(), torch.tensor([0.0, 2e30]))


@needs_triton
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x = inputs(4, 6, 300, BF16, True, True, True)
    whole = linear_step(**x, backend="triton")
    for b in range(4):
        row = x | dict(x=x["x"][b : b + 1], residual=x["residual"][b : b + 1])
        assert torch.equal(linear_step(**row, backend="triton"), whole[b : b + 1])


@needs_triton
def test_any_layout() -> None:
    """Parts of wider rows, a weight that is not contiguous, tokens instead of sequences, no row at all."""
    x = inputs(3, 6, 40, FP32, True, True, False)
    want = linear_step(**x, backend="triton")
    apart = torch.randn(3, 1, 100, device=BEST_DEVICE)
    row, residual = apart[..., 7:47], apart[..., 60:66]
    row.copy_(x["x"])
    residual.copy_(x["residual"])
    got = linear_step(**x | dict(x=row, residual=residual, weight=x["weight"].mT.contiguous().mT), backend="triton")
    assert torch.equal(got, want)
    first = x | dict(x=x["x"].view(1, 3, 40).contiguous().transpose(0, 1), residual=None)  # torch calls it contiguous
    assert torch.equal(linear_step(**first, backend="triton"), linear_step(**x | dict(residual=None), backend="triton"))
    tokens = x | dict(x=x["x"].mT.reshape(1, 3, 40) * 0 + x["x"].view(1, 3, 40), residual=x["residual"].view(1, 3, 6))
    assert torch.equal(linear_step(**tokens, backend="triton"), want.view(1, 3, 6))
    assert linear_step(**x | dict(x=row[:0], residual=residual[:0]), backend="triton").shape == (0, 1, 6)


@needs_triton
def test_op() -> None:
    x = inputs(2, 3, 20, FP32, True, True, True)
    args = (*(x[n] for n in ("x", "weight", "norm_weight", "residual", "norm_eps", "swiglu")), False, "triton")
    torch.library.opcheck(torch.ops.kda_layers.linear_step.default, args)


@pytest.mark.compiles
@needs_triton
def test_compiled() -> None:
    x = inputs(1, 4, 30, FP32, True, True, True)
    want = linear_step(**x, backend="triton")
    compiled = torch.compile(lambda: linear_step(**x, backend="triton"), backend="eager", fullgraph=True)
    assert torch.equal(compiled(), want)


@needs_triton
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("B", "N", "D"), [(5, 20, 300), (17, 16, 256), (64, 7, 40)])
def test_a_tile_against_fp64(B: int, N: int, D: int, dtype: torch.dtype) -> None:
    x = inputs(B, N, D, dtype, False, True, False)
    if BEST_DEVICE == "cpu" and dtype == BF16:
        (reason,) = LINEAR_STEP.backend("triton").refusals(Problem("cpu", 0, BF16, "tile"))
        pytest.skip(reason)
    assert LINEAR_STEP.choose("triton", x["x"].device, dtype, "tile") == "triton"
    truth, plain = linear_step(**wide(x), backend="eager"), linear_step(**x, backend="eager")
    with poisoned_memory():
        got = linear_step(**x, backend="triton")
    assert error(got, truth) <= budget(error(plain, truth), dtype)
    assert torch.equal(linear_step(**x | dict(overlap=True), backend="triton"), got)


@pytest.mark.parametrize(
    ("rows", "weight", "more", "work"),
    [
        (1, (4000, 4000), {}, "row"), (1, (99999, 4000), dict(swiglu=True), "row"), (4, (2048, 2048), {}, "row"),
        (2, (4096, 4096), {}, "row"), (3, (4096, 4096), {}, "product"), (5, (20, 20), {}, "product"),
        (5, (20, 20), dict(residual=1), "tile"), (64, (20, 20), dict(residual=1), "tile"),
        (65, (20, 20), dict(residual=1), "product"), (5, (20, 20), dict(residual=1, norm_weight=1), "product"),
        (5, (20, 20), dict(residual=1, swiglu=True), "product"),
    ],
)  # fmt: skip
def test_what_a_call_is_to_a_kernel(rows: int, weight: tuple[int, int], more: dict[str, Any], work: str) -> None:
    x = Inputs(torch.empty(rows, 1, weight[1], device="meta"), torch.empty(weight, device="meta"), None, None, 0, 0, 0)
    assert work_of(x._replace(**more)) == work


@needs_triton
def test_choice() -> None:
    assert LINEAR_STEP.choose(None, torch.device("cpu"), FP32, "row") == "eager"
    for work, dtype, arch, reasons in (
        ("row", FP32, 80, []),
        ("tile", BF16, 90, []),
        ("tile", FP32, 90, ["dtype is float32, needs bfloat16 or float16 for a tile"]),
        ("tile", BF16, 120, ["arch is sm_120, needs sm_90, sm_100 or sm_103 for a tile"]),
        ("product", BF16, 90, ["work is product, needs row or tile"]),
    ):
        assert LINEAR_STEP.backend("triton").refusals(Problem("cuda", arch, dtype, work)) == reasons


@pytest.mark.parametrize("D", [1, 100, 256, 768, 1000, 2048, 2560, 4100, 5632, 11008, 14336, 20000])
@pytest.mark.parametrize("swiglu", [False, True])
def test_columns(D: int, swiglu: bool) -> None:
    """Few steps, and few idle lanes in the last one."""
    block = columns(D, swiglu)
    steps = -(-D // block)
    assert block & (block - 1) == 0
    assert steps * block - D <= MOST_IDLE * D or block == 256
    assert steps <= 20


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(x=torch.zeros(2, 20)), r"x and weight must have shapes \[B, T, D\] and \[N, D\]"),
        (dict(weight=torch.zeros(7, 20)), "weight must have an even number of rows with swiglu, got 7"),
        (dict(weight=torch.zeros(6, 19)), r"weight must have shape \[6, 20\], got \[6, 19\]"),
        (dict(weight=torch.zeros(6, 20).half()), "weight must be float32 with x of float32, got torch.float16"),
        (dict(residual=torch.zeros(2, 1, 6)), r"residual must have shape \[2, 1, 3\], got \[2, 1, 6\]"),
        (dict(norm_weight=torch.zeros(3)), r"norm_weight must have shape \[20\], got \[3\]"),
        (dict(norm_weight=torch.zeros(20, device="meta")), "norm_weight must be on x's device cpu, got meta"),
        (dict(norm_weight=[1.0]), "norm_weight must be a torch.Tensor, got list"),
    ],
)
def test_errors(changed: dict[str, Any], message: str) -> None:
    x: dict[str, Any] = dict(x=torch.zeros(2, 1, 20), weight=torch.zeros(6, 20), swiglu=True)
    with pytest.raises((TypeError, ValueError), match=message):
        linear_step(**x | changed)


def test_no_gradient() -> None:
    weight = torch.zeros(6, 20, requires_grad=True)
    with pytest.raises(RuntimeError, match="linear_step has no gradient"):
        linear_step(torch.zeros(1, 1, 20), weight)
    with torch.no_grad():
        assert linear_step(torch.zeros(1, 1, 20), weight).shape == (1, 1, 6)


@pytest.mark.slow
@pytest.mark.compiles
@needs_triton
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_compiles_without_a_gpu(sm: int) -> None:
    """Nothing is spilled, and weights are read 16 bytes at a time."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled_linear_step", str(sm)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == (4 if sm == 80 else 7)
    for line in lines:
        usage = json.loads(line)
        assert usage["stack"] == 0, line
        assert usage["copies"] >= 3, line
        assert usage["shared"] <= 227 * 1024, line
        assert usage["waits"] == (sm >= 90), line
