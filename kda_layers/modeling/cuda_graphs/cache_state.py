"""Everything that the layers of a cache hold, to be compared and put back."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from kda_layers.modeling.cuda_graphs.capture import CONSTANTS
from kda_layers.modeling.seams import Cache


class CacheState:
    """Everything that the layers of a cache hold: tensors by identity and address, the rest by identity."""

    def __init__(self, cache: Cache) -> None:
        """Read the layers of `cache`."""
        layers = {id(layer) for layer in cache.layers}
        self._containers: list[Any] = [cache.layers, *map(vars, cache.layers)]
        self._unknown = False
        for container in self._containers:  # which grows
            for value in _values(container):
                if type(value) in (dict, list):
                    self._containers.append(value)
                elif not isinstance(value, (Tensor, torch.dtype, torch.device, *CONSTANTS)):
                    self._unknown |= id(value) not in layers
        self._copies = [container.copy() for container in self._containers]
        self._views = [_values(container) for container in self._containers]
        self._lengths = [len(view) for view in self._views]
        self._held = list(chain.from_iterable(self._views))
        self._tensors = [value for value in self._held if isinstance(value, Tensor)]
        self._addresses = [t.data_ptr() for t in self._tensors]

    def is_readable(self, device: torch.device) -> bool:
        """Return True if all that the layers hold is compared and restored, and all tensors are on `device`."""
        return not self._unknown and all(type(t) is Tensor and t.device == device for t in self._tensors)

    def is_current(self) -> bool:
        """Return True if the layers hold the same objects, and tensors where they were."""
        return (
            [*map(len, self._views)] == self._lengths
            and all(map(is_, chain.from_iterable(self._views), self._held))
            and [t.data_ptr() for t in self._tensors] == self._addresses
        )

    def addresses(self) -> tuple[Any, ...]:
        """Return what is held without holding it: equal for equal states, though not only for these."""
        return *map(id, self._held), *self._addresses

    def kind(self) -> tuple[Any, ...]:
        """Return what caches of the same layers and shapes have in common."""
        return tuple(
            (v.shape, v.dtype) if isinstance(v, Tensor) else (type(v), v if isinstance(v, CONSTANTS) else None)
            for v in self._held
        )

    def restore(self) -> None:
        """Put all objects back; the contents of tensors are not restored."""
        for container, copy in zip(self._containers, self._copies, strict=True):
            if isinstance(container, list):
                container[:] = copy
            else:
                container.clear()
                container.update(copy)


def _values(container: Any) -> Any:
    """Return a live view of what a dict or a list holds."""
    return container.values() if isinstance(container, dict) else container
