"""Convert a softmax decoder of transformers into a model with KDA layers."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kda_layers.kernels.kda.contract import KDA
from kda_layers.modeling.checks import DEQUANTISE, check_not_sharded, is_quantised, layer_indices, unwrapped_hint
from kda_layers.modeling.models import VARIANTS
from kda_layers.modeling.models.configuration_kda import KDAFields
from kda_layers.modeling.models.configuration_variants import stock_layer_types
from kda_layers.modeling.models.variant import language_model
from kda_layers.modeling.swap import families

logger = logging.getLogger("kda_layers")


def convert_attention(
    model: PreTrainedModel,
    layers: Iterable[int] | str,
    *,
    backend: str | None = None,
    **config: Any,
) -> Any:
    """Return a new model with KDA in place of attention layers of a softmax decoder; `model` stays as it is.

    The new model has copies of all weights of the other layers and of the MLPs, norms and embeddings. Its KDA layers
    start from the softmax layers' projections (see `carried_projections`), without RoPE, and with the gates,
    convolutions and norms of any new KDA layer. It needs training: distil it from `model`. A model with KDA layers is
    not converted: `swap_attention` changes it in place.

    Args:
        model: a ...ForCausalLM of Llama, Qwen2, Qwen3 or Mistral itself, not of a subclass, on one device.
        layers: indices of layers (negative: from the end), "all", or "a:b" for a repeated pattern of a KDA layers and
            then b layers that stay.
        backend: name of a kernel backend for the new layers; None chooses (see `kda_layers.explain`). Not saved.
        **config: linear_... fields of the new configuration, see `configuration_kda.KDAFields`.

    Returns:
        The family's KDA...ForCausalLM, on the device, in the dtypes (A_log and dt_bias: fp32) and in the mode of
        `model`.

    Raises:
        TypeError: model is not a PreTrainedModel but, for instance, a wrapper of one (PEFT, torch.compile); layers of a
            wrong type; a keyword that is not a linear_... field.
        ValueError: another class of model; layers that do not exist, are given twice or have a sliding window;
            a pattern that leaves no softmax layer; projections with biases or of another size than the KDA layers'; a
            model whose weights are elsewhere (offloaded, on the meta device) or not those of a plain model (adapters,
            quantised, sharded); an unknown backend.
    """
    variant = _variant_of(model)
    check_backend(backend, KDA.backends())
    _check_plain(model)
    chosen = chosen_layers(layers, model.config.num_hidden_layers)
    new_config = _variant_config(variant.config_class, model.config, chosen, config)
    with torch.device("meta"):  # nothing is allocated twice
        new = variant._from_config(new_config, dtype=model.dtype, attn_implementation=model.config._attn_implementation)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    biases: set[str] = set()
    for i in chosen:
        attention = new.model.layers[i].self_attn.to_empty(device=model.device)
        attention.apply(new._init_weights)
        attention.kda_options["backend"] = backend
        path = f"model.layers.{i}.self_attn."
        old = {name.removeprefix(path): weights.pop(name) for name in list(weights) if name.startswith(path)}
        carried = carried_projections(old, new_config)
        biases |= {name for name in old if name.endswith(".bias")}
        weights |= {path + name: tensor for name, tensor in (attention.state_dict() | carried).items()}
    if biases:
        logger.warning(
            "%s of the %d converted layers of %s are dropped: the projections of KDA layers have no biases",
            ", ".join(sorted(biases)), len(chosen), type(model).__name__,
        )  # fmt: skip
    new.load_state_dict(weights, assign=True)
    new.tie_weights()
    new.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # its buffers are in no state dict
    new.generation_config = copy.deepcopy(model.generation_config)
    return new.train(model.training)


def carried_projections(old: dict[str, Tensor], config: PreTrainedConfig) -> dict[str, Tensor]:
    """Return a KDA layer's projections from a softmax layer with Hq query and Hkv key / value heads of width d.

    There are as many value heads as query heads. Value head i takes the v of its group, the key / value head
    i // (Hq // Hkv), so that o_proj stays as it is. It reads q / k head i // (Hq // H) in KDA; each of these takes
    the mean of the query heads that it stands for, and the k of their group. The default is H = Hq, where nothing is
    averaged: after the same distillation its divergence from the original was an eighth smaller than with H = Hkv.

    KDA normalises q and k, so the weights of Qwen3's q and k norms are folded into the projections. Biases of Qwen2 are
    dropped: a KDA layer's projections, which its short convolution follows, have none.

    Args:
        old: weights of the softmax layer by name: q_proj.weight [Hq d, D], k_proj.weight and v_proj.weight [Hkv d, D],
            o_proj.weight [D, Hq d], and q_norm.weight, k_norm.weight [d] if it has them.
        config: with linear_num_heads H, a multiple of Hkv that divides Hq.

    Returns:
        {name: weight}: q_proj, k_proj [H d, D], v_proj [Hq d, D], o_proj [D, Hq d].
    """
    d, H, HV = config.head_dim, config.linear_num_heads, config.num_attention_heads
    q, k, v = (old[f"{name}_proj.weight"].unflatten(0, (-1, d)) for name in "qkv")
    if "q_norm.weight" in old:
        q, k = q * old["q_norm.weight"][:, None], k * old["k_norm.weight"][:, None]
    q = q.unflatten(0, (H, HV // H)).mean(1)
    k, v = k.repeat_interleave(H // k.shape[0], 0), v.repeat_interleave(HV // v.shape[0], 0)
    projections = {f"{name}_proj.weight": weight.flatten(0, 1) for name, weight in zip("qkv", (q, k, v), strict=True)}
    return projections | {"o_proj.weight": old["o_proj.weight"]}


def chosen_layers(layers: Iterable[int] | str, total: int) -> list[int]:
    """Return ascending indices in [0, total) from the forms that `convert_attention` accepts; raise as it does."""
    if isinstance(layers, str) and layers == "all":
        return list(range(total))
    if not isinstance(layers, str) or not (pattern := re.fullmatch(r"([1-9]\d*):([1-9]\d*)", layers)):
        forms = 'indices, "all", or "a:b" with a layers of KDA, then b that stay'
        return sorted(layer_indices(layers, total, forms))
    a, b = map(int, pattern.groups())
    if a >= total:
        raise ValueError(
            f'layers must leave a softmax layer where it is a pattern, got "{layers}" for a model of {total} layers: '
            'write "all" to convert every layer'
        )
    return [i for i in range(total) if i % (a + b) < a]


def check_model(model: Any) -> None:
    """Raise a TypeError unless `model` is a PreTrainedModel of transformers."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers PreTrainedModel, got {type(model).__name__}{unwrapped_hint(model)}"
        )


