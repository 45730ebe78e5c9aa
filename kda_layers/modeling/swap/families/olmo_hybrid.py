"""OLMo Hybrid: gated delta nets with a projection for each of their inputs, next to softmax attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kda_layers.modeling.layer.checkpoint_names import FULL_RANK, GATED_DELTA, Format, Naming, gated_delta_settings
from kda_layers.modeling.swap.gated_delta import GatedDeltaFamily, StockGatedDeltaNet


class StockOlmoHybridLayer(StockGatedDeltaNet):
    """OLMo Hybrid's gated delta net."""

    projections = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")

    def _split(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        *qkv, a, b, z = outputs
        return qkv, a, b, z


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options that the configuration shows; the epsilon of the output norm is none of its fields."""
    return gated_delta_settings(config) | dict(rms_norm_eps=1e-5, allow_neg_eigval=config["linear_allow_neg_eigval"])


RENAMED = {"f_proj.weight": "a_proj.weight"}
FAMILY = GatedDeltaFamily(
    model_type="olmo_hybrid",
    base_name="OlmoHybridModel",
    stock_name="OlmoHybridGatedDeltaNet",
    mixin=StockOlmoHybridLayer,
    weights=Format(
        GATED_DELTA,
        (
            Naming("olmo_hybrid", False, FULL_RANK, RENAMED),
            Naming("olmo_hybrid", True, FULL_RANK, RENAMED, separate_conv=True),
        ),
        _settings,
    ),
)
__getattr__ = FAMILY.layer_by_name
