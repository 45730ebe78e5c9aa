"""Qwen3 with KDA in place of some or all attention layers."""

from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from kda_layers.modeling.configuration_variants import KDAQwen3Config
from kda_layers.modeling.families.variant import VariantForCausalLM, VariantModel


class KDAQwen3Model(VariantModel, Qwen3PreTrainedModel):
    """Qwen3's base model, with KDA where config.layer_types says "linear_attention"."""

    config_class = KDAQwen3Config
    layer_class, norm_class, rotary_class = Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding


class KDAQwen3ForCausalLM(VariantForCausalLM, Qwen3PreTrainedModel):
    """`KDAQwen3Model` with a language-model head."""

    config_class = KDAQwen3Config
    model_class, stock_class = KDAQwen3Model, Qwen3ForCausalLM


AutoModel.register(KDAQwen3Config, KDAQwen3Model, exist_ok=True)
AutoModelForCausalLM.register(KDAQwen3Config, KDAQwen3ForCausalLM, exist_ok=True)
