"""Cuts of the forward's sequences into segments."""

from __future__ import annotations

from typing import NamedTuple

from ....cuda.arch import ARCHS
from ....cuda.machine import Machine
from ...contract import Inputs
from . import forward as whole

MAPS, WALK = 1, 2  # of stage.cuh's SEGMENTS
AUTO_TOKENS, AUTO_HEADS = 2**16, 4  # what "auto" cuts: so many tokens or more of so few heads, measured
AUTO_PROCESSORS = 32  # and on so many multiprocessors or more: at most 16 are a group that maps


class Cut(NamedTuple):
    """Cuts of sequences, by their own length and number of value heads alone."""

    longer: int  # tokens from which a sequence is cut
    shortest: int = 1024  # tokens of a segment
    tiles: int = 64  # heads times segments of a sequence, about: with two blocks each they fill a GPU

    def segment_tokens(self, length: int, heads: int) -> int:
        """Tokens of a segment of a sequence that is cut: a power of two."""
        tokens = self.shortest
        while tokens * self.tiles < length * heads:
            tokens *= 2
        return tokens

    def most_segments(self, tokens: int, heads: int, packed: bool) -> int:
        """Segments of a sequence of `tokens`; if packed, at least those of any sequence of at most so many."""
        if packed:
            return max(1, min(-(-self.tiles // heads), -(-tokens // self.shortest)))
        return -(-tokens // self.segment_tokens(tokens, heads)) if tokens >= self.longer else 1

    def rows(self, x: Inputs, tails: bool = False) -> int:
        """At least the segments of all sequences that are cut, times the value heads."""
        (B, T, HV), packed = x.v.shape[:3], x.cu_seqlens is not None
        tokens = T if packed else whole.in_chunks(T, tails)
        return (T // self.longer if packed else B) * self.most_segments(tokens, HV, packed) * HV

    def defines(self, part: int) -> dict[str, str | int]:
        return {"SEGMENTS": part, "SEGMENT_TOKENS": self.shortest, "SEGMENT_TILES": self.tiles}


ALWAYS, AUTO = Cut(1024 + 1), Cut(AUTO_TOKENS)


def cut_of(x: Inputs) -> Cut:
    """The cut of a call whose sequences are cut."""
    return AUTO if x.segments == "auto" else ALWAYS


def cuts(x: Inputs, machine: Machine) -> bool:
    """Return True if a call has sequences that may be cut, by its options and shapes."""
    (T, HV), cut = x.v.shape[1:3], cut_of(x)
    if x.segments == "never" or cut.tiles < 2 * HV:
        return False
    if x.segments == "always":
        return cut.longer <= T
    hands_on = x.initial_state is not None or x.final_state or x.checkpoint_every  # equal bits in parts
    if HV > AUTO_HEADS or hands_on or cut.longer > T:  # in this order: no guard on T while compiling most models
        return False
    processors, arch, _ = machine.properties(x.q.device)
    return ARCHS[arch].bulk_copies and processors >= AUTO_PROCESSORS