def check_backend(backend: str | None, known: Iterable[str]) -> None:
    """Raise a ValueError unless `backend` is None or a known name."""
    if backend is not None and backend not in known:
        raise ValueError(f"backend must be one of {', '.join(known)}, got {backend!r}")


def unsupported(what: str, kind: str) -> ValueError:
    """Return the error for a model_type that the caller, `swap_attention` or `convert_attention`, does not take."""
    hint = " (its KDA layers are of this package already)" if kind.startswith("kda") else ""
    return ValueError(
        f"{what} must be of a supported family (swap_attention, in place: {', '.join(families.IN_PLACE)}; "
        f"convert_attention: {', '.join(VARIANTS)}), got model_type {kind!r}{hint}"
    )


def _variant_of(model: Any) -> Any:
    """Return the language model with KDA layers that `model` is converted to; raise as `convert_attention` does."""
    check_model(model)
    kind = model.config.model_type
    if kind not in VARIANTS:
        raise unsupported(type(model).__name__, kind)
    variant = language_model(kind)
    if type(model) is not variant.stock_class:
        raise ValueError(
            f"model must be a {variant.stock_class.__name__} to be converted, got a {type(model).__name__}"
        )
    return variant


def _check_plain(model: PreTrainedModel) -> None:
    """Raise a ValueError unless the weights are in memory, on one device, and those of the class."""
    name = type(model).__name__
    if any(p.is_meta for p in model.parameters()) or any(hasattr(m, "_hf_hook") for m in model.modules()):
        raise ValueError(
            f"model must have all its weights on one device, got a {name} on the meta device or dispatched by "
            "accelerate: load it without device_map and offloading, and move what is returned"
        )
    check_not_sharded("model", model, "load it without distributed_config, convert and save it, and load that sharded")
    for path, p in model.named_parameters():
        if is_quantised(p):
            raise ValueError(f"model must have weights that are numbers, got {p.dtype} at {path}: {DEQUANTISE}")
    with torch.device("meta"):
        plain = type(model)(copy.deepcopy(model.config)).state_dict().keys()
    if differences := sorted(plain ^ model.state_dict().keys()):
        raise ValueError(
            f"model must have the weights of a plain {name}, got differences in {', '.join(differences[:4])}"
            f"{', ...' if differences[4:] else ''}: merge adapters and load without quantisation first"
        )
    if model.config.to_dict().get("attention_bias"):
        raise ValueError("config.attention_bias must be False: the projections of KDA layers have no biases, got True")


def _variant_config(
    config_class: Any, stock: PreTrainedConfig, chosen: list[int], fields_given: dict[str, Any]
) -> PreTrainedConfig:
    """Return the configuration of the converted model, checked against what is carried over."""
    known = [f.name for f in fields(KDAFields) if f.name.startswith("linear_")]
    if unknown := sorted(fields_given.keys() - set(known)):
        raise TypeError(f"config keywords must be among {', '.join(known)}, got {', '.join(unknown)}")
    layer_types = list(stock_layer_types(stock))
    if sliding := [i for i in chosen if layer_types[i] == "sliding_attention"]:
        raise ValueError(
            f"layers must have no sliding window, got {sliding}, with one of {stock.sliding_window} tokens: KDA has no "
            "window, its state reaches back to the first token. Leave these layers out, or load the model without "
            "the window (sliding_window=None; for Qwen3 use_sliding_window=False and layer_types=None)"
        )
    for i in chosen:
        layer_types[i] = "linear_attention"
    own = ("architectures", "layer_types", "transformers_version")
    names = [f.name for f in fields(config_class) if f.name not in own and hasattr(stock, f.name)]
    inherited = {name: copy.deepcopy(getattr(stock, name)) for name in names}
    try:
        config = config_class(**inherited, layer_types=layer_types, **fields_given)
    except StrictDataclassError as error:  # its cause names the field
        raise type(error.__cause__)(str(error.__cause__)) from error
    if stock.name_or_path and not Path(stock.name_or_path).exists():  # a local path means nothing elsewhere
        config.converted_from = stock.name_or_path
    heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    wanted = dict(linear_head_dim=d, linear_value_head_dim=d, linear_num_value_heads=heads)
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} must be {value}, as projections are carried over, got {getattr(config, name)}")
    H = config.linear_num_heads
    if H % groups or heads % H:
        raise ValueError(
            f"linear_num_heads must be a multiple of num_key_value_heads = {groups} that divides num_attention_heads "
            f"= {heads}, got {H}"
        )
    return config
