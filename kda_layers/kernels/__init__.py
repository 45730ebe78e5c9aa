"""Operators and their backends: a folder for each operator, and the modules that they share.

Kimi Delta Attention (`kda`), softmax attention with a bias (`attention_bias`), the short convolution and gated norm of
a layer (`short_conv`, `gated_norm`), its decode step between the projections (`layer_step`), the activation of an MLP
(`swiglu`), the norms of the residual stream (`add_rms_norm`), and linear layers of a decode step (`linear_step`). The
loss of language models (`linear_cross_entropy`) has no backends.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention_bias.op import biased_attention

__all__ = ["biased_attention"]


def __getattr__(name: str) -> Any:  # imported on first use: every module below imports this one first
    if name == "biased_attention":
        from .attention_bias.op import biased_attention

        return biased_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
