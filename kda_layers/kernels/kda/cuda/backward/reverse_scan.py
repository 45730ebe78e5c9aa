"""Launcher of reverse_scan.cu: the backward's scan from each sequence's last chunk to its first.

Where the forward has cut sequences into segments, let D be the gradient of the state after a segment and d what the
scan computes from D = 0. The gradient of the state before the segment is d + D F^T, with F of the segment's
transition. So all segments but the first are scanned at once for d, the gradients of the states between segments are
joined, and all segments are scanned from these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ....cuda.arch import ARCHS, OVERLAPS
from ....cuda.machine import Launch, Machine
from ....cuda.params import Params
from ...contract import CHUNK, Inputs, state_shape
from ..forward.segments import join_launch
from ..spec import ALWAYS, T_FP16, TYPES, WIDTHS, Cut, Saved, aligned, cut_of, keeps_T_fp16, loaded, stage_bytes

PARAMS = Params("ReverseScanParams", """
    unsigned char* prepared;     // [NC, HV, STAGE_BYTES], NC chunks of all sequences
    unsigned char* T_fp16;       // [NC, HV, SQUARE] if T_FP16: T' in fp16, see stage.cuh
    const u16* d_o;              // [B, T, HV, V]
    const float* d_checkpoints;  // [B, T / 64, HV, V, K], or null
    const float* d_final;        // [N, HV, V, K], or null
    const void* cu_seqlens;      // [N + 1], or null
    u16* d_v;                    // [B, T, HV, V]
    u16* d_states;               // [NC, HV, V, K], at each chunk's end
    float* d_initial;            // [N, HV, V, K], or null
    u32* scanned;                // [N, HV, V / BV]: chunks that are scanned and stored; not of segments
    u32* taken;                  // one: see gradients.cu
    // Of segments.cu, of the tiles of sequences that are cut: B and F; gradients of the states after and before them
    const float* transitions;    // [rows, V + K, K]
    float* d_ends;               // [rows, V, K], or null for zeros
    float* d_starts;             // [rows, V, K], or null
    int T, HV, tiles;            // tiles = N * HV; B * T < 2^31
    int int64_offsets;           // cu_seqlens is int64
    int segments, cut_from;      // see ForwardParams
