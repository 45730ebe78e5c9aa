"""Mistral with KDA in place of some or all attention layers."""

from huggingface_hub.dataclasses import strict
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mistral.modeling_mistral import (
    MistralDecoderLayer,
    MistralForCausalLM,
    MistralPreTrainedModel,
    MistralRMSNorm,
    MistralRotaryEmbedding,
)

from kda_layers.modeling.models.hybrid import HybridForCausalLM
from kda_layers.modeling.models.variant import VariantFamily, VariantFields, VariantModel, replicated_attention


@strict
class KDAMistralConfig(VariantFields, MistralConfig):
    """MistralConfig with the fields of `VariantFields`; softmax layers have a sliding window if it is set."""

    model_type = "kda_mistral"
    softmax_types = ("full_attention", "sliding_attention")
    base_model_tp_plan = replicated_attention(MistralConfig.base_model_tp_plan)

    def validate_one_window(self) -> None:
        """Raise a ValueError for a softmax layer without a window if the others have one."""
        if "full_attention" in self.layer_types and self.sliding_window is not None:
            raise ValueError(
                f"layer_types must hold 'sliding_attention', not 'full_attention', with a sliding_window, "
                f"got {self.layer_types} and {self.sliding_window}"
            )


class KDAMistralModel(VariantModel, MistralPreTrainedModel):
    """Mistral's base model, with KDA where config.layer_types says "linear_attention"."""

    config_class = KDAMistralConfig
    layer_class, norm_class, rotary_class = MistralDecoderLayer, MistralRMSNorm, MistralRotaryEmbedding


class KDAMistralForCausalLM(HybridForCausalLM, MistralPreTrainedModel):
    """`KDAMistralModel` with a language-model head."""

    config_class = KDAMistralConfig
    model_class = KDAMistralModel


FAMILY = VariantFamily(stock=MistralForCausalLM, causal_lm=KDAMistralForCausalLM)
