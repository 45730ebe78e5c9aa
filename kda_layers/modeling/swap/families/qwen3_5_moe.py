"""Qwen3.5 with experts: the gated delta nets of Qwen3.5."""

from kda_layers.modeling.swap.gated_delta import GatedDeltaFamily

FAMILY = GatedDeltaFamily(
    model_type="qwen3_5_moe",
    base_name="Qwen3_5MoeTextModel",
    stock_name="Qwen3_5MoeGatedDeltaNet",
)
__getattr__ = FAMILY.layer_by_name
