"""GLM-5.3-Flash: KDA with a lower-bound gate, next to indexed sparse attention."""

from __future__ import annotations

from typing import Any

import torch

from kda_layers.modeling.layer.checkpoint_names import FORGET_GATE, LOW_RANK, STOCK, Format, Naming
from kda_layers.modeling.swap.in_place import KDAFamily, prepare_layout


def prepare_masks(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Apply `prepare_layout`, and give the KDA layers a mask only where something is padded.

    The stock forward makes a mask of all tokens for its indexer and passes it to the KDA layers too, which would then
    handle padding where there is none. It accepts a mask for each type of layer instead.
    """
    kwargs, tokens, layout = prepare_layout(model, args, kwargs)
    if isinstance(layout.attention_mask, dict):
        return (), kwargs | {"attention_mask": layout.attention_mask}
    padding = None if layout.padding is None else layout.padding.bool()
    indexed = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if padding is None else padding
    masks = dict.fromkeys(model.config.layer_types, indexed) | {"linear_attention": padding}
    return (), kwargs | {"attention_mask": masks}


FAMILY = KDAFamily(
    model_type="glm5_next",
    base_name="Glm5NextTextModel",
    stock_name="Glm5NextTextLinearAttention",
    lower_bound=lambda layer: layer.forget_gate.safe_gate_lower_bound,
    prepare_call=prepare_masks,
    weights=Format(
        STOCK | dict(gate_rank="head_dim", decay_rank="head_dim"),
        (
            Naming("glm5_next", False, LOW_RANK, FORGET_GATE),
            Naming("glm5_next", True, LOW_RANK, separate_conv=True),
        ),
    ),
)
__getattr__ = FAMILY.layer_by_name
