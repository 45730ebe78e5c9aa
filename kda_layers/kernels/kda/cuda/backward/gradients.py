"""Launchers of gradients.cu, the gradients of q, k, gates and beta from what forward and reverse scan saved, and of
chunk_sums.cu, the sums over chunks of the gradients of A_log and dt_bias."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ....cuda.arch import ARCHS, OVERLAPS
from ....cuda.machine import Machine
from ....cuda.params import Params
from ...activations import BETA_CODES, GATE_CODES
from ...contract import CHUNK, Gradients, Inputs, state_shape
from ..spec import TYPES, WIDTHS, Saved, chunk_rows, has_head_gates, loaded, with_those_of_heads
from .reverse_scan import Scanned

SOURCE, SUMS_SOURCE = (str(Path(__file__).with_name(name)) for name in ("gradients.cu", "chunk_sums.cu"))
PARAMS = Params("GradientsParams", """
    const u16 *q, *k;                      // [B, T, H, K]
    const u16* v;                          // [B, T, HV, V]
    const void* g;                         // [B, T, HV, K], or [B, T, HV] if HEAD_GATES
    const void* beta;                      // [B, T, HV]
    const float *A_log, *dt_bias;          // [HV], [HV, K] ([HV] if HEAD_GATES), or null
    const void* cu_seqlens;                // [sequences + 1], or null
    const u16 *states, *d_states;          // [rows, HV, V, K]: S before a chunk, dS after it
    const u16 *errors, *d_v, *d_o;         // [B, T, HV, V]
    u16 *d_q, *d_k;                        // like q, k
    void *d_g, *d_beta;                    // like g, beta
    float *d_A_log, *d_dt_bias;            // [rows, HV], [rows, HV, K] ([rows, HV]): each chunk's sum
    float4* sums;                          // [blocks, 8, THREADS], or null where group is 1
    const u32* scanned;                    // [sequences, HV, V / 64]: chunks that are scanned; null if all are
    u32* taken;                            // one: work tiles that blocks have taken
    int T, H, HV, group, sequences, rows;  // group = HV / H; rows: at least the number of chunks
    int int64_offsets;                     // cu_seqlens is int64
    int beta_activation, beta_fp32, qk_l2norm;
    float lower_bound, scale;
""")  # fmt: skip
SUMS_PARAMS = Params("ChunkSumsParams", """
    const float *A_log_parts, *dt_bias_parts;  // [rows, HV], [rows, HV, K], or null
    const void* cu_seqlens;                    // [sequences + 1], or null
    float *d_A_log, *d_dt_bias;                // [HV], [HV, K], or null
    int rows, HV, K;                           // rows: of packed sequences at least the number of chunks
    int sequences, int64_offsets;
