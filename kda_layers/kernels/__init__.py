"""Operators and their backends, and the modules that they share.

A folder each for Kimi Delta Attention (`kda`), with the decode step of a layer between its projections
(`kda.cuda.layer_step`), and for softmax attention with a bias (`attention_bias`). Operators around a layer's core are
one file each in `fused`: the short convolution and gated norm of a layer, the activation of an MLP, the norms of the
residual stream, linear layers of a decode step, and the loss of language models.
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
