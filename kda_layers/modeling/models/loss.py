"""The loss of a language model from its hidden states, by chunks of tokens and without the logits of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kda_layers.kernels.fused.linear_cross_entropy import linear_cross_entropy
from kda_layers.kernels.tracing import autocasts
from kda_layers.modeling.layer.fast_paths import Call, Reason, fast_path, other_dtype, training_additions
from kda_layers.modeling.seams import ForCausalLMLoss


@fast_path("loss by chunks of tokens", instead="logits of all tokens, then the loss")
def CHUNKED_LOSS(call: Any, model: Any) -> Iterator[Reason]:
    """transformers' loss of a causal model, from a plain head."""
    head = model.lm_head
    if model.loss_function is not ForCausalLMLoss:
        yield Reason("has a loss function of its own", "leave model.loss_function as it is")
    yield from training_additions(head)
    weight = head._parameters.get("weight")
    if weight is not None and weight.shape[0] != model.config.vocab_size:
        yield Reason(f"has {weight.shape[0]} outputs for config.vocab_size = {model.config.vocab_size}", "", head)
    if not call.autocast or call.dtype == torch.float64:  # which autocast leaves alone
        yield from other_dtype(head, call.dtype)
    if not call.compiling and call.is_transformed:
        yield Reason("is under a transform of torch.func or forward-mode differentiation")


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

    That is where `CHUNKED_LOSS` has a reason, and for inputs that the loss refuses.

    Args:
        model: with `lm_head`, `loss_function` and `config.vocab_size`.
        hidden_states: [B, T, D] after the final norm.
        labels: [B, T] token ids; shifted here.
        num_items_in_batch: the sum of losses is divided by it; None for the number of labels.
        ignore_index: label without loss.
        shift_labels: [B, T] labels that are shifted already, used instead of `labels`.
        _: keywords that ForCausalLMLoss does not read, either.
    """
    if type(hidden_states) is not Tensor or not CHUNKED_LOSS.serves(Call(hidden_states), model):
        return None
    head, dtype = model.lm_head, autocast_dtype(hidden_states)
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
