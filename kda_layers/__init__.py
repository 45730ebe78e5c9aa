"""Kimi Delta Attention for Hugging Face models: a layer, a model, and the operator with its backends."""

import importlib
from typing import TYPE_CHECKING, Any

from kda_layers import versions
from kda_layers.kernels.deprecation import warn_deprecated

# For type checkers; _PUBLIC holds the same names at run time.
if TYPE_CHECKING:
    from kda_layers.kernels.kda.contract import KDAOutput as KDAOutput
    from kda_layers.kernels.kda.drafts import kda_commit as kda_commit
    from kda_layers.kernels.kda.drafts import kda_verify as kda_verify
    from kda_layers.kernels.kda.op import kda as kda
    from kda_layers.kernels.kda.op import kda_prefill as kda_prefill
    from kda_layers.kernels.kda.op import kda_step as kda_step
    from kda_layers.kernels.registry import use_backend as use_backend
    from kda_layers.modeling.explanation import explain as explain
    from kda_layers.modeling.layer.layer import KimiDeltaAttention as KimiDeltaAttention
    from kda_layers.modeling.models.configuration_kda import KDAConfig as KDAConfig
    from kda_layers.modeling.models.modeling_kda import KDAForCausalLM as KDAForCausalLM
    from kda_layers.modeling.models.modeling_kda import KDAModel as KDAModel
    from kda_layers.modeling.swap.convert import convert_attention as convert_attention
    from kda_layers.modeling.swap.swap import load_pretrained as load_pretrained
    from kda_layers.modeling.swap.swap import restore_attention as restore_attention
    from kda_layers.modeling.swap.swap import swap_attention as swap_attention

__version__ = "0.1.0"

# The public names and their modules, imported on first use: transformers' modelling code takes a second.
_PUBLIC = {
    "KDAConfig": "modeling.models.configuration_kda",
    "KDAForCausalLM": "modeling.models.modeling_kda",
    "KDAModel": "modeling.models.modeling_kda",
    "KDAOutput": "kernels.kda.contract",
    "KimiDeltaAttention": "modeling.layer.layer",
    "convert_attention": "modeling.swap.convert",
    "explain": "modeling.explanation",
    "kda": "kernels.kda.op",
    "kda_commit": "kernels.kda.drafts",
    "kda_prefill": "kernels.kda.op",
    "kda_step": "kernels.kda.op",
    "kda_verify": "kernels.kda.drafts",
    "load_pretrained": "modeling.swap.swap",
    "restore_attention": "modeling.swap.swap",
    "swap_attention": "modeling.swap.swap",
    "use_backend": "kernels.registry",
}
_SUBMODULES = ("checkpoints", "kernels", "parallel", "serving", "states", "training")  # with further public names
__all__ = list(_PUBLIC)
_WITHOUT_TRANSFORMERS = ("KimiDeltaAttention", "explain")

# Names that were here in version 0.1 -> the submodules that have them; they work here for one release.
_MOVED = {
    "CapturedStep": "training",
    "Shards": "parallel",
    "biased_attention": "kernels",
    "convert_fla_checkpoint": "checkpoints",
    "dequantize_state": "states",
    "enable_context_parallel": "parallel",
    "enable_continuous_batching": "serving",
    "enable_speculative_decoding": "serving",
    "export_kda_weights": "checkpoints",
    "kda_layer_options": "checkpoints",
    "kda_over_ranks": "parallel",
    "keep_backend": "kernels",
    "load_kda_weights": "checkpoints",
    "parameter_groups": "training",
    "quantize_state": "states",
    "register_backend": "kernels",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        if _PUBLIC[name].startswith("modeling.") and name not in _WITHOUT_TRANSFORMERS:
            versions.require_transformers(name)
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _MOVED:
        warn_deprecated(f"{__name__}.{name}", f"{__name__}.{_MOVED[name]}.{name}")
        return getattr(importlib.import_module(f"{__name__}.{_MOVED[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES, *(name for name in globals() if name.startswith("_"))})


# The operators register themselves with torch, and configurations with transformers' AutoConfig.
for _name in ("kda", "kda_verify"):
    importlib.import_module(f"{__name__}.{_PUBLIC[_name]}")
if versions.has_transformers():
    importlib.import_module(f"{__name__}.{_PUBLIC['KDAConfig']}")
versions.warn_if_untested()
