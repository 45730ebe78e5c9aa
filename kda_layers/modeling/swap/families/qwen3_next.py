"""Qwen3-Next: gated delta nets with projections interleaved by key head, next to gated softmax attention."""

from __future__ import annotations

from collections.abc import Sequence

from einops import rearrange
from torch import Tensor

from kda_layers.modeling.layer.checkpoint_names import (
    FULL_RANK,
    GATED_DELTA,
    Format,
    Fused,
    Naming,
    gated_delta_settings,
)
from kda_layers.modeling.swap.gated_delta import GatedDeltaFamily, StockQwenLayer


class StockQwen3NextLayer(StockQwenLayer):
    """Qwen3-Next's gated delta net: of each key head q, k and its value heads' v and z, and these heads' b and a."""

    projections = ("in_proj_qkvz", "in_proj_ba")

    def _split(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        K, group = self.head_k_dim, self.num_v_heads // self.num_k_heads
        qkvz, ba = (rearrange(t, "b t (h d) -> b t h d", h=self.num_k_heads) for t in outputs)
        *qkv, z = (t.flatten(2) for t in qkvz.split((K, K, *(group * self.head_v_dim,) * 2), -1))
        b, a = (t.flatten(2) for t in ba.split(group, -1))
        return qkv, a, b, z


FAMILY = GatedDeltaFamily(
    model_type="qwen3_next",
    base_name="Qwen3NextModel",
    stock_name="Qwen3NextGatedDeltaNet",
    mixin=StockQwen3NextLayer,
    weights=Format(
        GATED_DELTA | dict(allow_neg_eigval=False),
        (
            Naming(
                "qwen3_next", None, FULL_RANK, {"o_norm.weight": "norm.weight", "o_proj.weight": "out_proj.weight"},
                fused=(
                    Fused(
                        "in_proj_qkvz.weight", tuple(f"{n}_proj.weight" for n in "qkvg"), by_head=True
                    ),
                    Fused("in_proj_ba.weight", ("b_proj.weight", "f_proj.weight"), by_head=True),
                ),
            ),
        ),
        gated_delta_settings,
    ),
)  # fmt: skip
__getattr__ = FAMILY.layer_by_name
