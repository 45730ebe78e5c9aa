"""Launcher of reverse_scan.cu over sequences that the forward has cut into segments (forward/segments.cu).

Let D be the gradient of the state after a segment and d what the scan computes from D = 0. The gradient of the state
before the segment is d + D F^T, with F of the segment's map. So all segments but the first are scanned at once for d,
the gradients of the states between segments are joined, and all segments are scanned from these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ....cuda.arch import ARCHS
from ....cuda.machine import Machine
from ...contract import Inputs
from ..forward import segments
from ..spec import ALWAYS, Cut, cut_of, is_fine, loaded
from . import reverse_scan as whole

REVERSE = 3  # of stage.cuh's SEGMENTS


class Variant(NamedTuple):
    """The compile-time parameters of the kernels: those of `whole`, and the cut."""

    whole: whole.Variant
    cut: Cut

    @property
    def defines(self) -> dict[str, str | int]:
        return self.whole.defines | self.cut.defines(REVERSE)

    @property
    def shared_bytes(self) -> int:
        return self.whole.shared_bytes

    @property
    def source(self) -> str:
        return whole.SOURCE


def variants(arch: int) -> Iterable[Variant]:
    """Every variant for `arch`."""
    if ARCHS[arch].bulk_copies:
        yield from (Variant(v, ALWAYS) for v in whole.variants(arch))


def reverse_scan_in_segments(
    x: Inputs, machine: Machine, saved: segments.SavedInSegments, d_o: Tensor, d_final: Tensor | None,
    d_checkpoints: Tensor | None, cut: Cut | None = None,
) -> whole.Scanned:  # fmt: skip
    """Run the scan; see `reverse_scan.reverse_scan`. `cut` is that of the forward."""
    cut = cut_of(x) if cut is None else cut
    (B, T, HV, V), K, device = x.v.shape, x.q.shape[3], x.v.device
    N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    count = cut.most_segments(T, HV, x.cu_seqlens is not None)
    given = whole.Given.of(x, d_o, d_final, d_checkpoints)
    tiles, (processors, arch, _) = N * count * HV, machine.properties(device)
    variant = Variant(whole.variant_for(K, x.v.dtype, arch, is_fine(x)), cut)
    d_initial = None if x.initial_state is None else x.v.new_empty(N, HV, V, K, dtype=torch.float32)
    out = whole.Scanned(torch.empty_like(saved.whole.errors), torch.empty_like(saved.whole.states), d_initial)
    d_starts, d_ends = (x.v.new_empty(cut.rows(x), V, K, dtype=torch.float32) for _ in range(2))
    slices, cluster = variant.whole.slices, variant.whole.cluster
    blocks = min(tiles, max(processors // slices, 1)) * slices  # shared memory fits one block per multiprocessor
    scan = loaded(machine, whole.SOURCE, "kda_reverse_scan", variant, device)
    join = loaded(machine, whole.SOURCE, "kda_join_gradients", variant, device)

    values = whole.values_of(x, tiles, count, cut.longer)

    def params(d_ends: Tensor | None, d_starts: Tensor | None) -> bytes:
        return whole.pointers(saved.whole, given, out, saved.maps, d_ends, d_starts) + values

    scan.launch(blocks, whole.THREADS, cluster, variant.shared_bytes, params(None, d_starts))
    join.launch(*segments.join_launch(N * HV, K), params(d_ends, d_starts))
    scan.launch(blocks, whole.THREADS, cluster, variant.shared_bytes, params(d_ends, None))
    return out
