"""SGLang: our operator as its Triton kernel of KDA, which every KDA model takes unless it is told otherwise.

SGLang logs exceptions of plug-ins and goes on without them, so errors leave as SystemExit. Its HookRegistry could
replace the class, too, but imports the class's module for every model, and only logs that a hook fails.
"""

from __future__ import annotations

import logging
from types import ModuleType

from kda_layers.engines import wanted
from kda_layers.engines.patching import after_import, exists, replace, version

TESTED = "0.5.23"
MODULE = "sglang.srt.layers.attention.linear.kernels.kda_triton"
CLASS = "TritonKDAKernel"
# SGLang configures the root logger; a name of its own package also follows a configuration that the user gives it.
logger = logging.getLogger("sglang.kda_layers")


def register() -> None:
    """Entry point of SGLang's plug-ins: replace the kernel's class as it is imported, if KDA_LAYERS_ENGINES names
    sglang.

    Raises:
        SystemExit: this SGLang has no module of that class, or KDA_LAYERS_ENGINES is wrong.
    """
    try:
        if not wanted("sglang"):
            return
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if not exists(MODULE):
        raise SystemExit(_gone(MODULE))
    if version("sglang") != TESTED:
        logger.warning("kda_layers was written for SGLang %s; SGLang %s is not tested", TESTED, version("sglang"))
    after_import(MODULE, _replace)


def _replace(module: ModuleType) -> None:
    """Replace the class; SGLang imports its module for KDA models alone, and stops if that raises."""
    from kda_layers.engines.sglang_kernel import kernel

    stock = getattr(module, CLASS, None)
    if stock is None:
        raise ImportError(_gone(f"{MODULE}.{CLASS}"))
    replace(module, CLASS, kernel(stock))
    logger.info("kda_layers replaces %s of %s", CLASS, MODULE)


def _gone(seam: str) -> str:
    return (
        f"KDA_LAYERS_ENGINES names sglang, but SGLang {version('sglang')} has no {seam}: use SGLang {TESTED}, or leave "
        "the variable empty"
    )
