"""Partition of the blocks of two_roles.cu into scanning and preparing ones, and whether that is worth it.

Both follow from a model of measured times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...contract import CHUNK, Inputs
from . import forward as whole

WIDTH = 128  # of heads
BV = 64  # columns of V per block that scans
SLICES = WIDTH // BV  # blocks of a CTA group that scans, a cluster

# Microseconds, within 7 % of times measured on an H100 (docs/internals/studies). A chunk of one head takes a
# multiprocessor that prepares 5.05, and a group that scans 0.99 and some for each group; by forward.cu a chain of
# chunks takes 1.25 for each, or where blocks have 32 columns of V 1.95 on an H200 and up to 2.2 on an H100. The rest
# does not depend on the length. STORES is what a checkpoint adds to the scan of a chunk, within 3 % on an H200;
# STORES_TOGETHER and WIDE_STORES_TOGETHER are the same for forward.cu.
PREPARES, SCANS, SCANS_BESIDE, STARTS = 5.05, 0.99, 0.006, 16.0
# Blocks that prepare for several groups wait for each of them. Relative to these times, 21 groups with 90 such blocks
# took 7 % longer than 22 groups with 88 blocks, four for each group.
PREPARES_FOR_SEVERAL = 1.06
MOST_PREPARERS = 8  # for each group; more enlarge the ring, which is to stay in L2, and gained nothing
CHAIN, WIDE_CHAIN, STARTS_TOGETHER = 1.25, 2.1, 10.0
STORES, STORES_TOGETHER, WIDE_STORES_TOGETHER = 0.72, 0.16, 0.3
WORTH = 0.97  # of forward.cu's time: what is nearer is within the error of these times
MOST_TILES = 128  # of one length; with more, it was not measured
MOST_GROUPS_PACKED = 32  # one lane of a warp tracks each group
# Microseconds per packed tile on an H100, in addition to its chunks, and per state loaded or stored; _TOGETHER: by
# forward.cu. STATE was 2.0 with 27 groups of short sequences; 2.5 leaves a margin for shapes that were not measured.
TILE, TILE_TOGETHER, STATE, STATE_TOGETHER = 0.95, 1.4, 2.5, 1.3
SCAN_WAITS = 1.05  # penalty on the scan's time: if both roles take equally long, the scan stalls on preparation
LEAST_TOKENS = 2 * CHUNK  # mean length of packed sequences; below it forward.cu was faster
MANY = 48  # with so many sequences, assume that no single one holds most of the tokens


class Shares(NamedTuple):
    """A partition of blocks."""

    groups: int  # CTA groups that scan
    preparers: int  # blocks that prepare
    places: int  # for prepared chunks of each group, used in turn: more than two_roles.SCAN_STAGES

    @classmethod
    def of(cls, groups: int, preparers: int) -> Shares:
        """Return shares with as many places as preparing blocks need; more gained nothing (docs/internals/studies)."""
        return cls(groups, preparers, 2 * -(-preparers // groups) + 8)

    @property
    def counters(self) -> int:
        """Elements of ForwardParams.progress."""
        return self.groups * (-(-self.places // 32) * 32 + 32)


def chunks_of(T: int) -> int:
    """Number of chunks of a sequence in a call without gradients, whose last tokens may be in none."""
    return -(-whole.in_chunks(T, tails=True) // CHUNK)


def shares_of(x: Inputs, processors: int) -> Shares | None:
    """Return the fastest shares for a call, or None where forward.cu is as fast."""
    B, T, HV, _ = x.v.shape
    stores = x.checkpoint_every > 0
    if x.cu_seqlens is not None:
        states = int(x.initial_state is not None) + int(x.final_state)
        return packed_shares_for(x.cu_seqlens.shape[0] - 1, T // CHUNK * CHUNK, HV, states, stores, processors)
    return shares_for(B * HV, chunks_of(T), stores, processors)


@functools.lru_cache(whole.PLANS)
def shares_for(tiles: int, chunks: int, stores: bool, processors: int) -> Shares | None:
    """Return the fastest shares for `tiles` heads of `chunks` chunks, or None where forward.cu is as fast.

    The groups scan equally many chunks, as two of them can share a head (roles.cuh). With `stores` the call has
    checkpoints.
    """
    if not 0 < tiles <= MOST_TILES or chunks == 0 or processors < 3 * SLICES:
        return None

    def scan(groups: int) -> float:
        return -(-tiles * chunks // groups) * scans(groups, stores)

    fastest, shares = fastest_shares(range(1, tiles + 1), tiles * chunks, scan, processors)
    groups, chain = together(tiles, stores, processors)
    by_one_role = STARTS_TOGETHER + -(-tiles // groups) * chunks * chain
    return shares if STARTS + fastest < WORTH * by_one_role else None


@functools.lru_cache(whole.PLANS)
def packed_shares_for(
    sequences: int, tokens: int, heads: int, states: int, stores: bool, processors: int
) -> Shares | None:
    """Return the fastest shares for packed sequences, or None where forward.cu is as fast.

    The lengths are known only on the GPU; the estimate assumes equal ones. With fewer than MANY sequences a single one
    may hold most of the tokens, so the number of groups must divide the number of heads or be a multiple of it:
    otherwise some groups would scan one head of that sequence more than others.

    Args:
        tokens: of all sequences
        heads: value heads
        states: 0 to 2, how many of the initial and the final state the call has
        stores: the call has checkpoints
    """
    tiles = sequences * heads
    if not sequences or tokens < sequences * LEAST_TOKENS or processors < 3 * SLICES:
        return None
    chunks = tokens / CHUNK / sequences  # of a tile
    every = range(1, min(tiles, MOST_GROUPS_PACKED) + 1)
    numbers = [n for n in every if sequences >= MANY or heads % n == 0 or n % heads == 0]

    def scan(groups: int) -> float:
        return -(-tiles // groups) * (chunks * scans(groups, stores) + TILE + states * STATE)

    fastest, shares = fastest_shares(numbers, tiles * chunks, scan, processors)
    groups, chain = together(tiles, stores, processors)
    tile = chunks * chain + TILE_TOGETHER + states * STATE_TOGETHER
    by_one_role = STARTS_TOGETHER + -(-tiles // groups) * tile
    return shares if STARTS + fastest < WORTH * by_one_role else None


def scans(groups: int, stores: bool) -> float:
    """Microseconds that each of `groups` groups takes to scan a chunk; with `stores` the call has checkpoints."""
    return SCANS + SCANS_BESIDE * groups + (STORES if stores else 0)


def fastest_shares(
    numbers: Iterable[int], chunks: float, scan: Callable[[int], float], processors: int
) -> tuple[float, Shares]:
    """Return the shortest time of a call in microseconds, less STARTS, and its shares.

    Args:
        numbers: of groups, from which one is chosen
        chunks: that are prepared
        scan: the time in which so many groups scan them
    """
    every = []
    for groups in numbers:
        most = processors // SLICES * SLICES - groups * SLICES
        step = math.lcm(groups, SLICES)  # as many for each group, and whole clusters
        for preparers in {most, min(most, MOST_PREPARERS * groups) // step * step}:
            if preparers <= 0:
                continue
            prepare = chunks * PREPARES / preparers * (PREPARES_FOR_SEVERAL if preparers % groups else 1)
            waits = max(prepare, SCAN_WAITS * scan(groups))
            every.append((waits, preparers, max(prepare, scan(groups)), Shares.of(groups, preparers)))
    _, _, fastest, shares = min(every)
    return fastest, shares


def together(tiles: int, stores: bool, processors: int) -> tuple[int, float]:
    """Return forward.cu's number of CTA groups, and the microseconds that each takes for a chunk."""
    if tiles * WIDTH // 16 > processors:  # its blocks have 32 columns, as forward.variant_for chooses
        return min(tiles, max(processors // 4, 1)), WIDE_CHAIN + (WIDE_STORES_TOGETHER if stores else 0)
    return min(tiles, max(processors // 8, 1)), CHAIN + (STORES_TOGETHER if stores else 0)
