"""The output of a training step whose loss needs no logits: they are computed when somebody reads them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kda_layers.modeling.seams import CausalLMOutputWithPast


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
