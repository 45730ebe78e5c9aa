"""Mistral with KDA in place of some or all attention layers."""

from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.mistral.modeling_mistral import (
    MistralDecoderLayer,
    MistralForCausalLM,
    MistralPreTrainedModel,
    MistralRMSNorm,
    MistralRotaryEmbedding,
)

from kda_layers.modeling.configuration_variants import KDAMistralConfig
from kda_layers.modeling.families.variant import VariantForCausalLM, VariantModel


class KDAMistralModel(VariantModel, MistralPreTrainedModel):
    """Mistral's base model, with KDA where config.layer_types says "linear_attention"."""

    config_class = KDAMistralConfig
    layer_class, norm_class, rotary_class = MistralDecoderLayer, MistralRMSNorm, MistralRotaryEmbedding


class KDAMistralForCausalLM(VariantForCausalLM, MistralPreTrainedModel):
    """`KDAMistralModel` with a language-model head."""

    config_class = KDAMistralConfig
    model_class, stock_class = KDAMistralModel, MistralForCausalLM


AutoModel.register(KDAMistralConfig, KDAMistralModel, exist_ok=True)
AutoModelForCausalLM.register(KDAMistralConfig, KDAMistralForCausalLM, exist_ok=True)
