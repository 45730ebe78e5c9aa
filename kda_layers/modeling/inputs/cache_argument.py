"""The argument `cache` of models and layers, which transformers before 5.24 calls past_key_values or cache_params."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

OLD_NAMES = ("past_key_values", "cache_params")


def rename_cache(kwargs: dict[str, Any], name: str = "cache") -> dict[str, Any]:
    """Return keywords in which the cache has this name, whichever of its names it came by.

    Raises:
        TypeError: two different caches under two names.
    """
    given = [old for old in ("cache", *OLD_NAMES) if old in kwargs]
    if given == [name] or not given:
        return kwargs
    caches = {old: kwargs[old] for old in given if kwargs[old] is not None}
    first = next(iter(caches.values()), None)
    if any(other is not first for other in caches.values()):
        raise TypeError(f"{' and '.join(caches)} are names of one argument, got two caches: pass one of them")
    return {key: value for key, value in kwargs.items() if key not in given} | {name: first}


def takes_cache(forward: Callable[..., Any]) -> Any:
    """Decorate a function with an argument `cache`, so that it takes the argument by its old names too."""

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for old in OLD_NAMES:
            if old in kwargs:
                return forward(*args, **rename_cache(kwargs))
        return forward(*args, **kwargs)

    return wrapper
