"""Cached answers about a module, valid until its submodules, parameters or hooks change."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

Answer = TypeVar("Answer")

EPSILONS = ("eps", "variance_epsilon")  # names in torch.nn and in transformers' norms


class Snapshot:
    """The submodules and parameters of a module without hooks, where the parameters lie, and the norms' epsilons.

    Other attributes of modules are taken for constants. The module itself is not held: it owns the snapshot, and a
    cycle would keep its weights in memory until Python collects garbage.
    """

    def __init__(self, module: nn.Module) -> None:
        self._inside = list(module.modules())[1:]
        self._classes = [type(m) for m in (module, *self._inside)]
        self._held = self._parts(module)
        self._parameters = [t for t in self._held if isinstance(t, Tensor)]
        self._places = self._layout()
        self._norms = [(m, name) for m in self._inside for name in EPSILONS if hasattr(m, name)]
        self._epsilons = [getattr(*norm) for norm in self._norms]

    def is_current(self, module: nn.Module) -> bool:
        """Return True if nothing in `module` was replaced, moved or hooked since."""
        held, modules = self._parts(module), (module, *self._inside)
        return (
            not any(m._forward_pre_hooks or m._forward_hooks or "forward" in m.__dict__ for m in modules)
            and len(held) == len(self._held)
            and all(map(is_, held, self._held))
            and self._layout() == self._places
            and [getattr(*norm) for norm in self._norms] == self._epsilons
            and [type(m) for m in modules] == self._classes
        )

    def _parts(self, module: nn.Module) -> list[Any]:
        owned: list[dict[str, Any]] = [d for m in (module, *self._inside) for d in (m._modules, m._parameters)]
        return [*chain.from_iterable([d.values() for d in owned])]

    def _layout(self) -> list[Any]:
        return [(t.data_ptr(), t.stride()) for t in self._parameters]


class Remembered(Generic[Answer]):
    """The answer for the last kind of call of the module that owns this object. It is neither copied nor saved."""

    def __init__(self) -> None:
        self._last: tuple[Any, Answer, Snapshot] | None = None  # one tuple, as threads may share a model

    def get(self, module: Any, key: Any) -> Answer | None:
        """Return the answer for calls with this key, or None if the key is new or the module has changed."""
        if self._last is None:
            return None
        known, answer, snapshot = self._last
        if not snapshot.is_current(module):
            self.forget()
            return None
        return answer if key == known else None

    def put(self, module: Any, key: Any, answer: Answer) -> None:
        """Remember an answer about `module`, which has no hooks and which the answer must not refer to."""
        self._last = key, answer, Snapshot(module)

    def forget(self) -> None:
        """Release the answer and its tensors."""
        self._last = None

    def __deepcopy__(self, memo: Any) -> Remembered[Answer]:
        return Remembered()

    def __reduce__(self) -> Any:
        return Remembered, ()
