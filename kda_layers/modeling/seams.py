"""Every name of transformers that is private, deep or differs between versions: the seams between it and this package.

Other files import these names from here, so that one that is gone raises where it is used, with its path and the
versions that had it. `tests/modeling/test_seams.py` walks the list for the installed version, and refuses imports of
deep names elsewhere.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple

from kda_layers.versions import installed, require_transformers

require_transformers("models")


class Seam(NamedTuple):
    """A name of transformers: its module, its path in it, and the versions in which it was seen."""

    module: str  # without "transformers."
    path: str
    first: str = "5.17"
    last: str = "5.24"

    def __str__(self) -> str:
        return f"transformers.{self.module}.{self.path}"


ENGINE = "generation.continuous_batching"
# Names that files import from here.
NAMES = {
    seam.path: seam
    for seam in (
        Seam("cache_utils", "Cache"),
        Seam("cache_utils", "CacheLayerMixin"),
        Seam("cache_utils", "LinearAttentionLayer"),
        Seam("cache_utils", "StaticCache"),
        Seam("cache_utils", "StaticLayer"),
        Seam("conversion_mapping", "get_model_conversion_mapping"),
        Seam("core_model_loading", "WeightConverter"),
        Seam("core_model_loading", "WeightRenaming"),
        Seam("core_model_loading", "dot_natural_key"),
        Seam("core_model_loading", "rename_source_key"),
        Seam("distributed.tensor_parallel", "ALL_PARALLEL_STYLES"),
        Seam("distributed.tensor_parallel", "RowwiseParallel"),
        Seam("distributed.tensor_parallel", "TensorParallelLayer"),
        Seam(f"{ENGINE}.cache_allocators", "FULL_ATTENTION", "5.18"),
        Seam(f"{ENGINE}.cache_allocators", "SLIDING_ATTENTION", "5.18"),
        Seam(f"{ENGINE}.cache_allocators", "FullAttentionCacheAllocator", "5.18"),
        Seam(f"{ENGINE}.cache_allocators.cache_allocator", "CacheAllocator", "5.18"),
        Seam(f"{ENGINE}.cache_allocators.full_attention", "find_head_dim", "5.18"),
        Seam(f"{ENGINE}.requests", "RequestStatus", "5.18"),
        Seam(f"{ENGINE}.scheduler", "FIFOScheduler", "5.18"),
        Seam("loss.loss_utils", "ForCausalLMLoss"),
        Seam("masking_utils", "create_causal_mask"),
        Seam("masking_utils", "create_sliding_window_causal_mask"),
        Seam("modeling_layers", "GenericForQuestionAnswering"),
        Seam("modeling_layers", "GenericForSequenceClassification"),
        Seam("modeling_layers", "GenericForTokenClassification"),
        Seam("modeling_layers", "GradientCheckpointingLayer"),
        Seam("modeling_outputs", "BaseModelOutputWithPast"),
        Seam("modeling_outputs", "CausalLMOutputWithPast"),
        Seam("modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
        Seam("models.auto.modeling_auto", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
        Seam("utils", "TransformersKwargs"),
        Seam("utils", "can_return_tuple"),
        Seam("utils.import_utils", "is_tracing"),
        Seam("utils.output_capturing", "capture_outputs"),
    )
}
# Names that our classes override or read: if one were renamed, what we do there would be skipped without a word.
OVERRIDDEN = (
    Seam("cache_utils", "Cache.crop"),
    Seam("cache_utils", "LinearAttentionLayer.update_conv_state"),
    Seam("cache_utils", "LinearAttentionLayer.update_recurrent_state"),
    Seam("cache_utils", "LinearAttentionLayer.reorder_cache"),
    Seam("generation", "GenerationMixin._get_candidate_generator"),
    Seam("generation", "GenerationMixin._prepare_cache_for_generation"),
    Seam("masking_utils", "create_masks_for_generate"),
    Seam("generation", "GenerationMixin.init_continuous_batching"),
    Seam("models.auto.modeling_auto", "AutoModelForCausalLM._model_mapping"),
    Seam("modeling_utils", "PreTrainedModel._init_weights"),
    Seam("modeling_utils", "PreTrainedModel._keep_in_fp32_modules_strict"),
    Seam("modeling_utils", "PreTrainedModel._keys_to_ignore_on_load_unexpected"),
    Seam("modeling_utils", "PreTrainedModel._set_gradient_checkpointing"),
    Seam("modeling_utils", "PreTrainedModel.get_compiled_call"),
    Seam("modeling_utils", "PreTrainedModel._skip_keys_device_placement"),
)
# Names of the engine of continuous batching and of its server that `enable_continuous_batching` wraps,
# extends or calls.
OF_ENGINE = (
    Seam(f"{ENGINE}.cache", "ATTN_TYPE_TO_ALLOCATOR", "5.18"),
    Seam(f"{ENGINE}.cache", "PagedAttentionCache.__init__", "5.18"),
    Seam(f"{ENGINE}.continuous_api", "ContinuousMixin.init_continuous_batching", "5.18"),
    Seam(f"{ENGINE}.continuous_api", "resolve_continuous_batching_config", "5.18"),
    Seam(f"{ENGINE}.initialization", "ensure_decode_fast_path_is_available", "5.18"),
    Seam(f"{ENGINE}.input_outputs", "ContinuousBatchingIOs._setup_static_tensors", "5.18"),
    Seam(f"{ENGINE}.scheduler", "SCHEDULER_MAPPING", "5.18"),
    Seam(f"{ENGINE}.scheduler", "Scheduler._process_candidates", "5.18"),
    Seam(f"{ENGINE}.scheduler", "Scheduler._try_to_meet_safety_margin", "5.18"),
    Seam(f"{ENGINE}.scheduler", "Scheduler.add_waiting_request", "5.18"),
    Seam("cli.serving.utils", "CBGenerateManager.init_cb", "5.18"),
    Seam("cli.serving.utils", "CBGenerateManager.generate_streaming", "5.18"),
    Seam("cli.serving.utils", "CBGenerateManager.generate_non_streaming", "5.18"),
    Seam("cli.serving.server", "build_server", "5.18"),
)

# What differs between versions. transformers 5.24 calls the cache `cache` in every model; attention modules update the
# engine's cache themselves since then; and only calls with gradients are checkpointed.
RENAMED = installed("transformers") >= (5, 24)
CACHE = "cache" if RENAMED else "past_key_values"


def publish(model_class: type) -> None:
    """Set a model class as an attribute of transformers, where `transformers serve` looks a checkpoint's class up."""
    # The first import of a model replaces the module `transformers`; the server may have the one before.
    server = sys.modules.get("transformers.cli.serving.model_manager")
    for module in {sys.modules["transformers"], getattr(server, "transformers", sys.modules["transformers"])}:
        setattr(module, model_class.__name__, model_class)


def owner(seam: Seam) -> tuple[Any, str]:
    """Return the module or class that has a seam's name, and the name in it.

    Raises:
        ImportError: the installed transformers lacks the seam.
    """
    *classes, name = seam.path.split(".")
    try:
        found = importlib.import_module(f"transformers.{seam.module}")
        for cls in classes:
            found = getattr(found, cls)
        getattr(found, name)
    except (ImportError, AttributeError) as error:
        import transformers

        raise ImportError(
            f"kda_layers uses {seam}, seen in transformers {seam.first} to {seam.last}, which transformers "
            f"{transformers.__version__} lacks ({error}): install a version with it, or a newer kda_layers"
        ) from error
    return found, name


def check(seams: tuple[Seam, ...]) -> None:
    """Raise an ImportError for the first of these seams that the installed transformers lacks."""
    for seam in seams:
        owner(seam)


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(*owner(NAMES[name]))
    return value
