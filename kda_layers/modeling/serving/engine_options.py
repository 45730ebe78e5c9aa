"""Requests to transformers' continuous batching, and the options that it chooses for models with KDA layers.

This file is imported by `enable_continuous_batching` alone.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from kda_layers.kernels.declarations import arch_of
from kda_layers.kernels.kda.contract import Problem
from kda_layers.kernels.kda.dispatch import KDA as KDA_BACKENDS
from kda_layers.modeling.layer.layer import KimiDeltaAttention
from kda_layers.modeling.serving.engine_requests import FAIR
from kda_layers.modeling.serving.state_allocator import KDA, check_config, default_blocks, has_states

CPU_BATCH_TOKENS = 512  # a step of so many keeps the cores of a CPU busy; the engine's 8192 take seconds

# While `init_continuous_batching` runs: its model; whether block tables are chosen for the model.
_model: ContextVar[Any] = ContextVar("kda_layers_model", default=None)
_tables_of_slots: ContextVar[bool] = ContextVar("kda_layers_tables_of_slots", default=False)


def check_model(init: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `ContinuousMixin.init_continuous_batching`: refuse in the caller's thread what the engine cannot serve."""

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config.get_text_config()
        if has_states(config):
            check_config(config)
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

    return wrapper


def choose_options(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `resolve_continuous_batching_config`: what the user leaves open, for a model with KDA layers.

    Prompts are read in the order of `FairScheduler`. On a CPU, steps and the cache have a size that fits it. A model
    that `_needs_no_mask` gets CUDA graphs, asynchronous steps and steps of block tables: the engine uses these with
    flash attention alone, as other attention needs masks. KDA layers need none, and the first column of a block table
    is their slot.
    """

    @functools.wraps(resolve)
    def wrapper(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = _model.get()
        if model is None or not has_states(config):
            return resolve(config, cb_config, *args, **kwargs)
        chosen = copy.copy(cb_config)
        if chosen.scheduler_type == "fifo":
            chosen.scheduler_type = FAIR
        if model.device.type == "cpu":
            _choose_sizes(chosen)
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

    return wrapper


def allow_block_tables(ensure: Callable[..., None]) -> Callable[..., None]:
    """Wrap `ensure_decode_fast_path_is_available`, within `choose_options`."""

    @functools.wraps(ensure)
    def wrapper(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
        if not _tables_of_slots.get():
            return ensure(config, cb_config, *args, **kwargs)
        if cb_config.max_blocks_per_request != 0:
            cb_config.max_blocks_per_request = 1

    return wrapper


def _choose_sizes(chosen: Any) -> None:
    """Set the sizes of steps and of the cache on a CPU that are not given."""
    if chosen.max_batch_tokens is None:
        chosen.max_batch_tokens = CPU_BATCH_TOKENS
    if chosen.num_blocks is None and chosen.max_memory_percent is None:
        chosen.num_blocks = default_blocks(chosen.page_size)


def _needs_no_mask(model: Any, config: Any, cb_config: Any) -> bool:
    """True for a model of KDA layers alone on a GPU, whose kernels read nothing on the host, without torch.compile."""
    compiled = (
        cb_config.varlen_compile_config,
        cb_config.decode_compile_config,
        getattr(config, "compile_config", None),
    )
    if cb_config.default_compile_level > 0 or any(c is not None for c in compiled):
        return False
    alone = set(getattr(config, "layer_types", None) or ()) == {KDA}
    return alone and model.device.type == "cuda" and all(map(_reads_nothing, model.modules()))


def _reads_nothing(module: Any) -> bool:
    """False for a KDA layer of plain PyTorch, which reads slots on the host."""
    if not isinstance(module, KimiDeltaAttention):
        return True
    weight, options = module.q_proj.weight, module.kda_options
    problem = Problem(
        weight.device.type, arch_of(weight.device), weight.dtype, weight.dtype, module.head_dim, module.value_head_dim,
        module.num_value_heads // module.num_heads, options["gate_activation"], options["beta_activation"], True,
        packed=True, has_state=True,
    )  # fmt: skip
    steps = problem, replace(problem, decode=True, packed=False)
    return all(KDA_BACKENDS.select(step, options.get("backend")).name != "eager" for step in steps)