""")  # fmt: skip
SUMS_COLUMNS, SUMS_THREADS = 32, 512  # of a block


class Variant(NamedTuple):
    """The compile-time parameters of the kernel."""

    K: int
    dtype: torch.dtype
    gate_activation: str
    g_wide: bool  # g is fp32
    wgmma: bool
    head_gates: bool = False  # one gate for all channels of a head

    @property
    def source(self) -> str:
        return SOURCE

    @property
    def defines(self) -> dict[str, str | int]:
        return {
            "K": self.K, "V": self.K, "IO": TYPES[self.dtype], "GATE": GATE_CODES[self.gate_activation],
            "G_FP32": int(self.g_wide), "HAS_WGMMA": int(self.wgmma), "SHARED_BYTES": self.shared_bytes,
            "HEAD_GATES": int(self.head_gates),
        }  # fmt: skip

    @property
    def threads(self) -> int:
        return 4 * self.K

    @property
    def shared_bytes(self) -> int:
        """Size in bytes of struct Shared in gradients.cuh."""
        K, warps = self.K, self.K // 16
        tiles = 2 * 48 + 8 + 8
        if self.head_gates:
            inputs = (2 * K * K + 5 * CHUNK * K) * 2
            pairs = 2 * 72 * 256 + (2 * 2 * 4 + 2 * 2) * CHUNK * 4
            tokens = CHUNK * ((warps + 1) * 16 + 24 * 4 + 10 * 4 + 8) + 4 * 4 * 4
            return inputs + pairs + tokens + tiles + (2 * warps + 2) * 4
        logits = CHUNK * (K + 4) * 4 if self.g_wide else CHUNK * K * 2
        row_tiles = max(2 * K // 16 + 12, 32)
        inputs = row_tiles * 32 * K + 2 * CHUNK * K * 2 + logits
        exchanged, gate = 2 * 36 * 256 + 3 * 4 * K * 4, (2 * warps + 1 + K) * 4
        return inputs + exchanged + 3 * CHUNK * 4 + (warps + 1) * CHUNK * 8 + tiles + gate


def variant_for(x: Inputs, arch: int) -> Variant:
    """The variant for inputs on an arch (compute capability times ten)."""
    wgmma, g_wide = ARCHS[arch].wgmma, x.g.dtype == torch.float32
    return Variant(x.q.shape[3], x.q.dtype, x.gate_activation, g_wide, wgmma, has_head_gates(x))


def variants(arch: int) -> Iterable[Variant]:
    """Every variant that `variant_for` may return for `arch`, whatever its shared memory; for heads `OF_HEADS`."""
    choices = itertools.product(WIDTHS, TYPES, GATE_CODES, (False, True))
    return with_those_of_heads(Variant(*choice, ARCHS[arch].wgmma) for choice in choices)


def gradients(x: Inputs, machine: Machine, saved: Saved, scanned: Scanned, d_o: Tensor) -> Gradients:
    """Compute the gradients that the reverse scan leaves out; return all. Tensors must be `aligned`."""
    (_, T, H, K), HV = x.q.shape, x.v.shape[2]
    device, rows = x.q.device, chunk_rows(x)
    processors, arch, _ = machine.properties(device)
    # Parts of chunks; packed sequences may leave rows unwritten, which nothing reads.
    A_log = None if x.A_log is None else torch.empty(rows, HV, dtype=torch.float32, device=device)
    dt_bias = None if x.dt_bias is None else torch.empty(rows, *x.dt_bias.shape, dtype=torch.float32, device=device)
    q, k, g, beta = (torch.empty_like(t) for t in (x.q, x.k, x.g, x.beta))
    out = Gradients(q, k, scanned.d_v, g, beta, A_log, dt_bias, scanned.d_initial)
    variant = variant_for(x, arch)
    if rows:
        blocks, sums = min(rows * H, processors * 128 // K), None  # with K = 64 two fit on a multiprocessor
        if H < HV:  # partial sums over the value heads of a group
            sums = torch.empty(blocks, 32, variant.threads, dtype=torch.float32, device=device)
        pointers = PARAMS.point(
            q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, A_log=x.A_log, dt_bias=x.dt_bias, cu_seqlens=x.cu_seqlens,
            states=saved.states, d_states=scanned.d_states, errors=saved.errors, d_v=out.v, d_o=d_o, d_q=q, d_k=k,
            d_g=g, d_beta=beta, d_A_log=A_log, d_dt_bias=dt_bias, sums=sums, scanned=scanned.scanned,
            taken=scanned.taken,
        )  # fmt: skip
        values = PARAMS.set(
            T=T, H=H, HV=HV, group=HV // H, sequences=state_shape(x)[0], rows=rows,
            int64_offsets=x.cu_seqlens is not None and x.cu_seqlens.dtype == torch.int64,
            beta_activation=BETA_CODES[x.beta_activation], beta_fp32=x.beta.dtype == torch.float32,
            qk_l2norm=x.qk_l2norm, lower_bound=x.lower_bound, scale=x.scale,
        )  # fmt: skip
        kernel = loaded(machine, SOURCE, "kda_gradients", variant, device)
        kernel.launch(blocks, variant.threads, 1, variant.shared_bytes, pointers + values, arch >= OVERLAPS)
    d_A_log, d_dt_bias = chunk_sums(machine, A_log, dt_bias, x.cu_seqlens)
    return out._replace(A_log=d_A_log, dt_bias=d_dt_bias)


def chunk_sums(
    machine: Machine, A_log: Tensor | None, dt_bias: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Sum fp32 `A_log` [rows, HV] and `dt_bias` [rows, HV, G] over the rows that are chunks; None stays None.

    Args:
        cu_seqlens: [N + 1] offsets of packed sequences, whose chunks come first; None if every row is a chunk.

    Returns:
        fp32 [HV] and [HV, G].
    """
    given = [t for t in (A_log, dt_bias) if t is not None]
    if not given:
        return None, None
    (rows, HV), device = given[0].shape[:2], given[0].device
    sums = [None if t is None else t.new_empty(t.shape[1:]) for t in (A_log, dt_bias)]
    sequences, int64 = (0, False) if cu_seqlens is None else (len(cu_seqlens) - 1, cu_seqlens.dtype == torch.int64)
    K = 1 if dt_bias is None else dt_bias.shape[2]
    params = SUMS_PARAMS.point(
        A_log_parts=A_log, dt_bias_parts=dt_bias, cu_seqlens=cu_seqlens, d_A_log=sums[0], d_dt_bias=sums[1]
    ) + SUMS_PARAMS.set(rows=rows, HV=HV, K=K, sequences=sequences, int64_offsets=int64)
    blocks = sum(-(-t.numel() // SUMS_COLUMNS) for t in sums if t is not None)
    overlap = machine.properties(device).capability >= OVERLAPS
    machine.load(SUMS_SOURCE, "kda_chunk_sums", {}, device).launch(
        blocks, SUMS_THREADS, 1, SUMS_THREADS * 4, params, overlap
    )
    return sums[0], sums[1]
