"""Launches of the kernels: rows and columns of a tile, warps and pipeline stages, by GPU, dtype and head width."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

KERNELS = ("forward", "query", "key", "pair")  # o; dq; dk, dv and dbias per key; dbias per query and key


class Launch(NamedTuple):
    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    warps: int
    stages: int


Launches = dict[str, Launch]  # one for each of KERNELS


@functools.cache
def launches(arch: int, dtype: torch.dtype, block_d: int, per_pair: bool) -> Launches:
    """The launches for head widths up to `block_d`, a power of two.

    With `per_pair` the bias has size [T, S], so that its tiles take shared memory too.
    """
    roomy = arch in (80, 87) or 90 <= arch < 120  # at least 160 KB of shared memory for a block; others have 99
    if dtype == torch.float32:  # exact MMAs run without tensor cores, on registers
        n = 32 if block_d <= 64 else 16
        table = (n, 32, 4, 1), (n, n, 4, 1), (n, n, 4, 1), (n, 32, 4, 1)
    elif block_d == 128 and 90 <= arch < 120 and not per_pair:  # the fastest of those tried on an H200
        table = (128, 128, 8, 3), (128, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2)
    elif block_d <= 128 and roomy:
        # With three stages an fp32 bias of [T, S] does not fit beside wide heads on sm_100.
        warps, stages = 8 if block_d == 128 else 4, 3 if arch >= 90 and (arch < 100 or block_d < 128) else 2
        table = (128, 64, warps, 3), (128, 64, warps, stages), (64, 128, 8, stages), (64, 64, 4, 2)
    elif block_d <= 128:
        n, warps = (64, 4) if block_d <= 64 else (32, 8)
        table = (128, n, warps, 2), (64, n, 4, 2), (n, 64, 4, 2), (64, 32, 4, 1)
    else:
        table = (64, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)
    return {kernel: Launch(*values) for kernel, values in zip(KERNELS, table, strict=True)}
