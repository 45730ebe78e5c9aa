"""The loss of a language model from its hidden states, by chunks of tokens and without the logits of all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kda_layers.kernels import torch_private
from kda_layers.kernels.fused.linear_cross_entropy import linear_cross_entropy
from kda_layers.kernels.tracing import autocasts
from kda_layers.modeling.layer.merged_weights import trains_plainly
from kda_layers.modeling.seams import ForCausalLMLoss


def chunked_loss(
    model: Any,
    hidden_states: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Return transformers' ForCausalLMLoss of lm_head(hidden_states), or None where this loss has to be called itself.

    That is: another loss function; a head with a bias, an adapter, quantised or sharded weights, or hooks; inputs that
    the loss refuses; torch.func transforms and forward-mode differentiation.

    Args:
        model: with `lm_head`, `loss_function` and `config.vocab_size`.
        hidden_states: [B, T, D] after the final norm.
        labels: [B, T] token ids; shifted here.
        num_items_in_batch: the sum of losses is divided by it; None for the number of labels.
        ignore_index: label without loss.
        shift_labels: [B, T] labels that are shifted already, used instead of `labels`.
        _: keywords that ForCausalLMLoss does not read, either.
    """
    head, dtype = model.lm_head, autocast_dtype(hidden_states)
    if model.loss_function is not ForCausalLMLoss or not trains_plainly(head):
        return None
    if type(hidden_states) is not Tensor or head.weight.shape[0] != model.config.vocab_size:
        return None
    if dtype is None and hidden_states.dtype != head.weight.dtype:
        return None
    if not torch.compiler.is_compiling() and (torch_private.transforms_active() or torch_private.forward_ad_active()):
        return None
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(hidden_states.device)
    x = hidden_states.flatten(0, -2)
    if target.shape[0] != x.shape[0] or target.dtype != torch.int64:
        return None
    total = linear_cross_entropy(x if dtype is None else x.to(dtype), head.weight, target, ignore_index)
    if num_items_in_batch is None:
        return total / (target != ignore_index).sum()
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast computes a linear layer in; None without autocast, which leaves fp64 alone."""
    device = x.device.type
    if x.dtype == torch.float64 or not autocasts(device):
        return None
    return torch.get_autocast_dtype(device)
