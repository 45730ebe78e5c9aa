"""Softmax decoders of transformers with KDA in place of some or all attention layers.

The models of a configuration, such as KDALlamaModel and KDALlamaForCausalLM of KDALlamaConfig, are made when it is
first used or when one of these names is first imported from here.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedConfig

from kda_layers.modeling.models import VARIANTS, variant_config
from kda_layers.modeling.models.hybrid import HybridForCausalLM, HybridModel, KDAAttention
from kda_layers.modeling.models.registration import register


class VariantModel(HybridModel):
    """A family's base model with KDA layers: its own decoder layers, norm and rotary embedding."""

    layer_class: ClassVar[type[nn.Module]]
    rotary_class: ClassVar[type[nn.Module]]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.rotary_emb = self.rotary_class(config=config)
        self.post_init()

    def make_layer(self, layer_idx: int) -> nn.Module:
        layer = self.layer_class(self.config, layer_idx)
        if self.config.layer_types[layer_idx] == "linear_attention":
            layer.self_attn = KDAAttention(self.config, layer_idx)
        return layer

    def position_inputs(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        return {"position_embeddings": self.rotary_emb(hidden_states, position_ids)}


@functools.cache
def language_model(kind: str) -> Any:
    """Return the language model with KDA layers of a model_type in `VARIANTS`, registered with transformers.

    It is made of the family's own classes; its `stock_class` is the family's language model.
    """
    config = globals()[VARIANTS[kind]] = variant_config(kind)
    family = config.__name__.removeprefix("KDA").removesuffix("Config")
    stock = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")

    def make(suffix: str, base: type, **attributes: Any) -> Any:
        doc = f"transformers' {family}{suffix}, with KDA where config.layer_types says 'linear_attention'."
        attributes |= dict(config_class=config, __module__=__name__, __doc__=doc)
        made = type(f"KDA{family}{suffix}", (base, getattr(stock, f"{family}PreTrainedModel")), attributes)
        return globals().setdefault(made.__name__, made)

    parts = dict(layer_class="DecoderLayer", norm_class="RMSNorm", rotary_class="RotaryEmbedding")
    model_class = make("Model", VariantModel, **{name: getattr(stock, family + part) for name, part in parts.items()})
    stock_class = getattr(stock, f"{family}ForCausalLM")
    causal_lm = make("ForCausalLM", HybridForCausalLM, model_class=model_class, stock_class=stock_class)
    register(causal_lm)
    return causal_lm


def __getattr__(name: str) -> Any:
    for kind, config in VARIANTS.items():
        if name.startswith(config.removesuffix("Config")):
            language_model(kind)
            if name in globals():
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
