"""Kimi-Linear: KDA with an unbounded softplus gate, next to latent attention without position encoding."""

from kda_layers.modeling.layer.checkpoint_names import FORGET_GATE, LOW_RANK, STOCK, Format, Naming
from kda_layers.modeling.swap.in_place import KDAFamily

FAMILY = KDAFamily(
    model_type="kimi_linear",
    base_name="KimiLinearModel",
    stock_name="KimiLinearDeltaAttention",
    lower_bound=lambda layer: None,
    weights=Format(
        STOCK | dict(gate_rank="head_dim", decay_rank="head_dim", gate_activation="softplus", lower_bound=None),
        (
            Naming("kimi_linear", False, LOW_RANK, FORGET_GATE, A_log_shape=(1, 1, -1, 1)),
            Naming("kimi_linear", True, LOW_RANK, separate_conv=True, A_log_shape=(1, 1, -1, 1)),
            Naming("kimi_linear", True, LOW_RANK, separate_conv=True),
        ),
    ),
)
__getattr__ = FAMILY.layer_by_name
