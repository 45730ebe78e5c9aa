"""Ling / Ring: KDA with a lower-bound gate and full-rank gate projections, next to latent attention."""

from torch import Tensor, nn
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention, BailingHybridModel

from kda_layers.modeling.families.stock import KDAFamily, StockMixer


class FastBailingHybridDeltaAttention(StockMixer, BailingHybridDeltaAttention):
    """`BailingHybridDeltaAttention` with our forward; its log-decay is not rounded to bf16 on the way."""

    g_proj: nn.Module

    def decay_logits(self, x: Tensor) -> Tensor:
        return self.forget_gate.f_proj(x)

    def output_gate(self, x: Tensor) -> Tensor:
        return self.g_proj(x)


FAMILY = KDAFamily(
    base_model=BailingHybridModel,
    stock_layer=BailingHybridDeltaAttention,
    layer=FastBailingHybridDeltaAttention,
    lower_bound=lambda layer: layer.forget_gate.lower_bound if layer.forget_gate.safe_gate else None,
)
