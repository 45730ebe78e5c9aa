"""The loss and the logits of a language model from its hidden states.

In training, the loss needs no logits: it is computed by chunks of tokens, and the logits on first access.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kda_layers.kernels.fused.linear_cross_entropy import linear_cross_entropy
from kda_layers.kernels.tracing import autocasts
from kda_layers.modeling.layer.fast_paths import Call, Reason, fast_path, other_dtype, training_additions
from kda_layers.modeling.seams import CausalLMOutputWithPast, ForCausalLMLoss


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


def keeps_all(logits_to_keep: int | Tensor) -> bool:
    """Return True if the logits of all positions are computed."""
    return isinstance(logits_to_keep, int) and logits_to_keep == 0


def check_skip_logits(skip_logits: bool | None, labels: Tensor | None, logits_to_keep: int | Tensor) -> None:
    """Raise a ValueError for skip_logits=True without labels or with logits_to_keep."""
    if skip_logits and (labels is None or not keeps_all(logits_to_keep)):
        given = "labels=None" if labels is None else f"logits_to_keep={logits_to_keep}"
        raise ValueError(f"skip_logits must be False or None without labels or with logits_to_keep, got {given}")


def logits_and_loss(
    model: Any,
    x: Tensor,
    labels: Tensor | None,
    logits_to_keep: int | Tensor,
    skip_logits: bool | None,
    options: dict[str, Any],
    for_loss: dict[str, Any],
    **more: Any,
) -> CausalLMOutputWithPast:
    """Return the output of a language model with its logits, and the loss if there are labels.

    Args:
        model: with `lm_head`, `loss_function`, `config.vocab_size` and `skip_logits`.
        x: [B, T, D] hidden states after the final norm.
        labels, logits_to_keep, skip_logits: as in `HybridForCausalLM.forward`.
        options: keywords of the call that its loss function gets.
        for_loss: those that it gets alone; the loss by chunks of tokens does not read them.
        more: further fields of the output.
    """
    if skip_logits is None:
        skip_logits = model.training and torch.is_grad_enabled() if model.skip_logits is None else model.skip_logits
    if skip_logits and labels is not None and keeps_all(logits_to_keep) and not for_loss:
        loss = chunked_loss(model, x, labels, **options)
        if loss is not None:
            skipped: Any = SkippedLogits(model.lm_head, x, autocast_dtype(x))
            return LazyLogitsOutput(loss=loss, logits=skipped, **more)
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep  # -0 keeps all
    logits, loss = model.lm_head(x[:, kept]), None
    if labels is not None:
        options = options | for_loss
        loss = model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size, **options)
    return CausalLMOutputWithPast(loss=loss, logits=logits, **more)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast computes a linear layer in; None without autocast, which leaves fp64 alone."""
    device = x.device.type
    if x.dtype == torch.float64 or not autocasts(device):
        return None
    return torch.get_autocast_dtype(device)


class SkippedLogits:
    """The logits lm_head(hidden_states), not computed yet; the value of "logits" in a `LazyLogitsOutput`.

    An object without attributes of a tensor: code that casts or collects the tensors of an output passes it on.
    """

    def __init__(self, head: nn.Linear, hidden_states: Tensor, autocast: torch.dtype | None):
        """Keep what `compute` needs.

        Args:
            head: language-model head.
            hidden_states: [B, T, D].
            autocast: dtype in which autocast computes linear layers here, or None.
        """
        self._head, self._hidden, self._autocast = head, hidden_states, autocast
        self._weight, self._version = head.weight, _version(head.weight)

    def compute(self) -> Tensor:
        """Return the logits [B, T, vocab_size], with their gradient if gradients are enabled.

        Raises:
            RuntimeError: the weights of the head have changed since the forward.
        """
        if self._head.weight is not self._weight or self._version not in (None, _version(self._weight)):
            raise RuntimeError(
                "the logits of this output were skipped and cannot be computed any more, as the weights of the head "
                "have changed: read `.logits` before the optimizer's step, or call the model with skip_logits=False"
            )
        device = self._hidden.device.type
        cast = torch.autocast(device, self._autocast) if self._autocast else contextlib.nullcontext()
        with cast:
            return self._head(self._hidden)

    @property
    def has_gradient(self) -> bool:
        """True if logits that are computed now carry all gradients, so that they can be kept."""
        return torch.is_grad_enabled() or not (self._hidden.requires_grad or self._weight.requires_grad)


def _version(weight: Tensor) -> int | None:
    """Return the version of a weight; None where it has none, or cannot be traced."""
    return None if torch.compiler.is_compiling() or weight.is_inference() else weight._version


@dataclass
class LazyLogitsOutput(CausalLMOutputWithPast):
    """A `CausalLMOutputWithPast` whose logits are computed at their first reading, as attribute, item or in a tuple.

    Only `values` and `items`, by which DDP and accelerate look for tensors, show `SkippedLogits` in their place.
    """

    def _read(self, value: Any) -> Any:
        """Return a value, or the logits where it is `SkippedLogits`; kept if they carry their gradient."""
        if not isinstance(value, SkippedLogits):
            return value
        logits = value.compute()
        if value.has_gradient:
            self["logits"] = logits
        return logits

    @property
    def logits(self) -> Tensor | None:
        """Logits [B, T, vocab_size]."""
        return self._read(self.__dict__.get("logits"))

    @logits.setter
    def logits(self, value: Any) -> None:
        self.__dict__["logits"] = value

    def __getitem__(self, k: Any) -> Any:
        if not isinstance(k, str):
            keys = list(self.keys())[k]
            return self[keys] if isinstance(keys, str) else tuple(self[key] for key in keys)
        return self._read(super().__getitem__(k))

    def get(self, key: Any, default: Any = None) -> Any:
        return self._read(super().get(key, default))

    def __reduce__(self) -> Any:
        return CausalLMOutputWithPast(**{key: self[key] for key in self}).__reduce__()  # copies hold the logits
