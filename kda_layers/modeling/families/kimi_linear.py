"""Kimi-Linear: KDA with an unbounded softplus gate, next to latent attention without position encoding."""

from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention, KimiLinearModel

from kda_layers.modeling.checkpoints.naming import FORGET_GATE, LOW_RANK, STOCK, Format, Naming
from kda_layers.modeling.in_place import KDAFamily, StockKDALayer

WEIGHTS = Format(
    STOCK | dict(gate_rank="head_dim", gate_activation="softplus", lower_bound=None),
    (
        Naming("kimi_linear", False, LOW_RANK, FORGET_GATE, A_log_shape=(1, 1, -1, 1)),
        Naming("kimi_linear", True, LOW_RANK, separate_conv=True, A_log_shape=(1, 1, -1, 1)),
        Naming("kimi_linear", True, LOW_RANK, separate_conv=True),
    ),
)


class FastKimiLinearDeltaAttention(StockKDALayer, KimiLinearDeltaAttention):
    """`KimiLinearDeltaAttention` with our forward."""


FAMILY = KDAFamily(
    base_model=KimiLinearModel,
    stock_layer=KimiLinearDeltaAttention,
    layer=FastKimiLinearDeltaAttention,
    lower_bound=lambda layer: None,
)
