"""Operators and their backends, and the modules that they share.

A folder each for Kimi Delta Attention (`kda`), with the decode step of a layer between its projections
(`kda.cuda.layer_step`), and for softmax attention with a bias (`attention_bias`). Operators around a layer's core are
one file each in `fused`: the short convolution and gated norm of a layer, the activation of an MLP, the norms of the
residual stream, linear layers of a decode step, and the loss of language models.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention_bias.op import biased_attention as biased_attention
    from .registry import keep_backend as keep_backend
    from .registry import register_backend as register_backend

_PUBLIC = {"biased_attention": "attention_bias.op", "keep_backend": "registry", "register_backend": "registry"}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:  # imported on first use: every module below imports this one first
    if name in _PUBLIC:
        value = globals()[name] = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
