"""Weights that accelerate loads when their module is called, for a forward that reads them without calling it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def loads_weights_of(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate the forward of a layer that reads weights of the submodules `names` itself.

    Accelerate loads offloaded weights in a hook of the module that owns them, `_hf_hook`, around its forward. The
    decorated forward runs these hooks around itself; without any it is called as it is. transformers has such a
    decorator, `force_accelerate_hooks`, which a Hub kernel cannot import.
    """

    def decorate(forward: Callable[..., Any]) -> Any:
        @functools.wraps(forward)
        def with_weights(layer: Any, *args: Any, **kwargs: Any) -> Any:
            hooked = [module for module in (getattr(layer, name) for name in names) if hasattr(module, "_hf_hook")]
            for module in hooked:
                module._hf_hook.pre_forward(module)
            output = forward(layer, *args, **kwargs)
            for module in reversed(hooked):
                module._hf_hook.post_forward(module, ())
            return output

        return with_weights

    return decorate
