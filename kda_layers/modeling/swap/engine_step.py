"""Steps of transformers' continuous batching in a swapped model: what its layers get in place of a cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_layers.modeling.inputs.masks import masks_of_engine
from kda_layers.modeling.layer.slots import Slots
from kda_layers.modeling.seams import CACHE, RENAMED

# Keywords of the engine that `EngineStep` reads for the layers, and those that have a value for each type of layer.
OF_CACHE = ("cache", "past_key_values", "read_index", "write_index", "block_table")
BY_TYPE = ("cu_seq_lens_k", "max_length_k")


class EngineStep:
    """The slots of KDA layers in a step, and the pages of the layers beside them.

    Attributes:
        slots: sequences and states, for KDA layers.
    """

    def __init__(self, cache: Any, slots: Slots, keywords: dict[str, Any]):
        self.slots, self._cache, self._keywords = slots, cache, keywords

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Store what a layer caches of the step's tokens, [1, heads, T, ...]; return that of all tokens they see."""
        if kwargs is not None and not RENAMED:  # transformers' eager attention function, after the layer itself
            return key_states, value_states
        found: tuple[Tensor, Tensor] = self._cache.update(key_states, value_states, layer_idx, {**self._keywords})
        return found


def engine_step(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a base model's call by the engine as its stock forward and swapped layers read them."""
    cache = kwargs["cache"]
    step = EngineStep(cache, cache.cache_allocators["linear_attention"].step(**kwargs), kwargs)
    # Chosen here: before transformers 5.24, attention functions choose them only where they update the cache.
    chosen = {name: kwargs[name].get("full_attention") for name in BY_TYPE}
    masks = masks_of_engine(model.config, kwargs["attention_mask"])
    rest = {name: value for name, value in kwargs.items() if name not in OF_CACHE}
    # By both names: before transformers 5.24, the eager attention function asks for `cache` as well.
    return rest | chosen | {"attention_mask": masks, "cache": step, CACHE: step}
