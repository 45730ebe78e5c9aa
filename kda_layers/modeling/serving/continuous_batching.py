"""Continuous batching of models with KDA layers by transformers' own engine, and `transformers serve`."""

from __future__ import annotations

import importlib

import transformers

from kda_layers.modeling import seams
from kda_layers.modeling.models.hybrid import HybridForCausalLM

# Path of what is wrapped, one of `OF_ENGINE` -> our wrapper, as "file.function".
WRAPPERS = {
    "PagedAttentionCache.__init__": "state_allocator.finish_cache",
    "ContinuousBatchingIOs._setup_static_tensors": "state_allocator.add_static_tensors",
    "ContinuousMixin.init_continuous_batching": "engine_options.check_model",
    "resolve_continuous_batching_config": "engine_options.choose_options",
    "ensure_decode_fast_path_is_available": "engine_options.allow_block_tables",
    "Scheduler.add_waiting_request": "engine_requests.check_request",
    "CBGenerateManager.init_cb": "server.share_sampling",
    "CBGenerateManager.generate_streaming": "server.check_first",
    "CBGenerateManager.generate_non_streaming": "server.check_first",
    "build_server": "server.end_with_calls",
}


def enable_continuous_batching() -> None:
    """Let transformers' continuous batching serve models with KDA layers, in this process.

    `model.generate_batch`, `ContinuousBatchingManager` and transformers' server (`transformers.cli.serve.Serve` with
    continuous_batching=True) then take `KDAForCausalLM` and the models that `swap_attention` converts to (KDALlama and
    so on). A request has one slot for the states of all its KDA layers, whatever its length. When all slots are taken,
    requests wait; a request that can never fit fails with a message that names the option. Prefix sharing is off for
    these models. On a GPU, models without softmax attention whose layers run on fast kernels (16 bits) are served with
    CUDA graphs and asynchronous batching, unless `ContinuousBatchingConfig` says otherwise (`use_cuda_graph`,
    `use_async_batching`) or compiles. Models of other kinds are served as before. Calling it again does nothing.

    For a model that cannot be served (`attention_bias="key"`, latent attention, tensor parallelism), these raise a
    ValueError.

    Raises:
        ImportError: this version of transformers has another engine; names what it lacks.
    """
    if HybridForCausalLM.batches_continuously:
        return
    owners = {seam.path: seams.owner(seam) for seam in seams.OF_ENGINE}
    types = getattr(*owners["ATTN_TYPE_TO_ALLOCATOR"])
    ours = importlib.import_module("kda_layers.modeling.serving.state_allocator")
    missing = ours.StateAllocator.__abstractmethods__
    if missing:
        raise _unknown(f"CacheAllocator.{min(missing)} is new")
    if ours.KDA in types:
        raise _unknown(f"it has an allocator of its own for {ours.KDA}")
    for path, wrap in WRAPPERS.items():
        file, function = wrap.split(".")
        wrapper = getattr(importlib.import_module(f"{__package__}.{file}"), function)
        owner, name = owners[path]
        setattr(owner, name, wrapper(getattr(owner, name)))
    types[ours.KDA] = ours.StateAllocator
    requests = importlib.import_module("kda_layers.modeling.serving.engine_requests")
    getattr(*owners["SCHEDULER_MAPPING"])[requests.FAIR] = requests.FairScheduler
    HybridForCausalLM.batches_continuously = True


def _unknown(reason: str) -> ImportError:
    return ImportError(
        f"enable_continuous_batching knows the engine of transformers {seams.OF_ENGINE[0].first} to "
        f"{seams.OF_ENGINE[0].last}, got transformers {transformers.__version__}: {reason}"
    )
