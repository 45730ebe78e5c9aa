"""Prefixes that requests of continuous batching share: copies of states at the ends of blocks of a prompt.

The engine shares pages of keys and values, which never change once they are full. A state changes with every token, so
what is kept of a prefix is a copy of all layers' states after it, in a slot of its own. A prompt is read up to such an
end, its states are copied, and the next step reads on; a later prompt with the same tokens begins with the copy. Ends
are multiples of a block of tokens at which a prefill in parts has the bits of one pass.

States are kept at two ends of a prompt: that of the longest prefix which it shares with another prompt, known by its
hash alone (many questions after one system prompt), and the last one (the next turn of a chat). Prompts wait while an
active request reads the prefix that they share. What was used least recently goes first, and everything when the cache
is full.
"""

from __future__ import annotations

import hashlib
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kda_layers.modeling.seams import RequestStatus

LEAST = 256  # fewest tokens that a later prompt must save for a state to be worth an extra step and a copy
MOST_SEEN = 65_536  # prefixes whose hash is remembered
SHARE = 4  # states of prefixes take at most 1 / SHARE of the slots


@dataclass
class Plan:
    """Ends of blocks of one prompt, and what a request does there.

    Attributes:
        names: of its first 1, 2, ... blocks of tokens. The last token is in none, as a request always reads it, nor is
            the one before in a prompt with forks, as the engine forks a request that has one token to read.
        shared: tokens of the longest prefix that it has in common with another prompt.
        keep: numbers of tokens after which its states are kept.
        end: tokens that it has read after the steps scheduled so far.
    """

    names: list[bytes]
    shared: int = 0
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
        self.states, self.block = weakref.proxy(states), block  # which holds this, and gigabytes
        self.reset()

    # ---------------------------------------------------------------- what the engine asks of a ledger of blocks

    def reset(self) -> None:
        """Forget everything; the slots are the pool's."""
        self.kept: OrderedDict[bytes, int] = OrderedDict()  # slot of a prefix, least recently used first
        self.seen: OrderedDict[bytes, str] = OrderedDict()  # the last request with a prefix
        self.plans: dict[str, Plan] = {}  # of requests in progress
        self.readers: dict[bytes, str] = {}  # the active request that began last with a prefix
        self.due: dict[str, int] = {}  # requests whose next states to keep are there, and after how many tokens

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        """Return True: no two requests have one slot."""
        return True

    def evict_cached_blocks(self) -> list[int]:
        """Give up the states of all prefixes, and return their slots."""
        slots = [*self.kept.values()]
        self.kept.clear()
        return slots

    # ---------------------------------------------------------------- requests

    def plan(self, state: Any, tokens: array[int]) -> None:
        """Plan the reading of a new request's prompt, whose id may be that of an earlier request.

        Args:
            tokens: of the prompt, as `check_prompt` returns them.
        """
        self.forget(state.request_id)
        if state.is_cpu_offloaded:  # it goes on where it was
            return
        size, hashed = self.block, hashlib.blake2b(digest_size=16)
        names: list[bytes] = []
        for start in range(0, (len(tokens) - 1 - (state.num_children > 0)) // size * size, size):
            hashed.update(tokens[start : start + size])
            names.append(hashed.copy().digest())
        mine = self.plans[state.request_id] = Plan(names)
        mine.shared = next((i for i in range(len(names), 0, -1) if names[i - 1] in self.seen), 0) * size
        ends = (mine.shared, 0), (len(names) * size, mine.shared)
        mine.keep = {end for end, before in ends if end - before >= LEAST}
        if mine.shared >= LEAST:
            other = self.plans.get(self.seen[self._name(mine, mine.shared)])
            if other is not None and other.end < mine.shared:
                other.keep.add(mine.shared)
                other.shared = max(other.shared, mine.shared)
        for name in names:
            self.seen[name] = state.request_id
            self.seen.move_to_end(name)
        while len(self.seen) > MOST_SEEN:
            self.seen.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """Drop what a request, which gives its slot back, was to keep."""
        plan = self.plans.pop(request_id, None)
        self.due.pop(request_id, None)
        if plan is not None and plan.end:
            for name in plan.names:
                if self.readers.get(name) == request_id:
                    del self.readers[name]

    # ---------------------------------------------------------------- steps

    def keep_due(self, cache: Any, active: Mapping[str, Any], waiting: Collection[str]) -> None:
        """Keep the states that the step launched last ends with, where they are to be kept, and the pages before them.

        The engine itself hashes pages as it reads a step's results. In asynchronous batching that is one step later,
        and it leaves out those of a part of a prompt.

        Args:
            active: active requests by id.
            waiting: ids of waiting ones; plans of others, which have failed, are dropped.
        """
        if len(self.plans) > len(active) + len(waiting):
            for request_id in [r for r in self.plans if r not in active and r not in waiting]:
                self.forget(request_id)
        for request_id, length in self.due.items():
            (source,) = self.states.block_table[request_id]
            for other in self._others(cache):
                tokens = active[request_id].initial_tokens[:length]
                other.mark_complete_blocks(request_id, tokens, length // other.tokens_per_page)
            name = self._name(self.plans[request_id], length)
            if name not in self.kept:
                full = len(self.kept) >= max(1, self.states.num_blocks // SHARE)
                slot = self.kept.popitem(last=False)[1] if full else self._free_slot()
                if slot is None:
                    continue
                self.states.copy_slot(source, slot)
                self.kept[name] = slot
            self.kept.move_to_end(name)
        self.due.clear()

    def waits(self, state: Any) -> bool:
        """Return True if an active request is about to read a prefix that this one, not yet begun, could begin with."""
        mine = self.plans.get(state.request_id)
        if mine is None or state.status != RequestStatus.PENDING or mine.shared < LEAST:
            return False
        name = self._name(mine, mine.shared)
        reader = self.readers.get(name)
        plan = None if reader is None else self.plans[reader]
        if plan is None or (plan.end >= mine.shared and self.due.get(reader) != mine.shared):
            return False
        if mine.shared - next(iter(self._kept(mine, mine.shared)), 0) < LEAST:
            return False
        plan.keep.add(mine.shared)
        return True

    def match(self, cache: Any, request_id: str, tokens: Sequence[int]) -> int:
        """Begin a request with the states of the longest prefix that all layers have, and return its number of tokens.

        States are then kept at ends that are at least `LEAST` tokens behind it.
        """
        plan = self.plans.get(request_id)
        if plan is None:
            return 0
        length, pages = self._available(cache, plan, tokens)
        slot = self._free_slot(but=self._name(plan, length)) if length else None
        if slot is None:
            length = 0
        else:
            source = self.kept[self._name(plan, length)]
            self.kept.move_to_end(self._name(plan, length))
            for allocator, matched in pages:
                allocator.acquire_prefix_blocks(request_id, length, matched)
            self.states.block_table[request_id] = [slot]
            self.states.copy_slot(source, slot)
        plan.keep = {end for end in plan.keep if end - length >= LEAST}
        return length

    def cut(self, state: Any, tokens: int, budget: int) -> int:
        """Return how many of a request's next `tokens` a step with this budget may read, up to an end to keep."""
        plan, start = self.plans.get(state.request_id), state.position_offset
        ends = () if plan is None else [end for end in plan.keep if start < end < start + min(tokens, budget)]
        return min(ends) - start if ends else budget

    def note(self, state: Any) -> None:
        """Note how far a request reads in the step that is being scheduled."""
        plan = self.plans.get(state.request_id)
        if plan is None:
            return
        if not plan.end:
            self.readers.update(dict.fromkeys(plan.names, state.request_id))
        plan.end = state.position_offset + len(state.tokens_to_process)
        if plan.end in plan.keep:
            self.due[state.request_id] = plan.end

    def _available(self, cache: Any, plan: Plan, tokens: Sequence[int]) -> tuple[int, list[tuple[Any, list[int]]]]:
        """Return the tokens of the longest prefix that all layers have, and other allocators with their pages of it."""
        kept = self._kept(plan, len(plan.names) * self.block)
        if not kept:
            return 0, []
        pages = [(a, a.match_prefix_blocks(tokens)) for a in self._others(cache)]
        limit = min((len(matched) * a.tokens_per_page for a, matched in pages), default=len(tokens))
        return next((length for length in kept if length <= limit), 0), pages

    def _others(self, cache: Any) -> list[Any]:
        return [a for a in cache.cache_allocators.values() if a.index != self.states.index]

    def _kept(self, plan: Plan, most: int) -> list[int]:
        """Return the lengths of a prompt's prefixes of at most `most` tokens whose states are kept, longest first."""
        return [i * self.block for i in range(most // self.block, 0, -1) if plan.names[i - 1] in self.kept]

    def _name(self, plan: Plan, length: int) -> bytes:
        return plan.names[length // self.block - 1]

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
