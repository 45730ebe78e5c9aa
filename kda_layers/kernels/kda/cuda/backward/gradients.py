"""Launcher of gradients.cu: the gradients of q, k, gates and beta, from what forward and reverse scan saved."""

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
from ...contract import CHUNK, Gradients, Inputs
from ..spec import TYPES, WIDTHS, Saved, chunk_rows, loaded
from .chunk_sums import chunk_sums
from .reverse_scan import Scanned

SOURCE = str(Path(__file__).with_suffix(".cu"))
PARAMS = Params("GradientsParams", """
    const u16 *q, *k;                      // [B, T, H, K]
    const u16* v;                          // [B, T, HV, V]
    const void* g;                         // [B, T, HV, K]
    const void* beta;                      // [B, T, HV]
    const float *A_log, *dt_bias;          // [HV], [HV, K], or null
    const void* cu_seqlens;                // [sequences + 1], or null
    const u16 *states, *d_states;          // [rows, HV, V, K]: S before a chunk, dS after it
    const u16 *errors, *d_v, *d_o;         // [B, T, HV, V]
    u16 *d_q, *d_k;                        // like q, k
    void *d_g, *d_beta;                    // like g, beta
    float *d_A_log, *d_dt_bias;            // [rows, HV], [rows, HV, K]: each chunk's sum
    float4* sums;                          // [blocks, 8, THREADS], or null where group is 1
    int T, H, HV, group, sequences, rows;  // group = HV / H; rows: at least the number of chunks
    int int64_offsets;                     // cu_seqlens is int64
    int beta_activation, beta_fp32, qk_l2norm;
    float lower_bound, scale;
""")  # fmt: skip


class Variant(NamedTuple):
    """The compile-time parameters of the kernel."""

    K: int
    dtype: torch.dtype
    gate_activation: str
    g_wide: bool  # g is fp32
    wgmma: bool

    @property
    def defines(self) -> dict[str, str | int]:
        return {
            "K": self.K, "V": self.K, "IO": TYPES[self.dtype], "GATE": GATE_CODES[self.gate_activation],
            "G_FP32": int(self.g_wide), "HAS_WGMMA": int(self.wgmma), "SHARED_BYTES": self.shared_bytes,
        }  # fmt: skip

    @property
    def threads(self) -> int:
        return 4 * self.K

    @property
    def shared_bytes(self) -> int:
        """Size in bytes of struct Shared in gradients.cuh."""
        K, warps = self.K, self.K // 16
        logits = CHUNK * (K + 4) * 4 if self.g_wide else CHUNK * K * 2
        row_tiles = max(2 * K // 16 + 12, 24)
        inputs = row_tiles * 32 * K + 2 * CHUNK * K * 2 + logits
        exchanged = 2 * 36 * 256 + warps * 6 * 512 + 4 * K * 4
        tiles, patterns, gate = 2 * 40 + 8, 0 if self.g_wide else 4 * 256, (2 * warps + 1 + K) * 4
        return inputs + exchanged + 3 * CHUNK * 4 + (warps + 1) * CHUNK * 8 + tiles + patterns + gate


def variant_for(x: Inputs, arch: int) -> Variant:
    """The variant for inputs on an arch (compute capability times ten)."""
    return Variant(x.q.shape[3], x.q.dtype, x.gate_activation, x.g.dtype == torch.float32, ARCHS[arch].wgmma)


def variants(arch: int) -> Iterable[Variant]:
    """Every variant that `variant_for` may return for `arch`, whatever its shared memory."""
    for K, dtype, gate, g_wide in itertools.product(WIDTHS, TYPES, GATE_CODES, (False, True)):
        yield Variant(K, dtype, gate, g_wide, ARCHS[arch].wgmma)


def _pack(
    x: Inputs, saved: Saved, scanned: Scanned, d_o: Tensor, out: Gradients, sums: Tensor | None, rows: int
) -> bytes:
    """Pack GradientsParams for contiguous tensors."""
    pointers = PARAMS.point(
        q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, A_log=x.A_log, dt_bias=x.dt_bias, cu_seqlens=x.cu_seqlens,
        states=saved.states, d_states=scanned.d_states, errors=saved.errors, d_v=out.v, d_o=d_o,
        d_q=out.q, d_k=out.k, d_g=out.g, d_beta=out.beta, d_A_log=out.A_log, d_dt_bias=out.dt_bias, sums=sums,
    )  # fmt: skip
    (_, T, H, _), HV = x.q.shape, x.v.shape[2]
    return pointers + PARAMS.set(
        T=T, H=H, HV=HV, group=HV // H, sequences=0 if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1, rows=rows,
        int64_offsets=x.cu_seqlens is not None and x.cu_seqlens.dtype == torch.int64,
        beta_activation=BETA_CODES[x.beta_activation], beta_fp32=x.beta.dtype == torch.float32,
        qk_l2norm=x.qk_l2norm, lower_bound=x.lower_bound, scale=x.scale,
    )  # fmt: skip


def gradients(x: Inputs, machine: Machine, saved: Saved, scanned: Scanned, d_o: Tensor) -> Gradients:
    """Compute the gradients that the reverse scan leaves out; return all. Tensors must be `aligned`."""
    (_, _, H, K), HV = x.q.shape, x.v.shape[2]
    device, rows = x.q.device, chunk_rows(x)
    processors, arch, _ = machine.properties(device)
    # Parts of chunks; packed sequences may leave rows unwritten, which nothing reads.
    A_log = None if x.A_log is None else torch.empty(rows, HV, dtype=torch.float32, device=device)
    dt_bias = None if x.dt_bias is None else torch.empty(rows, HV, K, dtype=torch.float32, device=device)
    q, k, g, beta = (torch.empty_like(t) for t in (x.q, x.k, x.g, x.beta))
    out = Gradients(q, k, scanned.d_v, g, beta, A_log, dt_bias, scanned.d_initial)
    variant = variant_for(x, arch)
    if rows:
        blocks, sums = min(rows * H, processors * 128 // K), None  # with K = 64 two fit on a multiprocessor
        if H < HV:  # partial sums over the value heads of a group
            sums = torch.empty(blocks, 32, variant.threads, dtype=torch.float32, device=device)
        kernel = loaded(machine, SOURCE, "kda_gradients", variant, device)
        params = _pack(x, saved, scanned, d_o, out, sums, rows)
        kernel.launch(blocks, variant.threads, 1, variant.shared_bytes, params, arch >= OVERLAPS)
    d_A_log, d_dt_bias = chunk_sums(machine, A_log, dt_bias, x.cu_seqlens)
    return out._replace(A_log=d_A_log, dt_bias=d_dt_bias)
