"""How each kernel is launched: rows and columns of a tile, warps and pipeline stages, by GPU, dtype and head width."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Launch(NamedTuple):
    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    warps: int
    stages: int


Launches = dict[str, Launch]  # of "forward", "query" (dq), "key" (dk, dv, dbias), "pair" (dbias of [T, S])


def launches(arch: int, dtype: torch.dtype, block_d: int, per_pair: bool) -> Launches:
    """The launches for head widths up to `block_d`, a power of two; `per_pair`: the bias is of size [T, S], whose tiles
    take shared memory, too."""
    if dtype == torch.float32:  # exact products run without tensor cores, on registers
        n = 32 if block_d <= 64 else 16
        return {
            "forward": Launch(n, 32, 4, 1),
            "query": Launch(n, n, 4, 1),
            "key": Launch(n, n, 4, 1),
            "pair": Launch(n, 32, 4, 1),
        }
    roomy = arch in (80, 87) or 90 <= arch < 120  # 160 KB of shared memory for a block or more, others have 99
    if block_d == 128 and 90 <= arch < 120 and not per_pair:  # the fastest of those tried on an H200
        return {
            "forward": Launch(128, 128, 8, 3),
            "query": Launch(128, 128, 8, 2),
            "key": Launch(64, 128, 8, 3),
            "pair": Launch(64, 64, 4, 2),
        }
    if block_d <= 128 and roomy:
        # With three stages an fp32 bias of [T, S] does not fit beside wide heads on sm_100.
        warps, stages = 8 if block_d == 128 else 4, 3 if arch >= 90 and (arch < 100 or block_d < 128) else 2
        return {
            "forward": Launch(128, 64, warps, 3),
            "query": Launch(128, 64, warps, stages),
            "key": Launch(64, 128, 8, stages),
            "pair": Launch(64, 64, 4, 2),
        }
    if block_d <= 128:
        return {
            "forward": Launch(128, 64 if block_d <= 64 else 32, 4 if block_d <= 64 else 8, 2),
            "query": Launch(64, 64 if block_d <= 64 else 32, 4, 2),
            "key": Launch(64 if block_d <= 64 else 32, 64, 4, 2),
            "pair": Launch(64, 32, 4, 1),
        }
    return {
        "forward": Launch(64, 32, 4, 2),
        "query": Launch(32, 32, 4, 1),
        "key": Launch(32, 32, 4, 1),
        "pair": Launch(32, 32, 4, 1),
    }
