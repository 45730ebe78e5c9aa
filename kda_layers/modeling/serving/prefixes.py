"""Prefixes that requests of continuous batching share: copies of states at the ends of blocks of a prompt.

The engine shares pages of keys and values, which never change once they are full. A state changes with every token, so
what is kept of a prefix is a copy of all layers' states after it, in a slot of its own. A prompt is read up to such an
end, its states are copied, and the next step reads on; a later prompt with the same tokens begins with the copy. Ends
are multiples of a block of tokens at which a prefill in parts has the bits of one pass.

States are kept at two ends of a prompt: that of the longest prefix which an earlier prompt had, known by its hash alone
(many questions after one system prompt), and the last one (the next turn of a chat). Prompts wait while another one
reads the prefix that they share. What was used least recently goes first, and everything when the cache is full.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kda_layers.modeling.seams import RequestStatus

LEAST = 256  # tokens that the next prompt with a prefix is spared, or its end is not worth a step and a copy
MOST_SEEN = 65_536  # ends of which only the hash is known
SHARE = 4  # a fourth of the slots holds states of prefixes, at most


@dataclass
class Plan:
    """Ends of blocks of one prompt, and what a request does there.

    Attributes:
        names: of its first 1, 2, ... blocks of tokens, without the last token, which a request always reads.
        seen: tokens of the longest prefix that an earlier prompt had.
        keep: numbers of tokens after which its states are kept.
        end: tokens that it has read after the steps scheduled so far.
    """

    names: list[bytes]
    seen: int
    keep: set[int] = field(default_factory=set)
    end: int = 0


class Prefixes:
    """The states of prefixes that a `StateAllocator` holds; also its ledger of blocks, as the engine calls it."""

    def __init__(self, states: Any, block: int) -> None:
        """Hold nothing.

        Args:
            states: the allocator.
            block: tokens between two ends, a multiple of the other allocators' pages.
        """
        self.states, self.block = states, block
        self.reset()

    # ---------------------------------------------------------------- what the engine asks of a ledger of blocks

    def reset(self) -> None:
        """Forget everything; the slots are the pool's."""
        self.kept: OrderedDict[bytes, int] = OrderedDict()  # slot of a prefix, least recently used first
        self.seen: OrderedDict[bytes, None] = OrderedDict()
        self.plans: dict[str, Plan] = {}  # of requests in the order of their first step
        self.due: dict[str, int] = {}  # requests whose next states to keep are there, and after how many tokens
        self.copies: list[tuple[int, int]] = []  # from slot to slot, before the next step

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        """Return True: no two requests have one slot."""
        return True

    def evict_cached_blocks(self) -> list[int]:
        """Give up the states of all prefixes, and return their slots."""
        slots = [*self.kept.values()]
        self.kept.clear()
        return slots

    # ---------------------------------------------------------------- scheduling

    def keep_due(self, known: Sequence[Mapping[str, Any]]) -> None:
        """Keep the states that the step launched last ends with, where they are to be kept.

        Args:
            known: requests by id, active and waiting; plans of others, which have failed, are dropped.
        """
        for request_id in [*self.plans]:
            if not any(request_id in requests for requests in known):
                self.forget(request_id)
        for request_id, length in self.due.items():
            (source,) = self.states.block_table[request_id]
            name = self._name(self.plans[request_id], length)
            assert name is not None
            if name not in self.kept:
                full = len(self.kept) >= max(1, self.states.num_blocks // SHARE)
                slot = self.kept.popitem(last=False)[1] if full else self._free_slot()
                if slot is None:
                    continue
                self.copies.append((source, slot))
                self.kept[name] = slot
            self.kept.move_to_end(name)
        self.due.clear()

    def waits(self, cache: Any, state: Any) -> bool:
        """Return True if another request is about to read a prefix that this one, not yet begun, could begin with."""
        if state.status != RequestStatus.PENDING or state.is_cpu_offloaded:
            return False
        tokens, me = state.remaining_prefill_tokens, state.request_id
        mine = self.plans.get(me)
        if mine is None:
            mine = self.plans[me] = self._plan(tokens)
        if mine.seen - self._available(cache, mine, tokens)[0] < LEAST:
            return False
        name = self._name(mine, mine.seen)
        for request_id, plan in self.plans.items():
            if request_id == me:  # whoever waits does so for an earlier one
                return False
            if plan.end < mine.seen and self._name(plan, mine.seen) == name:
                plan.keep.add(mine.seen)
                return True
        return False

    def match(self, cache: Any, request_id: str, tokens: Sequence[int]) -> int:
        """Begin a request with the states of the longest prefix that is kept, and return its number of tokens."""
        plan = self.plans.get(request_id)
        if plan is None:
            return 0
        length, pages = self._available(cache, plan, tokens)
        if not length:
            return 0
        name = self._name(plan, length)
        assert name is not None
        self.kept.move_to_end(name)
        slot = self._free_slot(but=name)
        if slot is None:
            return 0
        for allocator, matched in pages:
            allocator.acquire_prefix_blocks(request_id, length, matched)
        self.states.block_table[request_id] = [slot]
        self.copies.append((self.kept[name], slot))
        return length

    def cut(self, state: Any, tokens: int, budget: int) -> int:
        """Return how many of a request's next `tokens` a step with this budget may read, up to an end to keep."""
        plan, start = self.plans.get(state.request_id), state.position_offset
        ends = () if plan is None else [end for end in plan.keep if start < end < start + min(tokens, budget)]
        return min(ends) - start if ends else budget

    def note(self, state: Any) -> None:
        """Note how far a request reads in the step that is being scheduled."""
        plan = self.plans.get(state.request_id)
        if plan is not None:
            plan.end = state.position_offset + len(state.tokens_to_process)
            if plan.end in plan.keep:
                self.due[state.request_id] = plan.end

    def forget(self, request_id: str) -> None:
        """Drop what a request, which gives its slot back, was to keep."""
        self.plans.pop(request_id, None)
        self.due.pop(request_id, None)

    def copy(self) -> None:
        """Launch the copies: after the step before, and in their order, as one may read what another one writes."""
        for source, target in self.copies:
            self.states.copy_slot(source, target)
        self.copies.clear()

    def _plan(self, tokens: Sequence[int]) -> Plan:
        names: list[bytes] = []
        text, size = array("q", tokens), self.block
        for start in range(0, (len(tokens) - 1) // size * size, size):
            parent = names[-1] if names else b""
            names.append(hashlib.blake2b(parent + text[start : start + size].tobytes(), digest_size=16).digest())
        seen = next((i for i in range(len(names), 0, -1) if names[i - 1] in self.seen), 0) * size
        last = len(names) * size
        keep = {end for end, before in ((seen, 0), (last, seen)) if end - before >= LEAST}
        for name in names:
            self.seen[name] = None
            self.seen.move_to_end(name)
        while len(self.seen) > MOST_SEEN:
            self.seen.popitem(last=False)
        return Plan(names, seen, keep)

    def _available(self, cache: Any, plan: Plan, tokens: Sequence[int]) -> tuple[int, list[tuple[Any, list[int]]]]:
        """Return the tokens of the longest prefix that all layers have, and other allocators with their pages of it."""
        kept = [i * self.block for i in range(len(plan.names), 0, -1) if plan.names[i - 1] in self.kept]
        if not kept:
            return 0, []
        others = [a for a in cache.cache_allocators.values() if a is not self.states]
        pages = [(a, a.match_prefix_blocks(tokens)) for a in others]
        limit = min((len(matched) * a.tokens_per_page for a, matched in pages), default=len(tokens))
        return next((length for length in kept if length <= limit), 0), pages

    def _name(self, plan: Plan, length: int) -> bytes | None:
        blocks = length // self.block
        return plan.names[blocks - 1] if 0 < blocks <= len(plan.names) else None

    def _free_slot(self, but: bytes | None = None) -> int | None:
        """Return a slot of the pool or, if it has none, that of the prefix used least recently; None without any."""
        pool, index = self.states.pool, self.states.index
        if not pool.count_free_blocks(index) and pool.num_free_sectors:
            pool.allocate_sector(index)
        if pool.count_free_blocks(index):
            (slot,) = pool.get_free_blocks(index, 1)
            return int(slot)
        name = next((name for name in self.kept if name != but), None)
        return None if name is None else self.kept.pop(name)
