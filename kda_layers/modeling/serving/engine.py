"""transformers' continuous batching of models with KDA layers: options, requests, the order in which prompts are read.

This file is imported by `enable_continuous_batching` alone: it needs names that older transformers do not have.
"""

from __future__ import annotations

import bisect
import copy
import gc
import inspect
import logging
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from kda_layers.kernels.fused.mechanism import for_graph
from kda_layers.kernels.kda.contract import KDA as KDA_BACKENDS
from kda_layers.modeling.checks import is_stock, stored_dtype
from kda_layers.modeling.layer.forward import KDAForward
from kda_layers.modeling.seams import FIFOScheduler, RequestStatus
from kda_layers.modeling.serving.continuous_batching import wraps
from kda_layers.modeling.serving.latent_allocator import has_latents
from kda_layers.modeling.serving.state_allocator import KDA, check_config, default_blocks, has_states

logger = logging.getLogger("kda_layers")
CPU_BATCH_TOKENS = 512  # a step of so many keeps the cores of a CPU busy; the engine's 8192 take seconds
FAIR = "fair"
UNLIMITED = 2**31 - 1  # tokens: the engine's own bound
_longest: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of `longest_request`: every request asks

# While `init_continuous_batching` runs: its model; whether block tables are chosen for the model.
_model: ContextVar[Any] = ContextVar("kda_layers_model", default=None)
_tables_of_slots: ContextVar[bool] = ContextVar("kda_layers_tables_of_slots", default=False)


