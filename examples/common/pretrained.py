"""Models that an example starts from: new ones, checkpoints, and checkpoints with swapped attention."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import kda_layers
from common.cli import InputError, first_line
from kda_layers.modeling.models import VARIANTS


def load_model(name: str, tensor_parallel: int = 1) -> PreTrainedModel:
    """Build a new model from a .json configuration, or load the checkpoint of that path or name.

    Args:
        tensor_parallel: processes that share its heads; only of a checkpoint.
    """
    if tensor_parallel > 1 and name.endswith(".json"):
        raise InputError(f"--tensor-parallel {tensor_parallel}: expected a checkpoint in --model, got {name}")
    shared = DistributedConfig(tp_size=tensor_parallel, tp_plan="auto") if tensor_parallel > 1 else None
    try:
        if name.endswith(".json"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
        return AutoModelForCausalLM.from_pretrained(name, distributed_config=shared)
    except Exception as error:  # damaged files fail in as many ways as there are parsers
        reason = first_line(error)
        raise InputError(f"--model {name}: expected a checkpoint or a .json configuration, got: {reason}") from error


def swap(model: PreTrainedModel, layers: str) -> PreTrainedModel:
    """Swap the attention of a model in place, or convert it; return the model or the new one."""
    indices = layers.replace(",", "").isdecimal()
    chosen: Any = [int(i) for i in layers.split(",") if i] if indices else layers
    try:
        if model.config.model_type in VARIANTS:
            return kda_layers.convert_attention(model, chosen)
        kda_layers.swap_attention(model, chosen)
    except (TypeError, ValueError) as error:
        raise InputError(f"--swap {layers}: {error}") from error
    return model
