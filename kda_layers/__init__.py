"""Kimi Delta Attention for Hugging Face models: a layer, a model, and the operator with its backends."""

import importlib
from typing import TYPE_CHECKING, Any

from kda_layers import versions

# For type checkers; _PUBLIC holds the same names at run time.
if TYPE_CHECKING:
    from kda_layers.kernels.attention_bias.op import biased_attention as biased_attention
    from kda_layers.kernels.kda.contract import KDAOutput as KDAOutput
    from kda_layers.kernels.kda.int8_state import dequantize_state as dequantize_state
    from kda_layers.kernels.kda.int8_state import quantize_state as quantize_state
    from kda_layers.kernels.kda.op import kda as kda
    from kda_layers.kernels.kda.op import kda_prefill as kda_prefill
    from kda_layers.kernels.kda.op import kda_step as kda_step
    from kda_layers.kernels.over_ranks.kda import kda_over_ranks as kda_over_ranks
    from kda_layers.kernels.over_ranks.shards import Shards as Shards
    from kda_layers.kernels.registry import keep_backend as keep_backend
    from kda_layers.kernels.registry import register_backend as register_backend
    from kda_layers.kernels.registry import use_backend as use_backend
    from kda_layers.modeling.checkpoints.fla_checkpoint import convert_fla_checkpoint as convert_fla_checkpoint
    from kda_layers.modeling.checkpoints.weights import export_kda_weights as export_kda_weights
    from kda_layers.modeling.checkpoints.weights import kda_layer_options as kda_layer_options
    from kda_layers.modeling.checkpoints.weights import load_kda_weights as load_kda_weights
    from kda_layers.modeling.cuda_graphs.training_step import CapturedStep as CapturedStep
    from kda_layers.modeling.explanation import explain as explain
    from kda_layers.modeling.layer.layer import KimiDeltaAttention as KimiDeltaAttention
    from kda_layers.modeling.models.configuration_kda import KDAConfig as KDAConfig
    from kda_layers.modeling.models.modeling_kda import KDAForCausalLM as KDAForCausalLM
    from kda_layers.modeling.models.modeling_kda import KDAModel as KDAModel
    from kda_layers.modeling.models.parameter_groups import parameter_groups as parameter_groups
    from kda_layers.modeling.parallel.context_parallel import enable_context_parallel as enable_context_parallel
    from kda_layers.modeling.serving.continuous_batching import enable_continuous_batching as enable_continuous_batching
    from kda_layers.modeling.swap.swap import enable_speculative_decoding as enable_speculative_decoding
    from kda_layers.modeling.swap.swap import load_pretrained as load_pretrained
    from kda_layers.modeling.swap.swap import restore_attention as restore_attention
    from kda_layers.modeling.swap.swap import swap_attention as swap_attention

__version__ = "0.1.0"

# The public names and their modules, imported on first use: transformers' modelling code takes a second.
_PUBLIC = {
    "CapturedStep": "modeling.cuda_graphs.training_step",
    "KDAConfig": "modeling.models.configuration_kda",
    "KDAForCausalLM": "modeling.models.modeling_kda",
    "KDAModel": "modeling.models.modeling_kda",
    "KDAOutput": "kernels.kda.contract",
    "KimiDeltaAttention": "modeling.layer.layer",
    "Shards": "kernels.over_ranks.shards",
    "biased_attention": "kernels.attention_bias.op",
    "convert_fla_checkpoint": "modeling.checkpoints.fla_checkpoint",
    "dequantize_state": "kernels.kda.int8_state",
    "enable_context_parallel": "modeling.parallel.context_parallel",
    "enable_continuous_batching": "modeling.serving.continuous_batching",
    "enable_speculative_decoding": "modeling.swap.swap",
    "explain": "modeling.explanation",
    "export_kda_weights": "modeling.checkpoints.weights",
    "kda": "kernels.kda.op",
    "kda_layer_options": "modeling.checkpoints.weights",
    "kda_over_ranks": "kernels.over_ranks.kda",
    "kda_prefill": "kernels.kda.op",
    "kda_step": "kernels.kda.op",
    "keep_backend": "kernels.registry",
    "load_kda_weights": "modeling.checkpoints.weights",
    "load_pretrained": "modeling.swap.swap",
    "parameter_groups": "modeling.models.parameter_groups",
    "quantize_state": "kernels.kda.int8_state",
    "register_backend": "kernels.registry",
    "restore_attention": "modeling.swap.swap",
    "swap_attention": "modeling.swap.swap",
    "use_backend": "kernels.registry",
}
__all__ = list(_PUBLIC)
_WITHOUT_TRANSFORMERS = ("KimiDeltaAttention", "explain")


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        if _PUBLIC[name].startswith("modeling.") and name not in _WITHOUT_TRANSFORMERS:
            versions.require_transformers(name)
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# The operator registers itself with torch, and configurations with transformers' AutoConfig.
importlib.import_module(f"{__name__}.{_PUBLIC['kda']}")
if versions.has_transformers():
    importlib.import_module(f"{__name__}.{_PUBLIC['KDAConfig']}")
    importlib.import_module(f"{__name__}.modeling.swap.families").register_configs()
versions.warn_if_untested()