@wraps("ContinuousMixin.init_continuous_batching")
def check_model(init: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse in the caller's thread what the engine cannot serve."""
    config = self.config.get_text_config()
    if has_states(config):
        check_config(config)
        stock = [path for path, module in self.named_modules() if is_stock(module)]
        if stock:
            raise ValueError(
                f"every layer of linear attention of {type(self).__name__} must be swapped for continuous batching, "
                f"got stock layers at {', '.join(stock)}, whose states have no place in transformers' paged cache: "
                "call kda_layers.swap_attention(model) first"
            )
        stored_dtype(getattr(config, "linear_state_dtype", "float32"), self.dtype)
        if getattr(self, "_device_mesh", None) is not None:
            raise ValueError(
                "continuous batching of KDA layers needs the full model on one device, got tensor parallelism: "
                "load it without distributed_config"
            )
    token = _model.set(self)
    try:
        return init(self, *args, **kwargs)
    finally:
        _model.reset(token)


@wraps("resolve_continuous_batching_config")
def choose_options(resolve: Callable[..., Any], config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Choose what the user leaves open, for a model with KDA layers.

    Prompts are read in the order of `FairScheduler`. On a CPU, steps and the cache have a size that fits it. A model
    that `_needs_no_mask` gets CUDA graphs, asynchronous steps and steps of block tables: the engine uses these with
    flash attention alone, as other attention needs masks. KDA layers need none, and the first column of a block table
    is their slot.
    """
    model = _model.get()
    if model is None or not has_states(config):
        return resolve(config, cb_config, *args, **kwargs)
    chosen = copy.copy(cb_config)
    if chosen.scheduler_type == "fifo":
        chosen.scheduler_type = FAIR
    if model.device.type == "cpu":
        if chosen.max_batch_tokens is None:
            chosen.max_batch_tokens = CPU_BATCH_TOKENS
        if chosen.num_blocks is None and chosen.max_memory_percent is None:
            chosen.num_blocks = default_blocks(chosen.page_size)
    if has_latents(config):
        if chosen.max_blocks_per_request:
            logger.warning(
                "max_blocks_per_request=%d is taken for 0: block tables are for flash attention that reads keys and "
                "values from pages, and those of latent attention hold latents",
                chosen.max_blocks_per_request,
            )
        chosen.max_blocks_per_request = 0
    if not _needs_no_mask(model, config, chosen):
        return resolve(config, chosen, *args, **kwargs)
    if chosen.use_cuda_graph is None:
        chosen.use_cuda_graph = True
    if chosen.use_async_batching is None:  # which offloading excludes (`finish_cache`)
        chosen.use_async_batching = any(chosen.cuda_graph_booleans) and chosen.cpu_offload_space == 0
    token = _tables_of_slots.set(True)
    try:
        return resolve(config, chosen, *args, **kwargs)
    finally:
        _tables_of_slots.reset(token)


@wraps("ensure_decode_fast_path_is_available")
def allow_block_tables(ensure: Callable[..., None], config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
    """Allow block tables within `choose_options`, though attention is not by flash attention."""
    if not _tables_of_slots.get():
        ensure(config, cb_config, *args, **kwargs)
    elif cb_config.max_blocks_per_request != 0:
        cb_config.max_blocks_per_request = 1


def _needs_no_mask(model: Any, config: Any, cb_config: Any) -> bool:
    """True for a model of KDA layers alone on a GPU, whose kernels read nothing on the host, without torch.compile."""
    compiled = cb_config.varlen_compile_config, cb_config.decode_compile_config, getattr(config, "compile_config", None)
    if cb_config.default_compile_level > 0 or any(c is not None for c in compiled):
        return False
    alone = set(getattr(config, "layer_types", None) or ()) == {KDA}
    return alone and model.device.type == "cuda" and all(map(_reads_nothing, model.modules()))


def _reads_nothing(module: Any) -> bool:
    """False for a KDA layer of plain PyTorch, which reads slots on the host."""
    if not isinstance(module, KDAForward):
        return True
    weight, backend = module.o_proj.weight, module.kda_options.get("backend")
    facts = dict(packed=True), dict(decode=True)
    steps = [module.problem(weight.device, weight.dtype, has_state=True, **fields) for fields in facts]
    return all(KDA_BACKENDS.select(step, backend).name != "eager" for step in steps)


@wraps("ContinuousBatchingManager.stop")
def keep_without_collecting(stop: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Stop the engine; of one that is kept for a next session, nothing is free.

    The engine ends with a collection of Python's garbage, which takes 0.2 s with all that torch and transformers have
    imported. A kept engine leaves it out.
    """
    given = inspect.signature(stop).bind(self, *args, **kwargs).arguments
    ours = has_states(self.model.config.get_text_config()) and not gc.get_freeze_count()
    frozen = ours and given.get("keep_for_next_session", False)
    if frozen:
        gc.freeze()
    try:
        stop(self, *args, **kwargs)
    finally:
        if frozen:
            gc.unfreeze()


@wraps("ContinuousBatchingManager.join")
def end_at_once(join: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wake the thread that is to end: the engine would wait until it looks for requests again, up to 0.1 s."""
    self._wake_up_loop.set()
    join(self, *args, **kwargs)


@wraps("ContinuousBatchingAsyncIOs.infer_carry_over_ids")
def carry_over(infer: Callable[..., Tensor], self: Any) -> Tensor:
    """Return the engine's result without a list of as many numbers as a step may have tokens, for any model."""
    now, before = (
        self.io_pairs[i].host_io.req_id_to_new_token_position for i in (self.current_pair, 1 - self.current_pair)
    )
    ids = torch.full((self.max_batch_tokens,), -1, dtype=torch.int32)
    pairs = [(now[request], i) for i, request in enumerate(before) if request in now]
    if pairs:
        places, indices = zip(*pairs, strict=True)
        ids[list(places)] = torch.tensor(indices, dtype=torch.int32)
    return ids


@wraps("ContinuousBatchingManager.add_requests")
def keep_the_order(add: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Add requests of a model with KDA layers as they are given.

    The engine would sort them by their tokens, for prefixes, and fail all if one prompt is no list of numbers. Here
    prompts wait for the prefixes that they share.
    """
    if has_states(self.model.config.get_text_config()):
        self._use_prefix_sharing = False
    return add(self, *args, **kwargs)


@wraps("Scheduler.add_waiting_request")
def check_request(add: Callable[..., None], self: Any, state: Any) -> None:
    """Refuse a request that cannot be served.

    The engine fails that request. Without this it admits the request, and fails all when a step or the cache cannot
    hold it. A request without `max_new_tokens` ends when the cache is full.
    """
    if KDA in self.cache.cache_allocators:
        forks = [f"{state.request_id}__child#{i}" for i in range(state.num_children)]  # as the engine names them
        used = [
            name for name in (state.request_id, *forks) if name in self.active_requests or name in self.waiting_requests
        ]
        if used:
            raise ValueError(f"request_id must not be that of a request in progress, got {used[0]!r}")
        tokens = check_prompt(self.cache, state.initial_tokens, state.max_new_tokens)
        room = longest_request(self.cache) - len(state.initial_tokens)
        if state.max_new_tokens is None and longest_request(self.cache) < UNLIMITED:
            logger.warning("%s has no max_new_tokens: it ends after %d, which fit", state.request_id, room)
            state.max_new_tokens = state._new_tokens_limit = room
        if (prefixes := _prefixes_of(self.cache)) is not None:
            prefixes.plan(state, tokens)
        if state.num_children and len(state.initial_tokens) == 1:  # forked before its last token, it has none to read
            state.num_children = 0
            for fork in forks:
                child = state.create_equivalent_initial_request()
                child.request_id = fork
                self.add_waiting_request(child)
    add(self, state)


def check_prompt(cache: Any, tokens: Sequence[int], new: int | None) -> array[int]:
    """Return a prompt's tokens, of 64 bits each; raise a ValueError if the engine, with this cache, can never serve it
    and `new` tokens after it."""
    if len(tokens) == 0:
        raise ValueError("the prompt must have at least one token, got none")
    try:
        ids = array("q", tokens)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"the prompt must be a list of token ids: {error}") from error
    low, high = (int(t) for t in torch.frombuffer(ids, dtype=torch.int64).aminmax())  # 4,096 ints in a list: 0.3 ms
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
    return ids


def longest_request(cache: Any) -> int:
    """Return the largest number of tokens of one request that the cache can hold."""
    if cache not in _longest:

        def sectors(tokens: int) -> int:
            blocks = ((a.needs_new_blocks("", 0, tokens), a.blocks_per_sector) for a in cache.cache_allocators.values())
            return sum(-(-needed // held) for needed, held in blocks)

        _longest[cache] = bisect.bisect_right(range(UNLIMITED + 1), cache.num_sectors, key=sectors) - 1
    return _longest[cache]


@wraps("Scheduler.clear_cancelled_requests")
def end_cancelled(clear: Callable[..., list[Any]], self: Any) -> list[Any]:
    """Mark cancelled requests as finished: the step that asynchronous batching has launched reads them still, and the
    engine would look up their blocks for its results."""
    cancelled = clear(self)
    if KDA in self.cache.cache_allocators:
        for state in cancelled:
            state.status = RequestStatus.FINISHED
    return cancelled


@wraps("Scheduler._process_candidates")
def hold_back(process: Callable[..., Any], self: Any, candidates: Iterable[Any], *args: Any) -> Any:
    """Keep the states of prefixes that the last step has read; leave out prompts that are about to begin with one.

    A prompt waits for requests that are active, also for those which became so earlier in this step.
    """
    prefixes = _prefixes_of(self.cache)
    if prefixes is not None:
        prefixes.keep_due(self.cache, self.active_requests, self.waiting_requests)
        candidates = (state for state in candidates if not prefixes.waits(state))
    return process(self, candidates, *args)


@wraps("Scheduler._schedule_request")
def read_to_an_end(
    schedule: Callable[..., None], self: Any, state: Any, request_tokens: list[int], token_budget: int, *args: Any
) -> None:
    """End a step where the states of a prefix are to be kept."""
    prefixes = None if state.status == RequestStatus.DECODING else _prefixes_of(self.cache)
    if prefixes is None:
        return schedule(self, state, request_tokens, token_budget, *args)
    schedule(self, state, request_tokens, prefixes.cut(state, len(request_tokens), token_budget), *args)
    prefixes.note(state)


@wraps("ModelRunner._capture_graph")
def fuse_for_graphs(capture: Callable[..., None], self: Any, *args: Any) -> None:
    """Warm up and capture a step with the fused forms of few tokens, too: a graph's launches cost the host nothing."""
    with for_graph():
        capture(self, *args)


@wraps("ContinuousBatchProcessor.prepare_next_batch")
def tell_the_stream(prepare: Callable[..., bool], self: Any) -> bool:
    """Clear and copy slots on the stream of the steps."""
    if (states := self.cache.cache_allocators.get(KDA)) is not None:
        states.stream = self.inputs_and_outputs.compute_stream
    return prepare(self)


def _prefixes_of(cache: Any) -> Any:
    """Return the `Prefixes` of a cache with states, None where prefixes are not shared."""
    states = cache.cache_allocators.get(KDA)
    return states.prefixes if states is not None and cache.use_prefix_sharing else None


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
