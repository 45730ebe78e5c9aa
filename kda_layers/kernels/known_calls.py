"""Calls like earlier ones: what was found out for one, such as that its arguments are right, holds for the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from . import torch_private
from .tracing import is_plain

MOST = 1024  # shapes and options that are remembered
MOST_ALIKE = 8  # kinds of calls that differ in nothing else
TYPES = frozenset((Tensor, torch.nn.Parameter))

Value = TypeVar("Value")


class KnownCalls(Generic[Value]):
    """A value for each kind of call of a function.

    Two calls are of one kind if their tensors have the same types, dtypes, devices, shapes, strides, requires_grad and
    dispatch keys (torch compares these in 1 us), their other arguments are equal, and torch is in the same state: grad
    mode, inference mode and autocast. Calls while torch compiles, under its transforms and dispatch modes, with Tensor
    subclasses, or with one tensor as two arguments, are of no kind.
    """

    def __init__(self, tensors: int, context: Callable[[], Any] = lambda: None) -> None:
        """Know no call yet.

        Args:
            tensors: how many fields of the inputs, the leading ones, are tensors or None
            context: returns what else the values depend on at the time of a call, hashable
        """
        self._tensors, self._context = tensors, context
        self._known: dict[Any, list[tuple[Callable[..., bool], Value]]] = {}

    def find(self, x: Any, *more: Any) -> Value | None:
        """Return what `remember` got for a call of this kind, or None.

        Args:
            x: the inputs, a NamedTuple, not checked yet
            more: what else the value depends on, hashable
        """
        if _is_looked_at() or type(x[0]) not in TYPES or x[0].is_nested:  # a nested tensor has no shape
            return None
        try:
            candidates = self._known.get(self._key(x, more))
        except TypeError:  # an option that is not hashable is wrong, which the caller's checks say
            return None
        if candidates:
            tensors = [t for t in x[: self._tensors] if t is not None]
            for same, value in candidates:
                if same(*tensors):
                    return value
        return None

    def remember(self, x: Any, value: Value, *more: Any) -> Value:
        """Return `value`; `find` returns it for calls of the kind of this one, whose arguments are right."""
        if _is_looked_at() or not is_plain(x):
            return value
        tensors = [t for t in x[: self._tensors] if t is not None]
        same = torch_private.same_metadata_as(tensors)
        if same(*tensors):
            if len(self._known) >= MOST:
                self._known.clear()
            alike = self._known.setdefault(self._key(x, more), [])
            alike[:] = [(same, value), *alike[: MOST_ALIKE - 1]]
        return value

    def forget(self) -> None:
        """Forget every call."""
        self._known.clear()

    def _key(self, x: Any, more: tuple[Any, ...]) -> Any:
        options, grads = x[self._tensors :], torch.is_grad_enabled()
        return (*map(type, x[: self._tensors]), x[0].shape, options, more, grads, self._context())


def _is_looked_at() -> bool:
    """True if torch compiles, transforms functions or differentiates forward."""
    return torch.compiler.is_compiling() or torch_private.transforms_active() or torch_private.forward_ad_active()