""")  # fmt: skip
SOURCE = str(Path(__file__).with_suffix(".cu"))
BV = 64  # columns of V per block
THREADS = 384
REVERSE = 3  # of stage.cuh's enum Segments


class Variant(NamedTuple):
    """The compile-time parameters of the kernel."""

    K: int
    cluster: int  # blocks that share the copy of a chunk; 0: no bulk copies
    dtype: torch.dtype
    wgmma: bool
    setmaxnreg: bool
    T_fp16: bool  # T' in fp16
    cut: Cut | None = None  # of sequences that are cut

    @property
    def source(self) -> str:
        return SOURCE

    @property
    def defines(self) -> dict[str, str | int]:
        return {
            "K": self.K, "V": self.K, "BV": BV, "CLUSTER": self.cluster, "IO": TYPES[self.dtype],
            "HAS_WGMMA": int(self.wgmma), "HAS_SETMAXNREG": int(self.setmaxnreg), "T_FP16": int(self.T_fp16),
            "SHARED_BYTES": self.shared_bytes, **({} if self.cut is None else self.cut.defines(REVERSE)),
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
        return self.stages * (stage_bytes(self.K) + 2 * 3 * 8) + BV * 2 * (self.K + 2 * CHUNK) + 8 * 8


def variant_for(K: int, dtype: torch.dtype, arch: int, T_fp16: bool = False) -> Variant:
    """The variant for an arch (compute capability times ten): the slices of a head share the copies of its chunks."""
    has = ARCHS[arch]
    return Variant(K, K // BV if has.bulk_copies else 0, dtype, has.wgmma, has.setmaxnreg, T_fp16)


def variants(arch: int) -> Iterable[Variant]:
    """Every variant that `variant_for` may return for `arch`, whatever its shared memory."""
    for K, dtype in itertools.product(WIDTHS, TYPES):
        yield variant_for(K, dtype, arch)
        if dtype in T_FP16:
            yield variant_for(K, dtype, arch, T_fp16=True)


def variants_in_segments(arch: int) -> Iterable[Variant]:
    """Every variant for sequences that are cut."""
    return [v._replace(cut=ALWAYS) for v in variants(arch)] if ARCHS[arch].bulk_copies else []


class Scanned(NamedTuple):
    """Outputs of the scan; NC = `chunk_rows`."""

    d_v: Tensor  # [B, T, HV, V]
    d_states: Tensor  # [NC, HV, V, K], for the state at each chunk's end
    d_initial: Tensor | None  # [N, HV, V, K] fp32
    # For the gradients kernel, which may begin before the scan ends
    scanned: Tensor | None  # [N * HV * V / BV] int32 chunks that are scanned; None after segments
    taken: Tensor  # [1] int32, 0: work tiles that its blocks have taken
    read: tuple[Tensor | None, ...] = ()  # by the scan: to be kept until that kernel has been launched


def reverse_scan(
    x: Inputs, machine: Machine, saved: Saved, d_o: Tensor, d_final: Tensor | None, d_checkpoints: Tensor | None
) -> Scanned:
    """Run the scan for the gradients of the forward's outputs; of `x` no other tensor than cu_seqlens is read."""
    (N, HV, V, K), T, device, packed = state_shape(x), x.v.shape[1], x.v.device, x.cu_seqlens is not None
    processors, arch, _ = machine.properties(device)
    variant, cut = variant_for(K, x.v.dtype, arch, keeps_T_fp16(x)), None if saved.transitions is None else cut_of(x)
    d_initial = None if x.initial_state is None else x.v.new_empty(N, HV, V, K, dtype=torch.float32)
    whole = cut is None or packed  # if packed, whole and in segments: is_idle in stage.cuh
    scanned, taken = torch.empty(N * HV * variant.slices + 1, dtype=torch.int32, device=device).tensor_split([-1])
    d_o, given = aligned(d_o), (d_final, d_checkpoints, x.cu_seqlens)
    read = d_final, d_checkpoints, offsets = tuple(None if t is None else aligned(t) for t in given)
    d_v, d_states = torch.empty_like(saved.errors), torch.empty_like(saved.states)
    out = Scanned(d_v, d_states, d_initial, scanned if whole else None, taken, (d_o, *read))

    def params(segments: int, d_ends: Tensor | None = None, d_starts: Tensor | None = None) -> bytes:
        values = PARAMS.set(
            T=T, HV=HV, tiles=N * HV * max(segments, 1), segments=segments, cut_from=0 if cut is None else cut.longer,
            int64_offsets=offsets is not None and offsets.dtype == torch.int64,
        )  # fmt: skip
        pointers = PARAMS.point(
            prepared=saved.prepared, T_fp16=saved.T_fp16, d_o=d_o, d_checkpoints=d_checkpoints, d_final=d_final,
            cu_seqlens=offsets, d_v=out.d_v, d_states=out.d_states, d_initial=d_initial, scanned=scanned, taken=taken,
            transitions=saved.transitions, d_ends=d_ends, d_starts=d_starts,
        )  # fmt: skip
        return pointers + values

    def scan_of(variant: Variant, segments: int, overlap: bool) -> Launch:
        # shared memory fits one block per multiprocessor
        groups = min(N * HV * max(segments, 1), max(processors // variant.slices, 1))
        kernel = loaded(machine, SOURCE, "kda_reverse_scan", variant, device)
        return Launch(kernel, groups * variant.slices, THREADS, max(variant.cluster, 1), variant.shared_bytes, overlap)

    if cut is not None:
        by_segments, segments = variant._replace(cut=cut), cut.most_segments(T, HV, packed)
        d_starts, d_ends = (x.v.new_empty(cut.rows(x), V, K, dtype=torch.float32) for _ in range(2))
        joins = join_launch(cut.most_cut(N, T, packed) * HV, K)
        join = Launch(loaded(machine, SOURCE, "kda_join_gradients", by_segments, device), *joins)
        scan = scan_of(by_segments, segments, False)
        scan.run(params(segments, None, d_starts))
        join.run(params(segments, d_ends, d_starts))
        scan.run(params(segments, d_ends))
    if whole:
        scan_of(variant, 0, arch >= OVERLAPS).run(params(0))
    return out
