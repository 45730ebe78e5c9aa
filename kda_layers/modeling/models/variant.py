"""Softmax decoders of transformers with KDA in place of some or all attention layers: what the families share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from kda_layers.modeling.models.configuration_kda import KDAFields
from kda_layers.modeling.models.hybrid import HybridForCausalLM, HybridModel, KDAAttention
from kda_layers.modeling.models.registration import register
from kda_layers.modeling.seams import CACHE


class VariantFields(KDAFields):
    """`KDAFields` whose defaults follow the softmax layers of the family, whose configuration is the next base.

    Args:
        linear_num_heads, linear_num_value_heads: None for num_attention_heads.
        linear_head_dim: None for head_dim.
        layer_types: None for three KDA layers, then one of the family's own, and so on.
    """

    def __post_init__(self, **kwargs: Any) -> None:
        layer_types = self.layer_types
        super().__post_init__(**kwargs)  # the family's, which may fill it
        if layer_types is None:
            self.layer_types = [
                kind if i % 4 == 3 else "linear_attention" for i, kind in enumerate(stock_layer_types(self))
            ]
        for name in ("linear_num_heads", "linear_num_value_heads"):
            if getattr(self, name) is None:
                setattr(self, name, self.num_attention_heads)
        if self.linear_head_dim is None:
            self.linear_head_dim = self.head_dim
        self.complete_kda_fields()

    def validate_window(self) -> None:
        """Raise a ValueError if layer_types and sliding_window contradict each other."""
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError(
                f"sliding_window must be given with layers of 'sliding_attention', got None and {self.layer_types}"
            )


def stock_layer_types(config: PreTrainedConfig) -> list[str]:
    """Return the kind of softmax attention of each layer of the stock model.

    A family without a field for it has one kind: with its sliding window if it has one.
    """
    if "layer_types" in type(config).__dataclass_fields__ and config.layer_types is not None:
        return config.layer_types
    kind = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    return [kind] * config.num_hidden_layers


class VariantModel(HybridModel):
    """A family's base model with KDA layers: its own decoder layers, norm and rotary embedding."""

    cache_name = CACHE
    layer_class: ClassVar[type[nn.Module]]
    rotary_class: ClassVar[type[nn.Module]]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.rotary_emb = self.rotary_class(config=config)
        self.post_init()

    def make_layer(self, layer_idx: int) -> nn.Module:
        layer = self.layer_class(self.config, layer_idx)
        if self.config.layer_types[layer_idx] == "linear_attention":
            layer.self_attn = KDAAttention(self.config, layer_idx)
        return layer

    def position_inputs(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        return {"position_embeddings": self.rotary_emb(hidden_states, position_ids)}


@dataclass(frozen=True, kw_only=True)
class VariantFamily:
    """A family of softmax decoders and its model with KDA layers, which transformers' Auto classes then know."""

    stock: type[PreTrainedModel]  # the class that `swap_attention` converts
    causal_lm: type[HybridForCausalLM]

    @property
    def config(self) -> Any:
        """The class of the configuration."""
        return self.causal_lm.config_class

    def __post_init__(self) -> None:
        AutoConfig.register(self.config.model_type, self.config, exist_ok=True)
        register(self.causal_lm)
