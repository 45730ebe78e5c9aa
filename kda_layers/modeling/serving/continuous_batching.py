"""Continuous batching of models with KDA layers by transformers' own engine, and `transformers serve`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import transformers

from kda_layers.modeling import seams
from kda_layers.modeling.models.generation import LoopOnDevice

# What wraps which of `OF_ENGINE`: called with the function, then with the function's arguments.
WRAPPERS: dict[str, Callable[..., Any]] = {}


def wraps(*paths: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of what `enable_continuous_batching` puts around these functions of the engine."""

    def register(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        WRAPPERS.update(dict.fromkeys(paths, wrapper))
        return wrapper

    return register


def enable_continuous_batching() -> None:
    """Let transformers' continuous batching serve models with KDA layers, in this process.

    `model.generate_batch`, `ContinuousBatchingManager` and transformers' server (`transformers.cli.serve.Serve` with
    continuous_batching=True) then take `KDAForCausalLM`, the models that `convert_attention` makes (KDALlama and so on)
    and, after `swap_attention`, Kimi-Linear, Ling, Qwen3-Next, Qwen3.5, OLMo Hybrid and Lara Mini, which the server
    swaps itself.
    A request has one slot for the states of all its KDA layers, whatever its length. When all slots are taken, requests
    wait; a request that can never fit fails with a message that names the option. Prompts share prefixes, but for
    models with sliding windows (`allow_block_sharing=False` turns it off). On a GPU, models without softmax attention
    whose layers run on fast kernels (16 bits) are served with CUDA graphs and asynchronous batching, unless
    `ContinuousBatchingConfig` says otherwise (`use_cuda_graph`, `use_async_batching`) or compiles. Models of other
    kinds are served as before. Calling it again does nothing.

    For a model that cannot be served (`attention_bias="key"`, indexed attention, tensor parallelism, stock KDA layers),
    these raise a ValueError.

    Raises:
        ImportError: this version of transformers has another engine; names what it lacks.
    """
    if LoopOnDevice.batches_continuously:
        return
    owners = {seam.path: seams.owner(seam) for seam in seams.OF_ENGINE}
    if seams.installed("transformers") < (5, 19):  # whose names are those of later ones
        raise _unknown("it takes full and sliding attention alone")
    types = getattr(*owners["ATTN_TYPE_TO_ALLOCATOR"])
    # Here, as they need names that older versions of transformers lack.
    modules = ("state_allocator", "latent_allocator", "engine", "server")
    states, latents, engine, _ = (importlib.import_module(f"{__package__}.{name}") for name in modules)
    missing = states.StateAllocator.__abstractmethods__
    if missing:
        raise _unknown(f"CacheAllocator.{min(missing)} is new")
    if states.KDA in types:
        raise _unknown(f"it has an allocator of its own for {states.KDA}")
    for path, wrapper in WRAPPERS.items():
        owner, name = owners[path]
        setattr(owner, name, _wrapped(getattr(owner, name), wrapper))
    types[states.KDA] = states.StateAllocator
    types[seams.FULL_ATTENTION] = latents.with_latents(types[seams.FULL_ATTENTION])
    getattr(*owners["SCHEDULER_MAPPING"])[engine.FAIR] = engine.FairScheduler
    LoopOnDevice.batches_continuously = True


def _wrapped(function: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    return call


def _unknown(reason: str) -> ImportError:
    return ImportError(
        f"enable_continuous_batching knows the engine of transformers {seams.OF_ENGINE[0].first} to "
        f"{seams.OF_ENGINE[0].last}, got transformers {transformers.__version__}: {reason}"
    )
