"""Kimi Delta Attention for Hugging Face models: a layer, a model, and the operator with its backends."""

from kda_layers.kernels.dispatch import explain, use_backend
from kda_layers.kernels.op import KDAOutput, kda, kda_step
from kda_layers.modeling.configuration_kda import KDAConfig
from kda_layers.modeling.layer import KimiDeltaAttention
from kda_layers.modeling.modeling_kda import KDAForCausalLM, KDAModel

__version__ = "0.1.0"
__all__ = [
    "KDAConfig",
    "KDAForCausalLM",
    "KDAModel",
    "KDAOutput",
    "KimiDeltaAttention",
    "explain",
    "kda",
    "kda_step",
    "use_backend",
]
