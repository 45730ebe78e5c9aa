"""vLLM: our layers in place of those of its KDA models, and our operator in place of the Triton functions these call.

Nothing is imported and nothing changes before vLLM imports such a model. The functions serve a layer that ours leave to
vLLM. docs/guides/engines.md says what is served; `python -m tools.engine_calls` lists the calls of an unpacked wheel.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from kda_layers.engines import wanted
from kda_layers.engines.patching import after_import, announced, exists, replace, version

TESTED = "0.33.0"
# A child of the logger that vLLM configures.
logger = logging.getLogger("vllm.kda_layers")

KIMI = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
GLM = "vllm.models.glm5next.nvidia.ops.third_party.kda"
LING = "vllm.third_party.flash_linear_attention.ops.kda"

# The layers that run KDA, and the module whose functions each calls.
LAYERS = {
    "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn": KIMI,  # Kimi-Linear, AliceAI
    "vllm.models.kimi_k3.nvidia.kda": KIMI,
    "vllm.models.glm5next.common.kda": GLM,
    "vllm.model_executor.models.bailing_moe_v3": LING,
}
# Their functions, and ours of vllm_functions.
FUNCTIONS = {
    KIMI: {
        "chunk_kda_with_fused_gate": "chunk",
        "fused_recurrent_kda": "recurrent",
        "fused_recurrent_kda_packed_decode": "packed_decode",
    },
    GLM: {"chunk_kda_with_fused_gate": "chunk", "fused_recurrent_kda": "recurrent"},
    LING: {
        "chunk_kda": "chunk",
        "fused_recurrent_kda": "recurrent",
        "fused_recurrent_kda_fwd": "recurrent_forward",
    },
}


def register() -> None:
    """Entry point of vLLM's general plug-ins: replace layers and functions as they are imported, if KDA_LAYERS_ENGINES
    names vllm.

    Raises:
        RuntimeError: this vLLM has none of the layers that call them.
    """
    if not wanted("vllm"):
        return
    gone = [name for name in LAYERS if not exists(name)]
    if len(gone) == len(LAYERS):
        raise RuntimeError(
            f"KDA_LAYERS_ENGINES names vllm, but vLLM {version('vllm')} has none of {', '.join(LAYERS)}: use vLLM "
            f"{TESTED}, or leave the variable empty"
        )
    if version("vllm") != TESTED:
        logger.warning("kda_layers was written for vLLM %s; vLLM %s is not tested", TESTED, version("vllm"))
    for name in gone:
        logger.warning("kda_layers does not serve the models of %s, which vLLM %s lacks", name, version("vllm"))
    for name, module in LAYERS.items():
        after_import(name, _register if exists(module) else partial(_refuse, seam=module))
    for name in FUNCTIONS:
        after_import(name, _replace)


def _register(layer: ModuleType) -> None:
    from kda_layers.engines import vllm_layer

    vllm_layer.register(layer)


def _refuse(layer: ModuleType, seam: str) -> None:
    """Stop the import of a layer whose functions are not where we would replace them."""
    raise ImportError(
        f"kda_layers cannot serve {layer.__name__}: vLLM {version('vllm')} has no {seam}, whose functions it called in "
        f"vLLM {TESTED}: use that version, or leave KDA_LAYERS_ENGINES empty"
    )


def _explained(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with an error of its own for arguments that it does not have, as of another vLLM."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:  # raised by the function
                raise
            raise TypeError(
                f"kda_layers cannot serve this call of {name} by vLLM {version('vllm')}, {error}: use vLLM {TESTED}, "
                "or leave KDA_LAYERS_ENGINES empty"
            ) from error

    return call


def _replace(module: ModuleType) -> None:
    """Replace the functions of a module; it may be imported for others of its names, so what it lacks is no error."""
    from kda_layers.engines import vllm_functions

    replaced = []
    for name, ours in FUNCTIONS[module.__name__].items():
        if not hasattr(module, name):
            logger.warning(
                "kda_layers does not serve %s.%s, which vLLM %s lacks", module.__name__, name, version("vllm")
            )
            continue
        say = partial(logger.info, "kda_layers serves %s of %s", name, module.__name__)
        replace(module, name, announced(_explained(name, getattr(vllm_functions, ours)), say))
        replaced.append(name)
    logger.info("kda_layers replaces %s of %s", ", ".join(replaced) or "nothing", module.__name__)
