"""Kimi Delta Attention for Hugging Face models: a layer, a model, and the operator with its backends."""

import importlib
from typing import TYPE_CHECKING, Any

import transformers
from packaging.version import Version

if Version(transformers.__version__).release < (5, 17):
    raise ImportError(f"kda_layers needs transformers 5.17 or newer, got {transformers.__version__}")

from kda_layers.kernels.kda.contract import KDAOutput
from kda_layers.kernels.kda.op import kda, kda_step
from kda_layers.kernels.registry import explain, keep_backend, use_backend
from kda_layers.modeling.auto import register_variants
from kda_layers.modeling.configuration_kda import KDAConfig

if TYPE_CHECKING:
    from kda_layers.kernels.attention_bias.op import biased_attention
    from kda_layers.modeling.fla_checkpoint import convert_fla_checkpoint
    from kda_layers.modeling.layer import KimiDeltaAttention
    from kda_layers.modeling.modeling_kda import KDAForCausalLM, KDAModel
    from kda_layers.modeling.swap import (
        enable_speculative_decoding,
        load_pretrained,
        restore_attention,
        swap_attention,
    )
    from kda_layers.modeling.weights import export_kda_weights, kda_layer_options, load_kda_weights

__version__ = "0.1.0"
__all__ = [
    "KDAConfig",
    "KDAForCausalLM",
    "KDAModel",
    "KDAOutput",
    "KimiDeltaAttention",
    "biased_attention",
    "convert_fla_checkpoint",
    "enable_speculative_decoding",
    "explain",
    "export_kda_weights",
    "kda",
    "kda_layer_options",
    "kda_step",
    "keep_backend",
    "load_kda_weights",
    "load_pretrained",
    "restore_attention",
    "swap_attention",
    "use_backend",
]

register_variants()

# What needs transformers' modelling code, which takes a second to import, is imported when it is first used; and so is
# what only hybrid models need.
_LAZY = {
    "biased_attention": "kda_layers.kernels.attention_bias.op",
    "KDAForCausalLM": "kda_layers.modeling.modeling_kda",
    "KDAModel": "kda_layers.modeling.modeling_kda",
    "KimiDeltaAttention": "kda_layers.modeling.layer",
    "convert_fla_checkpoint": "kda_layers.modeling.fla_checkpoint",
    "export_kda_weights": "kda_layers.modeling.weights",
    "kda_layer_options": "kda_layers.modeling.weights",
    "load_kda_weights": "kda_layers.modeling.weights",
    "enable_speculative_decoding": "kda_layers.modeling.swap",
    "load_pretrained": "kda_layers.modeling.swap",
    "restore_attention": "kda_layers.modeling.swap",
    "swap_attention": "kda_layers.modeling.swap",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
