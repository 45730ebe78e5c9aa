"""Mistral with KDA in place of some or all attention layers."""

from huggingface_hub.dataclasses import strict
from transformers import MistralConfig
from transformers.models.mistral import modeling_mistral as stock

from kda_layers.modeling.models.hybrid import HybridForCausalLM
from kda_layers.modeling.models.variant import VariantFamily, VariantFields, VariantModel


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


class KDAMistralModel(VariantModel, stock.MistralPreTrainedModel):
    """Mistral's base model, with KDA where config.layer_types says "linear_attention"."""

    config_class = KDAMistralConfig
    layer_class, norm_class, rotary_class = (
        stock.MistralDecoderLayer,
        stock.MistralRMSNorm,
        stock.MistralRotaryEmbedding,
    )


class KDAMistralForCausalLM(HybridForCausalLM, stock.MistralPreTrainedModel):
    """`KDAMistralModel` with a language-model head."""

    config_class = KDAMistralConfig
    model_class = KDAMistralModel


FAMILY = VariantFamily(stock=stock.MistralForCausalLM, causal_lm=KDAMistralForCausalLM)
