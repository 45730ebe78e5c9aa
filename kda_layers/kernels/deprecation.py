"""Names and keywords of version 0.1, which work for one release with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch

# Old keywords of public functions and classes, and their names now.
OLD_KEYWORDS = {
    "kda": {"final_state": "return_final_state"},  # also of kda_over_ranks
    "KimiDeltaAttention": {
        "num_v_heads": "num_value_heads",
        "head_v_dim": "value_head_dim",
        "conv_size": "conv_kernel_dim",
        "norm_eps": "rms_norm_eps",
    },
}
# Packages between a call and the warning about it: this one, and those whose code runs while it is imported or called.
BETWEEN = (__name__.partition(".")[0], "importlib", "huggingface_hub", "transformers")


def warn_deprecated(old: str, new: str) -> None:
    """Warn that `new` takes the place of `old`, at the line of the caller outside of this package."""
    if torch.compiler.is_compiling():
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame = frame.f_back
    warnings.warn_explicit(
        f"{old} is deprecated: use {new}. The old name works for one more release of kda_layers",
        DeprecationWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def new_keywords(function: str, old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments `old` of a function of `OLD_KEYWORDS` under their new names, with a warning for each."""
    names = OLD_KEYWORDS[function]
    for name in old:
        warn_deprecated(f"{name} of {function}", names[name])
    return {names[name]: value for name, value in old.items()}


def renamed_attribute(new: str) -> Any:
    """Return a property of a class that reads its attribute `new` under an old name, with a warning."""

    class Renamed:
        def __set_name__(self, owner: type, name: str) -> None:
            self.old = f"{owner.__name__}.{name}"

        def __get__(self, instance: Any, owner: type) -> Any:
            if instance is None:
                return self
            warn_deprecated(self.old, new)
            return getattr(instance, new)

    return Renamed()


def recompute_words(recompute: Any, memory_share: float | None, warn: bool = True) -> tuple[Any, float | None]:
    """Return both arguments of `kda` for a `recompute` of version 0.1 (True, False or a share), others as they are."""
    if isinstance(recompute, bool):
        word, share = "always" if recompute else "never", memory_share
        new = f"recompute={word!r}"
    elif isinstance(recompute, float) and 0 < recompute < 1 and memory_share is None:
        word, share, new = "auto", recompute, f"memory_share={recompute}"
    else:
        return recompute, memory_share
    if warn:
        warn_deprecated(f"recompute={recompute}", new)
    return word, share
