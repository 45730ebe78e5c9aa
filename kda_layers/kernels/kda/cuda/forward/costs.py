"""Expected times of the forms of the forward in microseconds, from one model of measured times.

Times are within 7 % of those measured on an H100, with segments within 16 % of those on an H200
(docs/internals/kernels/forward.md). Lengths of packed sequences are known only on the GPU: they are taken for equal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ....cuda.machine import Properties
from ...contract import CHUNK
from ..spec import PLANS, Signature, in_chunks

WIDTH = 128  # of heads
BV = 64  # columns of V per block that scans
SLICES = WIDTH // BV  # blocks of a CTA group that scans, a cluster
SCAN_STAGES, STATE_STAGES = 3, 4  # chunks in shared memory; of scans of states alone, and their v
STRETCH = 12  # chunks that a CTA group follows at once: of 6, 8, 12 and 16 the fastest with 8 heads

# A chunk of one head takes a multiprocessor that prepares 5.05, and a group that scans 0.99 and some for each group. In
# one role a chain of chunks takes 1.25 for each, or where blocks have 32 columns of V 1.95 on an H200 and up to 2.2 on
# an H100. The rest does not depend on the length. STORES is what a checkpoint adds to the scan of a chunk, within 3 %
# on an H200; STORES_TOGETHER and WIDE_STORES_TOGETHER are the same in one role.
PREPARES, SCANS, SCANS_BESIDE, STARTS = 5.05, 0.99, 0.006, 16.0
PREPARES_HEADS = 3.5  # with gates of heads, on an H200
# From the end of preparation to that of the scan. 32 heads of 1,024 to 8,192 tokens took an H200 24 us, and 4.65 a
# chunk that a multiprocessor prepares. With these numbers calls with checkpoints would get other splits, and lose 4 %.
LAST = 2.0
# Blocks that prepare for several groups wait for each of them, unless every chunk has a row of its own. Relative to
# these times, 21 groups with 90 such blocks took 7 % longer than 22 groups with 88 blocks, four for each group.
PREPARES_FOR_SEVERAL = 1.06
# Where groups lead by the state alone and others follow with the outputs: a chunk of those that lead, of those that
# follow, and the rest, as an H200 took from 4,096 to 65,536 tokens of 1 to 13 heads. Where not every group has as many
# that follow, it took 4 to 8 % longer. Expected times of the chosen splits are within 3 %.
LEADS, FOLLOWS, STARTS_FOLLOWED, FOLLOWS_SEVERAL = 0.72, 1.19, 28.0, 1.08
MOST_FOLLOWERS, MOST_LEADING = (2, 3), (13, 15)  # for each group; groups: without and with saving. More gained nothing
MOST_PREPARERS = 8  # for each group; more enlarge the ring, which is to stay in L2, and gained nothing
CHAIN, WIDE_CHAIN, STARTS_TOGETHER = 1.25, 2.1, 10.0
STORES, STORES_TOGETHER, WIDE_STORES_TOGETHER = 0.72, 0.16, 0.3
# What saving adds to the scan of a chunk: states, V' and, in one role, prepared chunks. An H200 took 0.32 with 8 groups
# and 0.5 with 24 and 25. WIDE_SAVES_TOGETHER makes up the 330 us of one role. SAVES_TOGETHER is not measured: in
# proportion to STORES_TOGETHER.
SAVES, SAVES_TOGETHER, WIDE_SAVES_TOGETHER = 0.5, 0.2, 0.4
MOST_TILES = 512  # of one length; with more, two roles were not measured
MOST_GROUPS_PACKED = 32  # one lane of a warp tracks each group
# Per packed tile, in addition to its chunks, and per state loaded or stored; _TOGETHER: in one role. STATE was 2.0 with
# 27 groups of short sequences; 2.5 leaves a margin for shapes that were not measured.
TILE, TILE_TOGETHER, STATE, STATE_TOGETHER = 0.95, 1.4, 2.5, 1.3
SCAN_WAITS = 1.05  # penalty on the scan's time: if both roles take equally long, the scan stalls on preparation
LEAST_TOKENS = 2 * CHUNK  # mean length of packed sequences; below it one role was faster
MANY = 48  # with so many sequences, assume that no single one holds most of the tokens
TRANSITION, COMBINES, LAST_SCAN = 1.2, 1.25, 2.2  # of a chunk, of a segment, of a chunk


class Split(NamedTuple):
    """The number of blocks that scan and that prepare."""

    groups: int  # CTA groups that scan
    preparers: int  # blocks that prepare
    ring_slots: int  # for prepared chunks of each group, used in turn: at least `least_slots`
    followers: int = 0  # CTA groups that compute outputs, where the others scan states alone

    @classmethod
    def of(cls, groups: int, preparers: int, followers: int = 0) -> Split:
        """Return a split with as many ring slots as preparing blocks need; more gained nothing."""
        split = cls(groups, preparers, 2 * -(-preparers // groups) + 8, followers)
        return split._replace(ring_slots=max(split.ring_slots, split.least_slots))

    @property
    def least_slots(self) -> int:
        """The fewest ring slots that a plan may have.

        A slot counts as read SCAN_STAGES or STATE_STAGES copies later, for a follower perhaps in its next stretch. With
        these slots no block deadlocks, and a group leads by one stretch for each of its followers.
        """
        if not self.followers:
            return SCAN_STAGES + 1
        return STRETCH * (-(-self.followers // self.groups) + 1) + STATE_STAGES

    @property
    def handed_states(self) -> int:
        """States of a group that are handed over, used in turn."""
        return self.ring_slots // STRETCH + 2 if self.followers else 1

    @property
    def counters(self) -> int:
        """Elements of ForwardParams.progress."""
        return self.groups * (2 * -(-self.ring_slots // 32) * 32 + 32)


class Work(NamedTuple):
    """The chunks and states of a call."""

    tiles: int  # pairs of a sequence and a value head
    chunks: float  # of a tile, on average
    heads: int
    states: int  # 0 to 2, how many of the initial and the final state the call has
    stores: bool  # checkpoints
    saves: bool  # what the backward reads
    packed: bool
    prepares: float  # time of a chunk's preparation

    @classmethod
    def of(cls, s: Signature) -> Work:
        """Return those of a call, whose last tokens are in no chunk if it has no gradients."""
        N, (_, T, HV, _) = s.sequences, s.v_shape
        chunks: float = -(-in_chunks(T, not s.saves) // CHUNK)
        if s.packed:
            chunks = T // CHUNK / N if N else 0
        states = int(s.initial_state) + int(s.final_state)
        stores = s.checkpoints and s.rows is None  # an engine's is one of a tile
        return cls(N * HV, chunks, HV, states, stores, s.saves, s.packed, prepare_us(s))


def prepare_us(s: Signature) -> float:
    """Return the expected time in which a multiprocessor prepares a chunk."""
    return PREPARES_HEADS if s.head_gates else PREPARES


def one_role_us(s: Signature, properties: Properties) -> float:
    """Return the expected time of a call in one role."""
    work, processors = Work.of(s), properties.processors
    if work.tiles * WIDTH // 16 > processors:  # its blocks have 32 columns, as one_role.variant_for chooses
        slices, chain, stores, saved = 4, WIDE_CHAIN, WIDE_STORES_TOGETHER, WIDE_SAVES_TOGETHER
    else:
        slices, chain, stores, saved = 8, CHAIN, STORES_TOGETHER, SAVES_TOGETHER
    tile = work.chunks * (chain + stores * work.stores + saved * work.saves)
    if work.packed:
        tile += TILE_TOGETHER + work.states * STATE_TOGETHER
    rounds = -(-work.tiles // max(min(work.tiles, processors // slices), 1))
    return STARTS_TOGETHER + rounds * tile


def two_roles_us(s: Signature, properties: Properties) -> float:
    """Return the expected time of a call in two roles, infinite where there is no split."""
    found = fastest(Work.of(s), properties.processors)
    return found[0] if found else math.inf


@functools.lru_cache(PLANS)
def fastest(work: Work, processors: int) -> tuple[float, Split] | None:
    """Return the expected time in two roles and the fastest split, or None where they were not measured.

    With sequences of one length the groups scan equally many chunks, as two of them can share a head (roles.cuh). With
    fewer than MANY packed sequences a single one may hold most of the tokens, so the number of groups must divide the
    number of heads or be a multiple of it: otherwise some groups would scan one head of that sequence more than others.
    """
    if unmeasured(work, processors):
        return None
    if work.packed:
        every = range(1, min(work.tiles, MOST_GROUPS_PACKED) + 1)
        many = work.tiles >= MANY * work.heads
        numbers = [n for n in every if many or work.heads % n == 0 or n % work.heads == 0]
    else:
        numbers = list(range(1, work.tiles + 1))

    def scan(groups: int) -> float:
        chunk = SCANS + SCANS_BESIDE * groups + STORES * work.stores + SAVES * work.saves
        if work.packed:
            return -(-work.tiles // groups) * (work.chunks * chunk + TILE + work.states * STATE)
        return -(-int(work.tiles * work.chunks) // groups) * chunk

    time, split = fastest_split(numbers, work.tiles * work.chunks * work.prepares, scan, processors, not work.saves)
    plain = STARTS + time, split
    return min([plain, *splits_with_followers(work, processors)], key=lambda found: found[0])


def splits_with_followers(work: Work, processors: int) -> list[tuple[float, Split]]:
    """Return expected times and splits where a group leads each tile by the state alone, and others follow."""
    found: list[tuple[float, Split]] = []
    groups = work.tiles
    if work.packed or work.stores or work.chunks <= STRETCH or groups > MOST_LEADING[work.saves]:
        return found
    follows = FOLLOWS + SAVES * work.saves
    for followers in range(groups, MOST_FOLLOWERS[work.saves] * groups + 1):
        most = processors // SLICES * SLICES - SLICES * (groups + followers)
        preparers = min(most, MOST_PREPARERS * groups) // SLICES * SLICES
        if preparers <= 0:
            break
        chain = STARTS_FOLLOWED + work.chunks * max(LEADS, follows * groups / followers)
        chain *= FOLLOWS_SEVERAL if followers % groups else 1
        prepares = STARTS + groups * work.chunks * work.prepares / preparers + LAST
        found.append((max(prepares, chain), Split.of(groups, preparers, followers)))
    return found


def unmeasured(work: Work, processors: int) -> list[str]:
    """Return the reasons, each 'what it is, what it needs', why nothing is known of two roles for a call."""
    reasons = []
    if processors < 3 * SLICES:
        reasons.append(f"the GPU has {processors} multiprocessors, needs {3 * SLICES}")
    if not work.packed and work.tiles > MOST_TILES:
        reasons.append(f"B * HV is {work.tiles}, needs at most {MOST_TILES}")
    if work.packed and work.chunks * CHUNK < LEAST_TOKENS:
        reasons.append(f"packed sequences have {work.chunks:.1f} chunks, needs {LEAST_TOKENS // CHUNK} on average")
    if not work.packed and not work.chunks:
        reasons.append("no sequence has a chunk, needs one")
    return reasons


def fastest_split(
    numbers: Iterable[int], prepare: float, scan: Callable[[int], float], processors: int, in_ring: bool = True
) -> tuple[float, Split]:
    """Return the shortest time, less STARTS, and its split.

    Args:
        numbers: of groups, from which one is chosen
        prepare: the time in which one multiprocessor prepares every chunk
        scan: the time in which so many groups scan them
        in_ring: blocks that prepare wait for slots of a ring; if not, all that do not scan prepare
    """
    every = []
    for groups in numbers:
        most = processors // SLICES * SLICES - groups * SLICES
        step = math.lcm(groups, SLICES)  # as many for each group, and whole clusters
        for preparers in {most, min(most, MOST_PREPARERS * groups) // step * step} if in_ring else {most}:
            if preparers <= 0:
                continue
            prepares = prepare / preparers * (PREPARES_FOR_SEVERAL if in_ring and preparers % groups else 1)
            waits = max(prepares, SCAN_WAITS * scan(groups))
            every.append((waits, preparers, max(prepares + LAST, scan(groups)), Split.of(groups, preparers)))
    _, _, time, split = min(every)
    return time, split


def transitions_split(
    scanned: int, chunks: int, all_chunks: int, processors: int, prepares: float = PREPARES
) -> tuple[float, Split]:
    """Return the time and the fastest split for transitions of `scanned` segments of `chunks` chunks in two roles.

    Every one of `all_chunks` that are prepared, each in the time `prepares`, has a ring slot of its own, as it is kept.
    """

    def time(groups: int) -> float:
        prepare = all_chunks * prepares / (processors - SLICES * groups)
        return max(prepare, -(-scanned // groups) * chunks * TRANSITION)

    groups = min(range(1, min(scanned, (processors - 1) // SLICES) + 1), key=time)
    return time(groups), Split(groups, processors - SLICES * groups, -(-scanned // groups) * chunks)


def segments_us(s: Signature, processors: int, two_roles: bool) -> float:
    """Return the expected time of a call whose sequences are cut: transitions, combining them, and the last scan."""
    assert s.cut is not None
    N, (_, T, HV, _) = s.sequences, s.v_shape
    tokens = max(T // max(N, 1), 1) if s.packed else T
    segments = s.cut.most_segments(tokens, HV, packed=False)
    chunks = min(s.cut.segment_tokens(tokens, HV), tokens) // CHUNK
    tiles = N * segments * HV
    if two_roles and segments > 1:
        first, _ = transitions_split(N * (segments - 1) * HV, chunks, tiles * chunks, processors, prepare_us(s))
    else:
        first = -(-tiles // max(processors // 8, 1)) * chunks * CHAIN
    last = -(-tiles * SLICES // processors) * chunks * LAST_SCAN
    return STARTS + first + COMBINES * segments + last
