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


def _seams(names: dict[str, str], first: str = "5.17") -> tuple[Seam, ...]:
    """Return the seams of {module: names in it}."""
    return tuple(Seam(module, path, first) for module, paths in names.items() for path in paths.split())


ENGINE = "generation.continuous_batching"
# Names that files import from here.
OF_MODELS = {
    "cache_utils": "Cache CacheLayerMixin DynamicLayer LinearAttentionLayer StaticCache StaticLayer",
    "generation": "GenerateDecoderOnlyOutput",
    "generation.configuration_utils": "GenerationMode",
    "conversion_mapping": "get_model_conversion_mapping",
    "core_model_loading": "WeightConverter WeightRenaming dot_natural_key rename_source_key",
    "distributed.tensor_parallel": "ALL_PARALLEL_STYLES RowwiseParallel TensorParallelLayer",
    "loss.loss_utils": "ForCausalLMLoss",
    "masking_utils": "create_causal_mask create_sliding_window_causal_mask",
    "modeling_layers": "GenericForQuestionAnswering GenericForSequenceClassification GenericForTokenClassification "
    "GradientCheckpointingLayer",
    "modeling_outputs": "BaseModelOutputWithPast CausalLMOutputWithPast",
    "modeling_utils": "ALL_ATTENTION_FUNCTIONS",
    "models.auto.modeling_auto": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "models.llama.modeling_llama": "eager_attention_forward",
    "utils": "TransformersKwargs can_return_tuple",
    "utils.import_utils": "is_tracing",
    "utils.output_capturing": "capture_outputs",
}
OF_SERVING = {
    f"{ENGINE}.cache_allocators": "FULL_ATTENTION SLIDING_ATTENTION FullAttentionCacheAllocator",
    f"{ENGINE}.cache_allocators.cache_allocator": "CacheAllocator",
    f"{ENGINE}.cache_allocators.full_attention": "find_head_dim",
    f"{ENGINE}.requests": "RequestStatus",
    f"{ENGINE}.scheduler": "FIFOScheduler",
    f"{ENGINE}.utils": "stream_context",
}
NAMES = {seam.path: seam for seam in (*_seams(OF_MODELS), *_seams(OF_SERVING, "5.19"))}
# Names that our classes override or read: if one were renamed, what we do there would be skipped silently.
OVERRIDDEN = _seams({
    "cache_utils": "Cache.crop LinearAttentionLayer.update_conv_state LinearAttentionLayer.update_recurrent_state "
    "LinearAttentionLayer.reorder_cache",
    "generation": "GenerationMixin._get_candidate_generator GenerationMixin._get_logits_processor "
    "GenerationMixin._get_stopping_criteria GenerationMixin._optimize_model_for_decode GenerationMixin._prefill "
    "GenerationMixin._prepare_cache_for_generation GenerationMixin._prepare_special_tokens GenerationMixin._sample "
    "GenerationMixin._update_model_kwargs_for_generation GenerationMixin._valid_auto_compile_criteria "
    "GenerationMixin.init_continuous_batching",
    "masking_utils": "create_masks_for_generate",
    "models.auto.modeling_auto": "AutoModelForCausalLM._model_mapping",
    "modeling_utils": "PreTrainedModel._init_weights PreTrainedModel._keep_in_fp32_modules_strict "
    "PreTrainedModel._keys_to_ignore_on_load_unexpected PreTrainedModel._set_gradient_checkpointing "
    "PreTrainedModel.get_compiled_call PreTrainedModel._skip_keys_device_placement",
})  # fmt: skip
OF_TRAINER = _seams({"trainer": "Trainer._clip_grad_norm"})  # overridden too, apart as it takes a second to import
# Names of the engine of continuous batching and of its server that `enable_continuous_batching` wraps,
# extends or calls.
OF_ENGINE = _seams({
    f"{ENGINE}.cache": "ATTN_TYPE_TO_ALLOCATOR PagedAttentionCache.__init__ PagedAttentionCache.search_prefix_match "
    "PagedAttentionCache.update",
    f"{ENGINE}.cache_allocators": "FullAttentionCacheAllocator.register_cache_tensor "
    "FullAttentionCacheAllocator.update",
    f"{ENGINE}.continuous_api": "ContinuousBatchProcessor.prepare_next_batch ContinuousBatchingManager.add_requests "
    "ContinuousBatchingManager.join ContinuousBatchingManager.stop "
    "ContinuousMixin.init_continuous_batching resolve_continuous_batching_config",
    f"{ENGINE}.initialization": "ensure_decode_fast_path_is_available",
    f"{ENGINE}.input_outputs": "ContinuousBatchingAsyncIOs.infer_carry_over_ids "
    "ContinuousBatchingIOs._setup_static_tensors",
    f"{ENGINE}.model_runner": "ModelRunner._capture_graph",
    f"{ENGINE}.scheduler": "SCHEDULER_MAPPING Scheduler._process_candidates Scheduler._try_to_meet_safety_margin "
    "Scheduler._schedule_request Scheduler.add_waiting_request Scheduler.clear_cancelled_requests",
    "cli.serving.utils": "CBGenerateManager.init_cb CBGenerateManager.generate_streaming "
    "CBGenerateManager.generate_non_streaming",
    "cli.serving.server": "build_server",
}, "5.19")  # fmt: skip

# What differs between versions. transformers 5.24 calls the cache `cache` in every model; attention modules update the
# engine's cache themselves since then; and only calls with gradients are checkpointed. Before 5.20, masks of eager
# attention take a constant from the host.
RENAMED = installed("transformers") >= (5, 24)
MASKS_ON_DEVICE = installed("transformers") >= (5, 20)
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
