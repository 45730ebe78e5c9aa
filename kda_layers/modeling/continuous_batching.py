"""Continuous batching of models with KDA layers by transformers' own engine, and `transformers serve`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import transformers

from kda_layers.modeling import families

ENGINE = "transformers.generation.continuous_batching"
SERVER = "transformers.cli.serving.model_manager"
TESTED = "5.23"
# (module of the engine, class or "" for a function, name, our wrapper as "file.function")
WRAPPED = (
    ("cache", "PagedAttentionCache", "__init__", "state_allocator.finish_cache"),
    ("input_outputs", "ContinuousBatchingIOs", "_setup_static_tensors", "state_allocator.add_static_tensors"),
    ("continuous_api", "ContinuousMixin", "init_continuous_batching", "engine_options.check_model"),
    ("continuous_api", "", "resolve_continuous_batching_config", "engine_options.choose_graphs"),
    ("initialization", "", "ensure_decode_fast_path_is_available", "engine_options.allow_block_tables"),
    ("scheduler", "Scheduler", "add_waiting_request", "state_allocator.check_request"),
)
_enabled = False


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
        ImportError: this version of transformers has another engine.
    """
    global _enabled
    if _enabled:
        return
    owners = _find_owners()
    ours = importlib.import_module("kda_layers.modeling.state_allocator")
    missing = ours.StateAllocator.__abstractmethods__
    if missing:
        raise _unknown(f"CacheAllocator.{min(missing)} is new")
    for owner, (_, _, name, wrap) in zip(owners, WRAPPED, strict=True):
        file, function = wrap.split(".")
        wrapper = getattr(importlib.import_module(f"kda_layers.modeling.{file}"), function)
        setattr(owner, name, wrapper(getattr(owner, name)))
    importlib.import_module(f"{ENGINE}.cache").ATTN_TYPE_TO_ALLOCATOR[ours.KDA] = ours.StateAllocator
    _name_models()
    _enabled = True


def check_enabled(model: Any) -> None:
    """Raise a RuntimeError unless `enable_continuous_batching` was called."""
    if not _enabled:
        raise RuntimeError(
            f"continuous batching of {type(model).__name__} needs kda_layers.enable_continuous_batching(), called once "
            "before it"
        )


def _find_owners() -> list[Any]:
    """Return the classes of `WRAPPED`; raise an ImportError if the engine has another form."""
    try:
        importlib.import_module(f"{ENGINE}.cache_allocators.cache_allocator")
        modules = [importlib.import_module(f"{ENGINE}.{module}") for module, *_ in WRAPPED]
        types = importlib.import_module(f"{ENGINE}.cache").ATTN_TYPE_TO_ALLOCATOR
    except (ImportError, AttributeError) as error:
        raise _unknown(str(error)) from error
    if "linear_attention" in types:
        raise _unknown("it has an allocator of its own for linear_attention")
    owners = []
    for module, (_, kind, name, _) in zip(modules, WRAPPED, strict=True):
        owner = getattr(module, kind, None) if kind else module
        if not hasattr(owner, name):
            raise _unknown(f"it has no {kind or module.__name__}.{name}")
        owners.append(owner)
    return owners


def _unknown(reason: str) -> ImportError:
    return ImportError(
        f"enable_continuous_batching needs the engine of transformers {TESTED}, got transformers "
        f"{transformers.__version__}: {reason}"
    )


def _name_models() -> None:
    """Set our model classes as attributes of transformers, where `transformers serve` looks a checkpoint's class up."""
    classes = [importlib.import_module("kda_layers.modeling.models.modeling_kda").KDAForCausalLM]
    classes += [families.load(f"kda_{kind}").causal_lm for kind in families.CONVERTED]
    # The first import of a model replaces the module `transformers`; the server may have the one before.
    server = sys.modules.get(SERVER)
    for module in (sys.modules["transformers"], *([] if server is None else [server.transformers])):
        for cls in classes:
            setattr(module, cls.__name__, cls)
