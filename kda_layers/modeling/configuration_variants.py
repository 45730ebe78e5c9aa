"""Configurations of transformers' softmax decoders with KDA in place of some or all attention layers."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from kda_layers.modeling.configuration_kda import KDAFields


class VariantFields(KDAFields):
    """`KDAFields` whose defaults follow the softmax layers of the family whose configuration comes after it.

    Args:
        linear_num_heads, linear_num_value_heads: None for num_attention_heads.
        linear_head_dim: None for head_dim.
        layer_types: None for three layers of KDA, then one of the family's own, and so on.
    """

    def __post_init__(self, **kwargs: Any) -> None:
        layer_types = self.layer_types
        super().__post_init__(**kwargs)  # the family's, which may fill it
        if layer_types is None:
            self.layer_types = [
                kind if i % 4 == 3 else "linear_attention" for i, kind in enumerate(stock_layer_types(self))
            ]
        if self.linear_num_heads is None:
            self.linear_num_heads = self.num_attention_heads
        if self.linear_num_value_heads is None:
            self.linear_num_value_heads = self.num_attention_heads
        if self.linear_head_dim is None:
            self.linear_head_dim = self.head_dim
        self.complete_kda_fields()

    def validate_window(self) -> None:
        """Raises a ValueError where layer_types and sliding_window contradict each other."""
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError(
                f"sliding_window must be given with layers of 'sliding_attention', got None and {self.layer_types}"
            )


def stock_layer_types(config: PreTrainedConfig) -> list[str]:
    """The kind of softmax attention of each layer, as the stock model of the family of `config` has it.

    A family without a field for it has one kind: that of its sliding window, if it has one.
    """
    if "layer_types" in type(config).__dataclass_fields__ and config.layer_types is not None:
        return config.layer_types
    kind = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    return [kind] * config.num_hidden_layers


def replicated_attention(plan: dict[str, Any]) -> dict[str, Any]:
    """A family's tensor-parallel plan without its attention.

    A plan names the same projection in all layers at once ("layers.*.self_attn.q_proj"), and sharding it by columns
    would cut a KDA layer's heads off from their convolutions and gates.
    """
    return {name: style for name, style in plan.items() if ".self_attn." not in name}


@strict
class KDALlamaConfig(VariantFields, LlamaConfig):
    """LlamaConfig with the fields of `VariantFields`."""

    model_type = "kda_llama"
    modeling = "kda_layers.modeling.families.llama"
    base_model_tp_plan = replicated_attention(LlamaConfig.base_model_tp_plan)


@strict
class KDAQwen3Config(VariantFields, Qwen3Config):
    """Qwen3Config with the fields of `VariantFields`; layer_types may also hold "sliding_attention"."""

    model_type = "kda_qwen3"
    modeling = "kda_layers.modeling.families.qwen3"
    softmax_types = ("full_attention", "sliding_attention")
    base_model_tp_plan = replicated_attention(Qwen3Config.base_model_tp_plan)


@strict
class KDAMistralConfig(VariantFields, MistralConfig):
    """MistralConfig with the fields of `VariantFields`; softmax layers have a sliding window where it is set."""

    model_type = "kda_mistral"
    modeling = "kda_layers.modeling.families.mistral"
    softmax_types = ("full_attention", "sliding_attention")
    base_model_tp_plan = replicated_attention(MistralConfig.base_model_tp_plan)

    def validate_one_window(self) -> None:
        """Raises a ValueError for a softmax layer without the window that all of them have."""
        if "full_attention" in self.layer_types and self.sliding_window is not None:
            raise ValueError(
                f"layer_types must hold 'sliding_attention', not 'full_attention', with a sliding_window, "
                f"got {self.layer_types} and {self.sliding_window}"
            )


for config in (KDALlamaConfig, KDAQwen3Config, KDAMistralConfig):
    AutoConfig.register(config.model_type, config, exist_ok=True)
