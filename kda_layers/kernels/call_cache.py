"""Cache by the signature of a call: arguments like those of an earlier call need no checks, choice or launch plan."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from . import torch_private
from .tracing import is_plain

MOST = 1024  # shapes and options in a cache
MOST_ALIKE = 8  # signatures with the same shapes and options
TYPES = frozenset((Tensor, torch.nn.Parameter))

Value = TypeVar("Value")


class CallCache(Generic[Value]):
    """Map from the signature of a function's call to a value.

    A signature is the type, dtype, device, shape, strides, requires_grad and dispatch keys of each tensor, which torch
    compares in 1 us, the other arguments with their types, and torch's state: grad mode, inference mode and autocast.
    Calls are not cached under torch.compile, torch.func transforms, forward-mode AD and dispatch modes, with Tensor
    subclasses, or with the same tensor as two arguments.
    """

    def __init__(self, tensors: int, context: Callable[[], Any] = lambda: None) -> None:
        """Create an empty cache.

        Args:
            tensors: number of leading fields of the inputs that are tensors or None: `leading_tensors`
            context: returns a hashable that is part of the signature
        """
        self._tensors, self._context = tensors, context
        self._values: dict[Any, list[tuple[Callable[..., bool], Value]]] = {}

    def get(self, x: Any, *more: Any) -> Value | None:
        """Return the value of a call with this signature, or None.

        Args:
            x: the inputs, a NamedTuple, not validated
            more: hashables that are part of the signature
        """
        if _is_transformed() or type(x[0]) not in TYPES or x[0].is_nested:  # a nested tensor has no shape
            return None
        try:
            candidates = self._values.get(self._key(x, more))
        except TypeError:  # an option that is not hashable, which the validator names
            return None
        if candidates:
            tensors = [t for t in x[: self._tensors] if t is not None]
            if True in [t.is_nested for t in tensors]:  # torch's guards end the process: they read strides
                return None
            for same, value in candidates:
                if same(*tensors):
                    return value
        return None

    def put(self, x: Any, value: Value, *more: Any) -> Value:
        """Cache `value` under the signature of a call with validated inputs; return it."""
        if _is_transformed() or not is_plain(x):
            return value
        tensors = [t for t in x[: self._tensors] if t is not None]
        same = torch_private.same_metadata_as(tensors)
        if same(*tensors):
            if len(self._values) >= MOST:
                self._values.clear()
            alike = self._values.setdefault(self._key(x, more), [])
            alike[:] = [(same, value), *alike[: MOST_ALIKE - 1]]
        return value

    def clear(self) -> None:
        """Remove every entry."""
        self._values.clear()

    def _key(self, x: Any, more: tuple[Any, ...]) -> Any:
        # The types tell 64 from 64.0 and 1 from True, which are equal, and tensors from None.
        options, grads = x[self._tensors :], torch.is_grad_enabled()
        return *map(type, x), x[0].shape, options, more, grads, self._context()


def leading_tensors(inputs: type[Any]) -> int:
    """Return the number of fields of a NamedTuple class that are tensors, or None; they come first."""
    hints = typing.get_type_hints(inputs)
    are_tensors = [hints[name] in (Tensor, Tensor | None) for name in inputs._fields]
    assert are_tensors == sorted(are_tensors, reverse=True), f"the tensors of {inputs.__name__} must come first"
    return sum(are_tensors)


def _is_transformed() -> bool:
    """True under torch.compile, a torch.func transform or forward-mode AD."""
    return torch.compiler.is_compiling() or torch_private.transforms_active() or torch_private.forward_ad_active()
