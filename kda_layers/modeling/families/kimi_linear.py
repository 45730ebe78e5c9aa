"""Kimi-Linear: KDA with an unbounded softplus gate, next to latent attention without position encoding."""

from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention, KimiLinearModel

from kda_layers.modeling.families.stock import KDAFamily, LowRankMixer


class FastKimiLinearDeltaAttention(LowRankMixer, KimiLinearDeltaAttention):
    """`KimiLinearDeltaAttention` with our forward."""


FAMILY = KDAFamily(
    base_model=KimiLinearModel,
    stock_layer=KimiLinearDeltaAttention,
    layer=FastKimiLinearDeltaAttention,
    lower_bound=lambda layer: None,
)
