"""Llama with KDA in place of some or all attention layers."""

from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from kda_layers.modeling.configuration_variants import KDALlamaConfig
from kda_layers.modeling.families.variant import VariantForCausalLM, VariantModel


class KDALlamaModel(VariantModel, LlamaPreTrainedModel):
    """Llama's base model, with KDA where config.layer_types says "linear_attention"."""

    config_class = KDALlamaConfig
    layer_class, norm_class, rotary_class = LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding


class KDALlamaForCausalLM(VariantForCausalLM, LlamaPreTrainedModel):
    """`KDALlamaModel` with a language-model head."""

    config_class = KDALlamaConfig
    model_class, stock_class = KDALlamaModel, LlamaForCausalLM


AutoModel.register(KDALlamaConfig, KDALlamaModel, exist_ok=True)
AutoModelForCausalLM.register(KDALlamaConfig, KDALlamaForCausalLM, exist_ok=True)
