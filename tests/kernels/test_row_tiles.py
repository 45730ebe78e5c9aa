"""Kernels that normalise rows, and SwiGLU's, compiled for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from kda_layers.kernels.row_tiles import MOST_WARPS, PER_THREAD, TILE, RowTiles


@pytest.mark.parametrize("D", [1, 24, 64, 128, 1500, 2048, 5000, 8192, 20000])
def test_tiles(D: int) -> None:
    tiles = RowTiles(1001, D)
    assert D <= tiles.block < 2 * D or D == 1
    assert tiles.rows_per_tile * tiles.block >= TILE
    assert tiles.rows_per_tile * (tiles.tiles - 1) < 1001 <= tiles.rows_per_tile * tiles.tiles
    elements = tiles.rows_per_tile * tiles.block // (32 * tiles.warps)
    assert elements == PER_THREAD or tiles.warps == MOST_WARPS


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_compiles_without_a_gpu(sm: int) -> None:
    """Nothing is spilled; rows are read and written in vectors of 16 bytes.

    Not the weight of several narrow rows, which is read once, nor a program's sums of them.
    """
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled_rows", str(sm)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * (4 + 3 + 1)
    for line in lines:
        usage = json.loads(line)
        narrow = usage["kernel"].startswith("gated_norm")
        assert usage["stack"] == 0, line
        assert usage["16-byte loads"] >= usage["loads"] - narrow, line
        assert usage["16-byte stores"] >= usage["stores"] - narrow, line
