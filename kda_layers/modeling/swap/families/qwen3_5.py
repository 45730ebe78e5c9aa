"""Qwen3.5: gated delta nets next to gated softmax attention, alone or within a vision-language model."""

from kda_layers.modeling.swap.gated_delta import GatedDeltaFamily

FAMILY = GatedDeltaFamily(
    model_type="qwen3_5",
    base_name="Qwen3_5TextModel",
    stock_name="Qwen3_5GatedDeltaNet",
)
__getattr__ = FAMILY.layer_by_name
