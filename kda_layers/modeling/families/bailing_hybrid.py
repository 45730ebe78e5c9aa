"""Ling / Ring: KDA with a lower-bound gate and full-rank gate projections, next to latent attention."""

from kda_layers.modeling.checkpoints.naming import FORGET_GATE, FULL_RANK, STOCK, Format, Naming
from kda_layers.modeling.in_place import KDAFamily, StockKDALayer

WEIGHTS = Format(
    STOCK | dict(gate_rank=0),
    (
        Naming("bailing_hybrid", False, FULL_RANK, FORGET_GATE),
        Naming("bailing_hybrid", True, FULL_RANK, {"o_proj.weight": "dense.weight"}, separate_conv=True),
        Naming("bailing_hybrid", True, FULL_RANK, separate_conv=True),  # transformers loads this as well
    ),
)

try:
    from transformers.models.bailing_hybrid.modeling_bailing_hybrid import (
        BailingHybridDeltaAttention,
        BailingHybridModel,
    )
except ModuleNotFoundError:  # transformers 5.17 has no such model; its weights can be read all the same
    FAMILY = None
else:

    class FastBailingHybridDeltaAttention(StockKDALayer, BailingHybridDeltaAttention):
        """`BailingHybridDeltaAttention` with our forward; the log-decay is not rounded to bf16."""

        gate_rank = 0

    FAMILY = KDAFamily(
        base_model=BailingHybridModel,
        stock_layer=BailingHybridDeltaAttention,
        layer=FastBailingHybridDeltaAttention,
        lower_bound=lambda layer: layer.forget_gate.lower_bound if layer.forget_gate.safe_gate else None,
    )
