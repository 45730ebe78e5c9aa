"""The class of a swapped model: transformers' own, with the loop of `generate` on the device."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from transformers import GenerationMixin

from kda_layers.modeling.cuda_graphs.kept import history_of
from kda_layers.modeling.models.generation import LoopOnDevice


class SwappedModel(LoopOnDevice):
    """A model of transformers whose KDA layers are swapped; the first base of its class.

    Attributes:
        stock: the class of transformers.
    """

    stock: ClassVar[type]

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickle does not find a class under another one's name
        if type(self) is not _with_loop(self.stock):  # FSDP2 puts a class of its own before
            return super().__reduce_ex__(protocol)
        return _new, (self.stock,), self.__getstate__()


def add_loop(model: Any) -> None:
    """Make the class of a model one with the loop, unless it has no `generate`, or chooses tokens in its own way."""
    stock: Any = type(model)
    if getattr(stock, "_sample", None) is GenerationMixin._sample:
        model.__class__ = _with_loop(stock)


def remove_loop(model: Any) -> None:
    """Undo `add_loop`, unless something has changed the class since."""
    if isinstance(model, SwappedModel):
        history_of(model).forget()
        if type(model) is _with_loop(model.stock):
            model.__class__ = model.stock


@functools.cache
def _with_loop(stock: Any) -> Any:
    """Return `stock` with the loop. It has its names, by which transformers knows checkpoints."""
    names = dict(__module__=stock.__module__, __qualname__=stock.__qualname__, __doc__=stock.__doc__)
    return type(stock.__name__, (SwappedModel, stock), names | dict(stock=stock))


def _new(stock: type) -> Any:
    kind = _with_loop(stock)
    return kind.__new__(kind)
