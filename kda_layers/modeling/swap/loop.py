"""The class of a swapped model: transformers' own, with the loop of `generate` on the device."""

from __future__ import annotations

import functools
from typing import Any

from kda_layers.modeling.models.generation import LoopOnDevice


class SwappedModel(LoopOnDevice):
    """A model of transformers whose KDA layers are swapped; the first base of its class."""

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickle does not find a class under another one's name
        return _new, (type(self).__bases__[1],), self.__getstate__()


@functools.cache
def with_loop(stock: Any) -> Any:
    """Return `stock` with the loop. It has its name and module, by which transformers knows checkpoints."""
    return type(stock.__name__, (SwappedModel, stock), dict(__module__=stock.__module__, __doc__=stock.__doc__))


def without_loop(model: Any) -> type:
    """Return the class of transformers of a model."""
    kind = type(model)
    return kind.__bases__[1] if isinstance(model, SwappedModel) else kind


def _new(stock: type) -> Any:
    kind: Any = with_loop(stock)
    return kind.__new__(kind)
