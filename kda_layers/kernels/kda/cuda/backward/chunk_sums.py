"""Launcher of chunk_sums.cu: sums over chunks of the gradients of A_log and dt_bias."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ....cuda.arch import OVERLAPS
from ....cuda.machine import Machine
from ....cuda.params import Params

PARAMS = Params("ChunkSumsParams", """
    const float *A_log_parts, *dt_bias_parts;  // [rows, HV], [rows, HV, K], or null
    const void* cu_seqlens;                    // [sequences + 1], or null
    float *d_A_log, *d_dt_bias;                // [HV], [HV, K], or null
    int rows, HV, K;                           // rows: of packed sequences at least the number of chunks
    int sequences, int64_offsets;
""")  # fmt: skip
SOURCE = str(Path(__file__).with_suffix(".cu"))
COLUMNS, THREADS = 32, 512  # of a block


def chunk_sums(
    machine: Machine, A_log: Tensor | None, dt_bias: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Sum fp32 `A_log` [rows, HV] and `dt_bias` [rows, HV, K] over the rows that are chunks; None stays None.

    Args:
        cu_seqlens: [N + 1] offsets of packed sequences, whose chunks come first; None if every row is a chunk.

    Returns:
        fp32 [HV] and [HV, K].
    """
    given = [t for t in (A_log, dt_bias) if t is not None]
    if not given:
        return None, None
    (rows, HV), device = given[0].shape[:2], given[0].device
    sums = [None if t is None else t.new_empty(t.shape[1:]) for t in (A_log, dt_bias)]
    sequences, int64 = (0, False) if cu_seqlens is None else (len(cu_seqlens) - 1, cu_seqlens.dtype == torch.int64)
    K = 1 if dt_bias is None else dt_bias.shape[2]
    params = PARAMS.point(
        A_log_parts=A_log, dt_bias_parts=dt_bias, cu_seqlens=cu_seqlens, d_A_log=sums[0], d_dt_bias=sums[1]
    ) + PARAMS.set(rows=rows, HV=HV, K=K, sequences=sequences, int64_offsets=int64)
    blocks = sum(-(-t.numel() // COLUMNS) for t in sums if t is not None)
    overlap = machine.properties(device).capability >= OVERLAPS
    machine.load(SOURCE, "kda_chunk_sums", {}, device).launch(blocks, THREADS, 1, THREADS * 4, params, overlap)
    return sums[0], sums[1]
