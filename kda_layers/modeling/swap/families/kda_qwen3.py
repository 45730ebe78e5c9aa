"""Qwen3 with KDA in place of some or all attention layers."""

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as stock

from kda_layers.modeling.models.hybrid import HybridForCausalLM
from kda_layers.modeling.models.variant import VariantFamily, VariantFields, VariantModel


@strict
class KDAQwen3Config(VariantFields, Qwen3Config):
    """Qwen3Config with the fields of `VariantFields`; layer_types may also hold "sliding_attention"."""

    model_type = "kda_qwen3"
    softmax_types = ("full_attention", "sliding_attention")


class KDAQwen3Model(VariantModel, stock.Qwen3PreTrainedModel):
    """Qwen3's base model, with KDA where config.layer_types says "linear_attention"."""

    config_class = KDAQwen3Config
    layer_class, norm_class, rotary_class = stock.Qwen3DecoderLayer, stock.Qwen3RMSNorm, stock.Qwen3RotaryEmbedding


class KDAQwen3ForCausalLM(HybridForCausalLM, stock.Qwen3PreTrainedModel):
    """`KDAQwen3Model` with a language-model head."""

    config_class = KDAQwen3Config
    model_class = KDAQwen3Model


FAMILY = VariantFamily(stock=stock.Qwen3ForCausalLM, causal_lm=KDAQwen3ForCausalLM)
