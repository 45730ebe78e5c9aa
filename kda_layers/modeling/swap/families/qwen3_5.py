"""Qwen3.5: gated delta nets next to gated softmax attention, alone or within a vision-language model."""

from kda_layers.modeling.layer.checkpoint_names import (
    FULL_RANK,
    GATED_DELTA,
    Format,
    Fused,
    Naming,
    gated_delta_settings,
)
from kda_layers.modeling.swap.gated_delta import GatedDeltaFamily

RENAMED = {
    "g_proj.weight": "in_proj_z.weight", "b_proj.weight": "in_proj_b.weight", "f_proj.weight": "in_proj_a.weight",
    "o_norm.weight": "norm.weight", "o_proj.weight": "out_proj.weight",
}  # fmt: skip
QKV = Fused("in_proj_qkv.weight", ("q_proj.weight", "k_proj.weight", "v_proj.weight"))

FAMILY = GatedDeltaFamily(
    model_type="qwen3_5",
    base_name="Qwen3_5TextModel",
    stock_name="Qwen3_5GatedDeltaNet",
    weights=Format(
        GATED_DELTA | dict(allow_neg_eigval=False),
        (Naming("qwen3_5", None, FULL_RANK, RENAMED, fused=(QKV,)),),
        gated_delta_settings,
    ),
)
__getattr__ = FAMILY.layer_by_name
