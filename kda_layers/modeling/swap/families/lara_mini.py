"""Lara Mini: the gated delta nets of Qwen3.5 next to softmax attention, in a window or without positions."""

from kda_layers.modeling.layer.checkpoint_names import (
    FULL_RANK,
    GATED_DELTA,
    Format,
    Fused,
    Naming,
    gated_delta_settings,
)
from kda_layers.modeling.swap.gated_delta import GatedDeltaFamily

IN_PROJ = Fused("in_proj.weight", tuple(f"{n}_proj.weight" for n in ("q", "k", "v", "g", "b", "f")))
RENAMED = {"o_norm.weight": "out_norm.weight", "o_proj.weight": "out_proj.weight"}
FAMILY = GatedDeltaFamily(
    model_type="lara_mini",
    base_name="LaraMiniModel",
    stock_name="LaraMiniGatedDeltaNet",
    weights=Format(  # of its files: its modules have the names of Qwen3.5's
        GATED_DELTA | dict(allow_neg_eigval=False),
        (Naming("lara_mini", True, FULL_RANK, RENAMED, fused=(IN_PROJ,)),),
        gated_delta_settings,
    ),
)
__getattr__ = FAMILY.layer_by_name
