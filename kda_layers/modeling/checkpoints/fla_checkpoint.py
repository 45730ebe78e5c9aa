"""Convert KDAForCausalLM checkpoints of flash-linear-attention, which need not be installed, to our KDAForCausalLM."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kda_layers.modeling.checkpoints.weights import check_values, differences, open_weights, read_json
from kda_layers.modeling.layer.checkpoint_names import FLA
from kda_layers.modeling.models.configuration_kda import KDAConfig
from kda_layers.modeling.models.modeling_kda import KDAForCausalLM

# Defaults of its KDAConfig (0.6.0) that shape the model.
DEFAULTS: dict[str, Any] = dict(
    hidden_size=2048, expand_v=1.0, use_short_conv=True, allow_neg_eigval=False, safe_gate=False, lower_bound=None,
    conv_size=4, conv_bias=False, head_dim=128, num_heads=16, num_v_heads=None, hidden_ratio=4,
    intermediate_size=None, hidden_act="swish", num_hidden_layers=24, norm_eps=1e-6, attn=None,
    attnres_block_size=None, vocab_size=32000,
)  # fmt: skip
# Options with the same name and meaning; the others of ours keep their defaults.
SAME = (
    "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "use_cache", "initializer_range",
    "max_position_embeddings", "vocab_size", "hidden_size", "num_hidden_layers",
)  # fmt: skip
RENAMED = {"embed_tokens": "embeddings", "input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
KEPT_IN_FP32 = (".A_log", ".dt_bias")
SUPPORTED = {  # the only value for which the two models compute the same, and why
    "use_short_conv": (True, "a KDA layer here always has its short convolution"),
    "conv_bias": (False, "the short convolution has no bias here"),
    "hidden_act": ("swish", "the MLP is gated by swish here"),
    "attn": (None, "softmax layers have rotary position encoding there and none here"),
    "attnres_block_size": (None, "residuals are added here, not attended to"),
}


def convert_fla_checkpoint(
    source: Mapping[str, Tensor] | str | PathLike, config: Mapping[str, Any] | None = None
) -> KDAForCausalLM:
    """Convert a checkpoint of flash-linear-attention's `fla.models.KDAForCausalLM` into our model.

    Args:
        source: a checkpoint folder with config.json and safetensors, or the model's state dict.
        config: contents of config.json, as flash-linear-attention's `KDAConfig.to_dict()` gives them; needed with a
            state dict, and replaces the folder's own.

    Returns:
        The model, which computes the same, in eval mode on the CPU, in the widest dtype among the weights; A_log and
        dt_bias are fp32. Its `save_pretrained` writes a checkpoint of this package.

    Raises:
        FileNotFoundError: no such folder, or no config.json or safetensors in it.
        TypeError: a state dict without config, or tensors that are not floating-point.
        ValueError: a config.json that is not a JSON object; a config of another model_type, with an option that our
            model does not have or with a number out of range; tensors missing, unexpected or of a wrong shape.
        StrictDataclassError: a value that our KDAConfig refuses, such as a lower_bound below -5; names the field.

    Source: the layouts of flash-linear-attention 0.6.0, fla/models/kda and fla/layers/kda.py.
    """
    config = _read_config(source) if config is None else config
    our_config = kda_config_from_fla(config)
    tensors = dict(open_weights(source))
    check_values(tensors)
    dtypes = {t.dtype for name, t in tensors.items() if not name.endswith(KEPT_IN_FP32)} or {torch.float32}
    model = AutoModelForCausalLM.from_config(our_config, dtype=functools.reduce(torch.promote_types, dtypes))
    _copy(tensors, model)
    return model.eval()


def kda_config_from_fla(config: Mapping[str, Any]) -> KDAConfig:
    """Return our configuration of the model that flash-linear-attention's configuration describes.

    Raises:
        ValueError: another model_type; an option that our model does not have, or a number out of range; names it.
    """
    if config.get("model_type", "kda") != "kda":
        raise ValueError(f"config must be of model_type 'kda', flash-linear-attention's, got {config['model_type']!r}")
    fla = DEFAULTS | dict(config)
    if fla["hidden_ratio"] is None:
        fla["hidden_ratio"] = DEFAULTS["hidden_ratio"]
    for name, default in DEFAULTS.items():
        number = type(default) in (int, float)
        if number and not (isinstance(fla[name], int | float) and 0 <= fla[name] < math.inf):
            raise ValueError(f"{name} must be a finite number of at least 0, got {fla[name]!r}")
    for name, (supported, why) in SUPPORTED.items():
        if fla[name] != supported:
            raise ValueError(f"{name} must be {supported!r}, got {fla[name]!r}: {why}")
    if fla["safe_gate"] and fla["lower_bound"] is None:
        raise ValueError("lower_bound must be given with safe_gate, got None")
    head_v_dim = fla["head_dim"] * fla["expand_v"]
    if not math.isclose(head_v_dim, round(head_v_dim), rel_tol=1e-5):
        raise ValueError(f"expand_v must give an integer for head_dim = {fla['head_dim']}, got {fla['expand_v']}")
    mlp_width = int(fla["hidden_size"] * fla["hidden_ratio"] * 2 / 3)
    fields = dict(
        intermediate_size=fla["intermediate_size"] or -(-mlp_width // 256) * 256,
        linear_num_heads=fla["num_heads"],
        linear_num_value_heads=fla["num_v_heads"],
        linear_head_dim=fla["head_dim"],
        linear_value_head_dim=round(head_v_dim),
        linear_conv_kernel_dim=fla["conv_size"],
        linear_gate_activation="softplus" if fla["lower_bound"] is None else "lower_bound",
        linear_lower_bound=fla["lower_bound"],
        linear_allow_neg_eigval=fla["allow_neg_eigval"],
        linear_output_gate_bias=True,
        rms_norm_eps=fla["norm_eps"],
    )
    return KDAConfig(**fields, **{name: fla[name] for name in SAME if name in fla})


def _read_config(source: Any) -> Mapping[str, Any]:
    if not isinstance(source, str | PathLike):
        raise TypeError(f"config must be given with a state dict, got None and source as {type(source).__name__}")
    path = Path(source) / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"source must be a checkpoint folder with a config.json, got {source}, which has none")
    return read_json(path)


@torch.no_grad()
def _copy(tensors: dict[str, Tensor], model: Any) -> None:
    """Copy the tensors into the parameters, or raise a ValueError that names those without a counterpart."""
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".self_attn." not in name:
            views[".".join(RENAMED.get(part, part) for part in name.split("."))] = parameter
    for i, layer in enumerate(model.model.layers):
        views |= {f"model.layers.{i}.attn.{n}": v for n, v in FLA.naming().views(layer.self_attn).items()}
    if model.config.tie_word_embeddings:  # the head is not a parameter, but a state dict names it
        head = tensors.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, tensors.get("model.embeddings.weight", head)):
            raise ValueError(
                "lm_head.weight must equal model.embeddings.weight with tie_word_embeddings, got another tensor"
            )
    wrong = differences(tensors, views)
    if wrong:
        raise ValueError(f"source must hold the weights that its config describes, got {wrong}")
    for name, view in views.items():
        view.copy_(tensors[name])
