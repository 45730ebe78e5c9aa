"""Qwen2 and Qwen2.5 with KDA in place of some or all attention layers.

Softmax layers have the biases of q, k and v. KDA layers have none, so that a conversion drops theirs.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import Qwen2Config
from transformers.models.qwen2 import modeling_qwen2 as stock

from kda_layers.modeling.models.hybrid import HybridForCausalLM
from kda_layers.modeling.models.variant import VariantFamily, VariantFields, VariantModel


@strict
class KDAQwen2Config(VariantFields, Qwen2Config):
    """Qwen2Config with the fields of `VariantFields`; layer_types may also hold "sliding_attention".

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


class KDAQwen2Model(VariantModel, stock.Qwen2PreTrainedModel):
    """Qwen2's base model, with KDA where config.layer_types says "linear_attention"."""

    config_class = KDAQwen2Config
    layer_class, norm_class, rotary_class = stock.Qwen2DecoderLayer, stock.Qwen2RMSNorm, stock.Qwen2RotaryEmbedding


class KDAQwen2ForCausalLM(HybridForCausalLM, stock.Qwen2PreTrainedModel):
    """`KDAQwen2Model` with a language-model head."""

    config_class = KDAQwen2Config
    model_class = KDAQwen2Model


FAMILY = VariantFamily(stock=stock.Qwen2ForCausalLM, causal_lm=KDAQwen2ForCausalLM)
