"""Launcher of segments.cu: the forward over sequences that are cut into segments, in three kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ....cuda.arch import ARCHS
from ....cuda.machine import Launchable, Machine
from ....cuda.params import addresses
from ...activations import BETA_CODES, GATE_CODES
from ...contract import CHUNK, Inputs, KDAOutput
from . import forward as whole
from . import map_columns, two_roles
from .cut import ALWAYS, MAPS, WALK, Cut, cut_of
from .shares import Shares

SOURCE = str(Path(__file__).with_suffix(".cu"))
WALK_STAGES = 3
JOIN_ROWS, JOIN_STAGES = 8, 3


class Variant(NamedTuple):
    """The compile-time parameters of one of the kernels: those of `whole`, and the cut."""

    whole: whole.Variant
    part: int  # MAPS or WALK
    cut: Cut

    @property
    def source(self) -> str:
        return whole.SOURCE if self.part == MAPS else SOURCE

    @property
    def defines(self) -> dict[str, str | int]:
        return self.whole.defines | self.cut.defines(self.part) | {"SHARED_BYTES": self.shared_bytes}

    @property
    def threads(self) -> int:
        return self.whole.threads if self.part == MAPS else 160

    @property
    def slices(self) -> int:
        return self.whole.slices * (2 if self.part == MAPS else 1)

    @property
    def shared_bytes(self) -> int:
        if self.part == MAPS:
            return self.whole.shared_bytes
        scan = 2 * self.whole.BV * (self.whole.K + 2 * CHUNK)
        return WALK_STAGES * whole.stage_bytes(self.whole.K) + scan + 8 * (6 * WALK_STAGES + 5)


def variants_for(
    K: int, dtype: torch.dtype, gate_activation: str, g_wide: bool, arch: int, saves: bool = False, cut: Cut = ALWAYS,
    fine: bool = False,
) -> tuple[Variant, Variant]:  # fmt: skip
    """The variants that map and that walk."""
    wide = ARCHS[arch].wgmma and not (dtype == torch.float16 and g_wide)
    maps = whole.variant_of(K, 32 if wide else 16, dtype, gate_activation, g_wide, arch, fine=fine)
    walk = whole.variant_of(K, K // 2, dtype, "lower_bound", False, arch, saves)  # reads no gate
    return Variant(maps, MAPS, cut), Variant(walk._replace(cluster=2), WALK, cut)


def variants(arch: int) -> Iterable[Variant | map_columns.Variant]:
    """Every variant for `arch`."""
    if not ARCHS[arch].bulk_copies:
        return
    flags = (False, True)
    problems = itertools.product(whole.WIDTHS, whole.TYPES, GATE_CODES, flags)
    found = (
        variants_for(*problem, arch, saves, fine=fine)
        for problem in problems
        for saves in flags
        for fine in flags
        if saves >= fine <= (problem[1] in whole.FINE)
    )
    yield from dict.fromkeys(itertools.chain.from_iterable(found))
    yield from map_columns.variants(arch)


class SavedInSegments(NamedTuple):
    """The tensors that the forward saves for the backward."""

    whole: whole.Saved
    maps: Tensor  # [rows, V + K, K] fp32, B and F of segments

    @classmethod
    def like(cls, x: Inputs, cut: Cut | None = None) -> SavedInSegments:
        """Unwritten tensors for inputs `x`."""
        cut, K, V = cut_of(x) if cut is None else cut, x.q.shape[3], x.v.shape[3]
        return cls(whole.Saved.like(x), x.q.new_empty(cut.rows(x), V + K, K, dtype=torch.float32))

    @classmethod
    def of(cls, tensors: list[Tensor]) -> SavedInSegments:
        """Undo `tensors`."""
        maps, *kept = tensors
        return cls(whole.Saved(*kept), maps)

    def tensors(self) -> list[Tensor]:
        """The tensors that exist."""
        return [self.maps, *self.whole.tensors()]


class Plan(NamedTuple):
    """Everything that the launches need except pointers."""

    maps: Launchable
    join: Launchable
    walk: Launchable
    launches: list[tuple[int, int, int, int]]  # blocks, threads, cluster and shared bytes of maps and walk
    counters: int  # elements of ForwardParams.progress
    roles: bool  # the blocks that map have two roles
    sequences: int
    rest: bytes  # of the parameters, after the pointers


@functools.lru_cache(whole.PLANS)
def plan_of(
    machine: Machine, device: torch.device, dtype: torch.dtype, g_dtype: torch.dtype, beta_dtype: torch.dtype,
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], offsets: tuple[int, torch.dtype] | None,
    gate_activation: str, lower_bound: float, beta_activation: str, qk_l2norm: bool, scale: float,
    saves: bool, cut: Cut, tails: bool, fine: bool, roles: bool,
) -> Plan:  # fmt: skip
    """The plan for tensors of these shapes and dtypes; `offsets` are the length and dtype of cu_seqlens.

    Args:
        roles: map by blocks of two roles, unless no sequence is long enough to be cut
    """
    B, T, H, K = q_shape
    HV = v_shape[2]
    if B * T > whole.MOST_TOKENS:
        raise ValueError(f"B * T must be at most {whole.MOST_TOKENS}, got {B * T}: split the batch")
    N = B if offsets is None else offsets[0] - 1
    tokens = T if offsets is not None else whole.in_chunks(T, tails)
    segments = cut.most_segments(tokens, HV, offsets is not None)
    processors, arch, _ = machine.properties(device)
    mapping, walking = variants_for(K, dtype, gate_activation, g_dtype == torch.float32, arch, saves, cut, fine)
    if processors < mapping.slices:
        raise ValueError(f"x must be on a GPU with at least {mapping.slices} multiprocessors, got {processors}")
    groups = [min(N * segments * HV, processors // v.slices) for v in (mapping, walking)]
    launches = [
        (n * v.slices, v.threads, v.whole.cluster, v.shared_bytes)
        for n, v in zip(groups, (mapping, walking), strict=True)
    ]
    source, entry, defines, counters = mapping.source, "kda_forward", mapping.defines, groups[0] * 64
    shares, roles = Shares(0, 0, 0), roles and segments > 1
    if roles:
        chunks, scanned = cut.segment_tokens(tokens, HV) // CHUNK, N * (segments - 1) * HV
        shares = map_columns.shares_for(scanned, chunks, N * HV * -(-tokens // CHUNK), processors)
        maps = map_columns.variant_for(K, dtype, gate_activation, g_dtype == torch.float32, arch, cut, fine)
        source, entry, defines, counters = maps.source, two_roles.ENTRY, maps.defines, shares.counters
        launches[0] = map_columns.SLICES * shares.groups + shares.preparers, map_columns.THREADS, 1, maps.shared_bytes
    rest = whole.PARAMS.pack_values(
        T, H, HV, HV // H, N * segments * HV, offsets is not None and offsets[1] == torch.int64,
        BETA_CODES[beta_activation], beta_dtype == torch.float32, qk_l2norm, lower_bound, scale,
        *(0,) * 7, segments, cut.longer, tails, shares.groups, shares.places,
    )  # fmt: skip
    first = machine.load(source, entry, defines, device)
    join, walk = (machine.load(SOURCE, f"kda_{what}_segments", walking.defines, device) for what in ("join", "walk"))
    return Plan(first, join, walk, launches, counters, roles, N, rest)


def join_launch(heads: int, K: int) -> tuple[int, int, int, int]:
    """The grid, threads, cluster and shared bytes of a kernel that joins segments of `heads` (join.cuh)."""
    return heads * K // JOIN_ROWS, K, 1, 4 * K * (JOIN_STAGES * K + 2 * JOIN_ROWS) + 8 * JOIN_STAGES


def forward_in_segments(
    x: Inputs, machine: Machine, save: bool = False, cut: Cut | None = None, tails: whole.Tails | None = None
) -> tuple[KDAOutput, SavedInSegments | None]:
    """Return the outputs and, with `save`, the tensors for the backward; with `tails`, last tokens stay unwritten.

    Raises:
        ValueError: as `forward.forward`
        RuntimeError: blocks of two roles cannot run at once
    """
    cut = cut_of(x) if cut is None else cut
    x = whole.aligned_inputs(x)
    q, v, offsets = x.q, x.v, x.cu_seqlens
    device, K, (HV, V) = q.device, q.shape[3], v.shape[2:]
    plan = plan_of(
        machine, device, q.dtype, x.g.dtype, x.beta.dtype, q.shape, v.shape,
        None if offsets is None else (offsets.shape[0], offsets.dtype),
        x.gate_activation, x.lower_bound, x.beta_activation, x.qk_l2norm, x.scale, save, cut, tails is not None,
        save and whole.is_fine(x), map_columns.serves(x, machine),
    )  # fmt: skip
    fp32, N = partial(torch.empty, dtype=torch.float32, device=device), plan.sequences
    rows = cut.rows(x, tails is not None)
    o = torch.empty_like(v)
    final = fp32(N, HV, V, K) if x.final_state else None
    checkpoints = whole.new_checkpoints(x) if x.checkpoint_every else None
    saved = SavedInSegments.like(x, cut) if save else None
    if saved is not None:
        (prepared, states, errors, fine), maps = saved
    else:
        prepared = torch.empty(whole.chunk_rows(x), HV, whole.stage_bytes(K), dtype=torch.uint8, device=device)
        states, errors, fine, maps = None, None, None, fp32(rows, V + K, K)
    progress = torch.zeros(plan.counters, dtype=torch.int32, device=device)
    starts = fp32(rows, V, K)
    tensors = (
        q, x.k, v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state, offsets, o, final, checkpoints, None, progress,
        prepared, states, errors, fine, None, None, maps, starts, *(tails or whole.Tails()),
    )  # fmt: skip
    params = whole.PARAMS.pack_pointers(*addresses(tensors)) + plan.rest
    mapping, walking = plan.launches
    if plan.roles:
        two_roles.launch(plan.maps, *mapping, params)
    else:
        plan.maps.launch(*mapping, params)
    plan.join.launch(*join_launch(N * HV, K), params)
    plan.walk.launch(*walking, params)
    return KDAOutput(o, final, checkpoints), saved


def recompute(x: Inputs, machine: Machine) -> SavedInSegments:
    """Run the forward again for the tensors that it saves."""
    _, saved = forward_in_segments(x._replace(final_state=False, checkpoint_every=0), machine, save=True)
    assert saved
    return saved
