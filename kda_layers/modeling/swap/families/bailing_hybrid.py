"""Ling / Ring: KDA with a lower-bound gate and full-rank gate projections, next to latent attention.

Unlike there, the log-decay is not rounded to bf16. transformers 5.17 has no such model; its weights can be read all the
same.
"""

from kda_layers.modeling.layer.checkpoint_names import FORGET_GATE, FULL_RANK, STOCK, Format, Naming
from kda_layers.modeling.swap.in_place import KDAFamily

FAMILY = KDAFamily(
    model_type="bailing_hybrid",
    base_name="BailingHybridModel",
    stock_name="BailingHybridDeltaAttention",
    lower_bound=lambda layer: layer.forget_gate.lower_bound if layer.forget_gate.safe_gate else None,
    weights=Format(
        STOCK | dict(gate_rank=0, decay_rank=0),
        (
            Naming("bailing_hybrid", False, FULL_RANK, FORGET_GATE),
            Naming("bailing_hybrid", True, FULL_RANK, {"o_proj.weight": "dense.weight"}, separate_conv=True),
            Naming("bailing_hybrid", True, FULL_RANK, separate_conv=True),  # transformers loads this as well
        ),
    ),
)
__getattr__ = FAMILY.layer_by_name
