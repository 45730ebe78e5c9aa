"""GLM-5.3-Flash: KDA with a lower-bound gate, next to indexed sparse attention."""

from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention, Glm5NextTextModel

from kda_layers.modeling.families.stock import LowRankMixer, StockFamily


class FastGlm5NextTextLinearAttention(LowRankMixer, Glm5NextTextLinearAttention):
    """`Glm5NextTextLinearAttention` with our forward."""


FAMILY = StockFamily(
    base_model=Glm5NextTextModel,
    stock_layer=Glm5NextTextLinearAttention,
    layer=FastGlm5NextTextLinearAttention,
    lower_bound=lambda layer: layer.forget_gate.safe_gate_lower_bound,
)
