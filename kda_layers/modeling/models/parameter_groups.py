"""Parameter groups for an optimizer with weight decay."""

from __future__ import annotations

import numbers
from typing import Any

from torch import nn

from kda_layers.modeling.layer.layer import KimiDeltaAttention


def parameter_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Return the trainable parameters of a model in two groups for an optimizer: decayed ones, and all others.

    Weight decay is for matrices: weights of linear layers and embeddings, and stacked ones of experts. The others are
    norms, biases, short convolutions (Conv1d), and A_log and dt_bias of KDA layers, whose value 0 is no neutral gate.

    transformers' Trainer decides by names, and decays A_log and short convolutions, also those of stock models. Tell it
    the names:

    ```python
    class KDATrainer(Trainer):
        def get_decay_parameter_names(self, model):
            decayed = set(map(id, kda_layers.training.parameter_groups(model)[0]["params"]))
            return [name for name, p in model.named_parameters() if id(p) in decayed]
    ```

    Args:
        model: any module, also wrapped or with adapters.
        weight_decay: that of the first group, 0 or more.

    Returns:
        [{"params": ..., "weight_decay": weight_decay}, {"params": ..., "weight_decay": 0.0}], each in the order of
        `model.parameters()`; a group may be empty.

    Raises:
        TypeError: model is not a module, or weight_decay not a number.
        ValueError: a negative weight_decay.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(weight_decay, bool) or not isinstance(weight_decay, numbers.Real):
        raise TypeError(f"weight_decay must be a number, got {type(weight_decay).__name__}")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be 0 or more, got {weight_decay}")
    matrices: dict[nn.Parameter, bool] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p.requires_grad:
                gate = name in KimiDeltaAttention.kept_in_fp32
                matrices.setdefault(p, p.ndim > 1 and not isinstance(module, nn.Conv1d) and not gate)
    groups = {True: weight_decay, False: 0.0}
    return [dict(params=[p for p, m in matrices.items() if m is of], weight_decay=w) for of, w in groups.items()]
