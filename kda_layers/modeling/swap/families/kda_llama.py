"""Llama with KDA in place of some or all attention layers."""

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as stock

from kda_layers.modeling.models.hybrid import HybridForCausalLM
from kda_layers.modeling.models.variant import VariantFamily, VariantFields, VariantModel


@strict
class KDALlamaConfig(VariantFields, LlamaConfig):
    """LlamaConfig with the fields of `VariantFields`."""

    model_type = "kda_llama"


class KDALlamaModel(VariantModel, stock.LlamaPreTrainedModel):
    """Llama's base model, with KDA where config.layer_types says "linear_attention"."""

    config_class = KDALlamaConfig
    layer_class, norm_class, rotary_class = stock.LlamaDecoderLayer, stock.LlamaRMSNorm, stock.LlamaRotaryEmbedding


class KDALlamaForCausalLM(HybridForCausalLM, stock.LlamaPreTrainedModel):
    """`KDALlamaModel` with a language-model head."""

    config_class = KDALlamaConfig
    model_class = KDALlamaModel


FAMILY = VariantFamily(stock=stock.LlamaForCausalLM, causal_lm=KDALlamaForCausalLM)
