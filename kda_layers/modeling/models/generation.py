"""`generate` of models with KDA layers: their caches, and the fast paths of its loop and its steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch import Tensor
from transformers import GenerationMixin

from kda_layers.kernels.torch_private import has_global_hooks
from kda_layers.modeling.cuda_graphs.decode_loop import (
    DECODE_LOOP,
    loops_on_device,
    sample_on_device,
    supposed_request,
)
from kda_layers.modeling.cuda_graphs.decode_steps import Request
from kda_layers.modeling.cuda_graphs.decoding import CAPTURED_DECODING, CapturedDecoding
from kda_layers.modeling.cuda_graphs.kept import history_of
from kda_layers.modeling.inputs.masks import masks_for_generate
from kda_layers.modeling.layer.cache import with_kda_layers
from kda_layers.modeling.layer.fast_paths import FastPath, SupposedCall
from kda_layers.modeling.models.loss import CHUNKED_LOSS
from kda_layers.modeling.seams import CACHE, Cache, StaticCache


class LoopOnDevice(GenerationMixin):
    """The loop of `generate` on the device, for language models whose KDA layers have our forward."""

    batches_continuously: ClassVar[bool] = False  # `enable_continuous_batching` was called

    def fast_paths(self, call: SupposedCall, config: Any = None) -> Iterator[tuple[FastPath, tuple[Any, ...]]]:
        """Yield the paths that a call (of `generate`: with this configuration) would ask for, and their facts."""
        if call.tokens == 1 and not call.records and config is not None:
            yield DECODE_LOOP, (self, supposed_request(self, config))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        history_of(self).forget()  # graphs that read the parameters where they were
        return super()._apply(fn, recurse)

    def _sample(
        self, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        synced_gpus: bool = False, streamer: Any = None, **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        """Choose tokens as transformers does, on the device where a CUDA graph can hold all of a step."""
        if isinstance(cache := model_kwargs.get(CACHE), Cache):
            with_kda_layers(cache)
        request = Request(
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs
        )
        if loops_on_device(self, request):
            return sample_on_device(self, request)
        return super()._sample(
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Return transformers' manager of continuous batching; see `kda_layers.serving.enable_continuous_batching`."""
        if not LoopOnDevice.batches_continuously:
            raise RuntimeError(
                f"continuous batching of {type(self).__name__} needs "
                "kda_layers.serving.enable_continuous_batching(), called once before it"
            )
        return super().init_continuous_batching(*args, **kwargs)


class HybridGeneration(LoopOnDevice):
    """Overrides of transformers' `generate` for this package's language models."""

    create_masks_for_generate = staticmethod(masks_for_generate)  # for captured and compiled decoding

    def fast_paths(self, call: SupposedCall, config: Any = None) -> Iterator[tuple[FastPath, tuple[Any, ...]]]:
        """Yield the paths that a call (of `generate`: with this configuration) would ask for, and their facts."""
        if call.records:
            yield CHUNKED_LOSS, (self,)
        for path, facts in super().fast_paths(call, config):
            yield path, facts
            if any(path.reasons(call, *facts)):
                yield CAPTURED_DECODING, (self, config.cache_implementation, config.num_beams or 1)

    def get_compiled_call(self, compile_config: Any) -> Callable[..., Any]:
        """Return a function that does what calling the model does, for the decode steps of one `generate`.

        `generate` asks for it where the cache is static, or has states of KDA layers alone. Steps are captured in a
        CUDA graph and replayed (`CapturedDecoding`). torch.compile, as in transformers, serves calls with a
        `compile_config`, and with a static cache models that are not wholly on one CUDA device, are quantised or
        sharded, have hooks or a replaced forward, or sliding windows. `generate(..., disable_compile=True)` decodes
        eagerly.
        """
        configured = compile_config or getattr(self.generation_config, "compile_config", None)
        if configured is None and self._is_captured():
            return CapturedDecoding(self)
        return super().get_compiled_call(compile_config)

    def _is_captured(self) -> bool:
        call = SupposedCall(self.device, self.dtype, global_hooks=has_global_hooks())
        return CAPTURED_DECODING.serves(call, self)

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Return True if `generate` asks for `get_compiled_call`.

        Of a cache that nobody asked to be static, torch.compile is no default.
        """
        valid: bool = super()._valid_auto_compile_criteria(model_kwargs, generation_config)
        configured = generation_config.compile_config is not None
        return valid and (configured or isinstance(model_kwargs.get(CACHE), StaticCache) or self._is_captured())

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # generate reads its signature
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a step as transformers does, without the tokenizer that finds stop strings.

        Nothing reads it in a forward, and no CUDA graph or compiled step could hold it.
        """
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs.pop("tokenizer", None)
        return inputs

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        cache = model_kwargs.get(CACHE)
        if cache is not None:
            with_kda_layers(cache)
            if generation_config.is_assistant:
                cache.activate_past_recording()
