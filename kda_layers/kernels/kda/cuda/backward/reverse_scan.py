"""Launcher of reverse_scan.cu: the backward's scan from each sequence's last chunk to its first."""

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
from ...contract import CHUNK, Inputs
from ..spec import FINE, TYPES, WIDTHS, Saved, aligned, is_fine, loaded, stage_bytes

PARAMS = Params("ReverseScanParams", """
    unsigned char* prepared;     // [NC, HV, STAGE_BYTES], NC chunks of all sequences
    unsigned char* fine;         // [NC, HV, SQUARE] if FINE: T' in fp16, see stage.cuh
    const u16* d_o;              // [B, T, HV, V]
    const float* d_checkpoints;  // [B, T / 64, HV, V, K], or null
    const float* d_final;        // [N, HV, V, K], or null
    const void* cu_seqlens;      // [N + 1], or null
    u16* d_v;                    // [B, T, HV, V]
    u16* d_states;               // [NC, HV, V, K], at each chunk's end
    float* d_initial;            // [N, HV, V, K], or null
    // Of segments.cu, of the tiles of sequences that are cut: B and F; gradients of the states after and before them
    const float* maps;           // [rows, V + K, K]
    float* d_ends;               // [rows, V, K], or null for zeros
    float* d_starts;             // [rows, V, K], or null
    int T, HV, tiles;            // tiles = N * HV; B * T < 2^31
    int int64_offsets;           // cu_seqlens is int64
    int segments, cut_from;      // see forward/params.py
""")  # fmt: skip
SOURCE = str(Path(__file__).with_suffix(".cu"))
BV = 64  # columns of V per block
THREADS = 384


class Variant(NamedTuple):
    """The compile-time parameters of the kernel."""

    K: int
    cluster: int  # blocks that share the copy of a chunk; 0: no bulk copies
    dtype: torch.dtype
    wgmma: bool
    setmaxnreg: bool
    fine: bool  # T' in fp16

    @property
    def defines(self) -> dict[str, str | int]:
        return {
            "K": self.K, "V": self.K, "BV": BV, "CLUSTER": self.cluster, "IO": TYPES[self.dtype],
            "HAS_WGMMA": int(self.wgmma), "HAS_SETMAXNREG": int(self.setmaxnreg), "FINE": int(self.fine),
            "SHARED_BYTES": self.shared_bytes,
        }  # fmt: skip

    @property
    def slices(self) -> int:
        return self.K // BV

    @property
    def stages(self) -> int:
        return 3 if self.cluster else 2

    @property
    def shared_bytes(self) -> int:
        """Size in bytes of struct Shared in reverse_scan.cu."""
        return self.stages * (stage_bytes(self.K) + 2 * 3 * 8) + BV * 2 * (self.K + 2 * CHUNK) + 6 * 8


def variant_for(K: int, dtype: torch.dtype, arch: int, fine: bool = False) -> Variant:
    """The variant for an arch (compute capability times ten): the slices of a head share the copies of its chunks."""
    has = ARCHS[arch]
    return Variant(K, K // BV if has.bulk_copies else 0, dtype, has.wgmma, has.setmaxnreg, fine)


def variants(arch: int) -> Iterable[Variant]:
    """Every variant that `variant_for` may return for `arch`, whatever its shared memory."""
    for K, dtype in itertools.product(WIDTHS, TYPES):
        yield variant_for(K, dtype, arch)
        if dtype in FINE:
            yield variant_for(K, dtype, arch, fine=True)


class Scanned(NamedTuple):
    """Outputs of the scan; NC = `chunk_rows`."""

    d_v: Tensor  # [B, T, HV, V]
    d_states: Tensor  # [NC, HV, V, K], for the state at each chunk's end
    d_initial: Tensor | None  # [N, HV, V, K] fp32


class Given(NamedTuple):
    """Inputs of the scan beside the saved tensors, aligned."""

    d_o: Tensor
    d_final: Tensor | None
    d_checkpoints: Tensor | None
    cu_seqlens: Tensor | None

    @classmethod
    def of(cls, x: Inputs, d_o: Tensor, d_final: Tensor | None, d_checkpoints: Tensor | None) -> Given:
        """Align the gradients of outputs and the offsets."""
        optional = (None if t is None else aligned(t) for t in (d_final, d_checkpoints, x.cu_seqlens))
        return cls(aligned(d_o), *optional)


def pointers(
    saved: Saved, given: Given, out: Scanned, maps: Tensor | None = None, d_ends: Tensor | None = None,
    d_starts: Tensor | None = None,
) -> bytes:  # fmt: skip
    """Pack the pointers of ReverseScanParams; the last three are those of segments."""
    return PARAMS.point(
        prepared=saved.prepared, fine=saved.fine, **given._asdict(), **out._asdict(), maps=maps, d_ends=d_ends,
        d_starts=d_starts,
    )  # fmt: skip


def values_of(x: Inputs, tiles: int, segments: int = 0, cut_from: int = 0) -> bytes:
    """Pack the values of ReverseScanParams."""
    int64 = x.cu_seqlens is not None and x.cu_seqlens.dtype == torch.int64
    return PARAMS.set(
        T=x.v.shape[1], HV=x.v.shape[2], tiles=tiles, int64_offsets=int64, segments=segments, cut_from=cut_from
    )


def reverse_scan(
    x: Inputs, machine: Machine, saved: Saved, d_o: Tensor, d_final: Tensor | None, d_checkpoints: Tensor | None
) -> Scanned:
    """Run the scan for the gradients of the forward's outputs; of `x` no other tensor than cu_seqlens is read."""
    HV, V = x.v.shape[2:]
    N = x.v.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    tiles, (processors, arch, _) = N * HV, machine.properties(x.v.device)
    variant = variant_for(x.q.shape[3], x.v.dtype, arch, is_fine(x))
    d_initial = None if x.initial_state is None else x.v.new_empty(N, HV, V, x.q.shape[3], dtype=torch.float32)
    out = Scanned(torch.empty_like(saved.errors), torch.empty_like(saved.states), d_initial)
    groups = min(tiles, max(processors // variant.slices, 1))  # shared memory fits one block per multiprocessor
    given = Given.of(x, d_o, d_final, d_checkpoints)
    params = pointers(saved, given, out) + values_of(x, tiles)
    kernel = loaded(machine, SOURCE, "kda_reverse_scan", variant, x.v.device)
    kernel.launch(
        groups * variant.slices, THREADS, max(variant.cluster, 1), variant.shared_bytes, params, arch >= OVERLAPS
    )
    return out
