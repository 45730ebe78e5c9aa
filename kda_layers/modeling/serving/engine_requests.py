"""Requests of transformers' continuous batching: which are refused, and the order in which prompts are read.

This file is imported by `enable_continuous_batching` alone: it needs names that older transformers do not have.
"""

from __future__ import annotations

import bisect
import functools
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

from kda_layers.modeling.seams import FIFOScheduler, RequestStatus
from kda_layers.modeling.serving.state_allocator import KDA

logger = logging.getLogger("kda_layers")
FAIR = "fair"
UNLIMITED = 2**31 - 1  # tokens: the engine's own bound


def check_request(add: Callable[..., None]) -> Callable[..., None]:
    """Wrap `Scheduler.add_waiting_request`: refuse a request that cannot be served.

    The engine fails that request. Without this it admits the request, and fails all when a step or the cache cannot
    hold it. A request without `max_new_tokens` ends when the cache is full.
    """

    @functools.wraps(add)
    def wrapper(self: Any, state: Any) -> None:
        if KDA in self.cache.cache_allocators:
            if state.request_id in self.active_requests or state.request_id in self.waiting_requests:
                raise ValueError(f"request_id must not be that of a request in progress, got {state.request_id!r}")
            check_prompt(self.cache, state.initial_tokens, state.max_new_tokens)
            room = longest_request(self.cache) - len(state.initial_tokens)
            if state.max_new_tokens is None and longest_request(self.cache) < UNLIMITED:
                logger.warning("%s has no max_new_tokens: it ends after %d, which fit", state.request_id, room)
                state.max_new_tokens = state._new_tokens_limit = room
        add(self, state)

    return wrapper


def check_prompt(cache: Any, tokens: Sequence[int], new: int | None) -> None:
    """Raise a ValueError if the engine, with this cache, can never serve a prompt and `new` tokens after it."""
    if len(tokens) == 0:
        raise ValueError("the prompt must have at least one token, got none")
    try:
        low, high = min(map(operator.index, tokens)), max(map(operator.index, tokens))
    except TypeError as error:
        raise ValueError(f"the prompt must be a list of token ids: {error}") from error
    if low < 0 or high >= cache.config.vocab_size:
        raise ValueError(
            f"token ids must be from 0 to {cache.config.vocab_size - 1}, the model's vocabulary, got "
            f"{low if low < 0 else high}"
        )
    new, room = max(new or 0, 0), longest_request(cache)
    if len(tokens) + new > room:
        more = "" if room == UNLIMITED else ", or raise num_blocks or max_memory_percent of ContinuousBatchingConfig"
        raise ValueError(
            f"a request of {len(tokens)} prompt tokens and {new} new ones is longer than the cache, which has room for "
            f"{room} tokens: shorten it (max_tokens){more}"
        )


def longest_request(cache: Any) -> int:
    """Return the largest number of tokens of one request that the cache can hold."""

    def sectors(tokens: int) -> int:
        blocks = ((a.needs_new_blocks("", 0, tokens), a.blocks_per_sector) for a in cache.cache_allocators.values())
        return sum(-(-needed // held) for needed, held in blocks)

    return bisect.bisect_right(range(UNLIMITED + 1), cache.num_sectors, key=sectors) - 1


class FairScheduler(FIFOScheduler):
    """Reads prompts in the order of their arrival in one step, and the shortest first in the next.

    A step reads at most `max_batch_tokens`. In the order of arrival alone, a prompt of 80,000 tokens takes all of them
    for many steps, and a short one waits for its end. Here the oldest prompt has every other step, and a short one
    waits for two steps at most. Decoding comes first in any step.
    """

    _in_order = False  # True in every other step

    def _process_candidates(self, candidates: list[Any], *args: Any) -> Any:
        self._in_order = not self._in_order
        # With little of the cache left, only the first prompt is read: the oldest, so that it ends.
        if not self._in_order and self._try_to_meet_safety_margin():
            candidates = sorted(candidates, key=_unread)
        return super()._process_candidates(candidates, *args)


def _unread(state: Any) -> int:
    return 0 if state.status == RequestStatus.DECODING else len(state.remaining_prefill_tokens)
