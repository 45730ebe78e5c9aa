"""Qwen3 with KDA in place of some or all attention layers."""

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from kda_layers.modeling.models.hybrid import HybridForCausalLM
from kda_layers.modeling.models.variant import VariantFamily, VariantFields, VariantModel, replicated_attention


@strict
class KDAQwen3Config(VariantFields, Qwen3Config):
    """Qwen3Config with the fields of `VariantFields`; layer_types may also hold "sliding_attention"."""

    model_type = "kda_qwen3"
    softmax_types = ("full_attention", "sliding_attention")
    base_model_tp_plan = replicated_attention(Qwen3Config.base_model_tp_plan)


class KDAQwen3Model(VariantModel, Qwen3PreTrainedModel):
    """Qwen3's base model, with KDA where config.layer_types says "linear_attention"."""

    config_class = KDAQwen3Config
    layer_class, norm_class, rotary_class = Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding


class KDAQwen3ForCausalLM(HybridForCausalLM, Qwen3PreTrainedModel):
    """`KDAQwen3Model` with a language-model head."""

    config_class = KDAQwen3Config
    model_class = KDAQwen3Model


FAMILY = VariantFamily(stock=Qwen3ForCausalLM, causal_lm=KDAQwen3ForCausalLM)
