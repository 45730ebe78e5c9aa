"""Kernels that normalise rows, and SwiGLU's, compiled for GPUs that are not here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from kda_layers.kernels.fused.rows import MOST_WARPS, TILE, RowTiles


@pytest.mark.parametrize("D", [1, 24, 64, 128, 1500, 2048, 5000, 8192, 20000])
def test_tiles(D: int) -> None:
    tiles = RowTiles(1001, D, 16)
    assert D <= tiles.block < 2 * D or D == 1
    assert tiles.rows_per_tile * tiles.block >= TILE
    assert tiles.rows_per_tile * (tiles.tiles - 1) < 1001 <= tiles.rows_per_tile * tiles.tiles
    elements = tiles.rows_per_tile * tiles.block // (32 * tiles.warps)
    assert elements == 16 or tiles.warps == MOST_WARPS


def test_tiles_on_the_way_fit_in_shared_memory() -> None:
    stages = {(D, size): RowTiles(9, D, 16).stages(size) for D in (64, 2048, 8192, 8193) for size in (2, 4)}
    assert stages == {
        (64, 2): 3, (64, 4): 3, (2048, 2): 3, (2048, 4): 3, (8192, 2): 3, (8192, 4): 1, (8193, 2): 1, (8193, 4): 1,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_compiles_without_a_gpu(sm: int) -> None:
    """Nothing is spilled; rows are read and written in vectors of 16 bytes.

    Not the weight of several narrow rows, which is read once, nor a program's sums of them, nor sums of few columns.
    """
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled_rows", str(sm)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * (4 + 3 + 1) + 1
    for line in lines:
        usage = json.loads(line)
        narrow = usage["kernel"].startswith(("gated_norm", "column_sums"))
        if usage["stack"] and sm == 100 and importlib.metadata.version("triton").startswith("3.8."):
            assert (usage["kernel"], usage["stack"]) == ("norm_backward_kernel", 8), line
            continue  # Triton 3.8, that of torch 2.14, keeps 8 bytes of this kernel on the stack; 3.9 does not
        assert usage["stack"] == 0, line
        assert usage["16-byte loads"] >= usage["loads"] - narrow, line
        assert usage["16-byte copies"] == usage["copies"], line
        assert (usage["copies"] > 0) == (usage["kernel"].endswith("norm_backward_kernel")), line
        assert usage["shared"] <= 99 * 1024, line
        assert usage["16-byte stores"] >= usage["stores"] - narrow, line
