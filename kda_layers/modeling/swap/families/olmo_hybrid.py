"""OLMo Hybrid: gated delta nets with a projection for each of their inputs, next to softmax attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kda_layers.modeling.swap.gated_delta import GatedDeltaFamily, StockGatedDeltaNet


class StockOlmoHybridLayer(StockGatedDeltaNet):
    """OLMo Hybrid's gated delta net."""

    projections = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")

    def _split(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        *qkv, a, b, z = outputs
        return qkv, a, b, z


FAMILY = GatedDeltaFamily(
    model_type="olmo_hybrid",
    base_name="OlmoHybridModel",
    stock_name="OlmoHybridGatedDeltaNet",
    mixin=StockOlmoHybridLayer,
)
__getattr__ = FAMILY.layer_by_name
