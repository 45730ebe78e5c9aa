"""Llama with KDA in place of some or all attention layers."""

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from kda_layers.modeling.models.hybrid import HybridForCausalLM
from kda_layers.modeling.models.variant import VariantFamily, VariantFields, VariantModel, replicated_attention


@strict
class KDALlamaConfig(VariantFields, LlamaConfig):
    """LlamaConfig with the fields of `VariantFields`."""

    model_type = "kda_llama"
    base_model_tp_plan = replicated_attention(LlamaConfig.base_model_tp_plan)


class KDALlamaModel(VariantModel, LlamaPreTrainedModel):
    """Llama's base model, with KDA where config.layer_types says "linear_attention"."""

    config_class = KDALlamaConfig
    layer_class, norm_class, rotary_class = LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding


class KDALlamaForCausalLM(HybridForCausalLM, LlamaPreTrainedModel):
    """`KDALlamaModel` with a language-model head."""

    config_class = KDALlamaConfig
    model_class = KDALlamaModel


FAMILY = VariantFamily(stock=LlamaForCausalLM, causal_lm=KDALlamaForCausalLM)
