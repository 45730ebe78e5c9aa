"""Configurations of softmax decoders of transformers with KDA in place of some or all attention layers."""

import importlib
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from kda_layers.modeling.models import VARIANTS
from kda_layers.modeling.models.configuration_kda import KDAFields


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
        # The first configuration registers the models, so that `import kda_layers` need not import them.
        if (kind := self.model_type.removeprefix("kda_")) in VARIANTS:  # a subclass may have its own
            importlib.import_module("kda_layers.modeling.models.variant").language_model(kind)

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


@strict
class KDALlamaConfig(VariantFields, LlamaConfig):
    """LlamaConfig with the fields of `VariantFields`."""

    model_type = "kda_llama"


@strict
class KDAMistralConfig(VariantFields, MistralConfig):
    """MistralConfig with the fields of `VariantFields`; softmax layers have a sliding window if it is set."""

    model_type = "kda_mistral"
    softmax_types = ("full_attention", "sliding_attention")

    def validate_one_window(self) -> None:
        """Raise a ValueError for a softmax layer without a window if the others have one."""
        if "full_attention" in self.layer_types and self.sliding_window is not None:
            raise ValueError(
                f"layer_types must hold 'sliding_attention', not 'full_attention', with a sliding_window, "
                f"got {self.layer_types} and {self.sliding_window}"
            )


@strict
class KDAQwen2Config(VariantFields, Qwen2Config):
    """Qwen2Config, also of Qwen2.5, with the fields of `VariantFields`; layer_types may hold "sliding_attention".

    Softmax layers have the biases of q, k and v. KDA layers have none, so that a conversion drops theirs.

    Args:
        head_dim: width of a softmax head; None for hidden_size // num_attention_heads.
    """

    model_type = "kda_qwen2"
    softmax_types = ("full_attention", "sliding_attention")

    head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


@strict
class KDAQwen3Config(VariantFields, Qwen3Config):
    """Qwen3Config with the fields of `VariantFields`; layer_types may also hold "sliding_attention"."""

    model_type = "kda_qwen3"
    softmax_types = ("full_attention", "sliding_attention")


for _config in (KDALlamaConfig, KDAMistralConfig, KDAQwen2Config, KDAQwen3Config):  # in place of stand-ins
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
