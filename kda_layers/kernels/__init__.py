"""Operators and their backends: Kimi Delta Attention, and softmax attention with a bias (`biased_attention`)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention_bias.op import biased_attention

__all__ = ["biased_attention"]


def __getattr__(name: str) -> Any:  # on first use: every module below imports this one before itself
    if name == "biased_attention":
        from .attention_bias.op import biased_attention

        return biased_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
