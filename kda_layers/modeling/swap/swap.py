"""Swap attention in transformers models: run their layers on our forward, in place."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import MethodType
from typing import Any

import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from kda_layers.kernels.deprecation import recompute_words, warn_deprecated
from kda_layers.kernels.kda.checks import check_recompute
from kda_layers.modeling.checks import check_not_sharded, check_numbers, layer_indices
from kda_layers.modeling.models import VARIANTS
from kda_layers.modeling.swap import families
from kda_layers.modeling.swap.convert import check_backend, check_model, convert_attention, unsupported
from kda_layers.modeling.swap.in_place import KDAFamily, StockFamily
from kda_layers.modeling.swap.loop import add_loop, remove_loop
from kda_layers.modeling.swap.saved_names import accept_saved_names, refuse_saved_names

logger = logging.getLogger("kda_layers")


class ChangedPaths(list[str]):
    """Module paths that were changed in place. Used as a model, the list says where the model is."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up by copy and pickle
            raise AttributeError(name)
        raise AttributeError(f"no attribute {name}: {IN_PLACE}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"a list cannot be called: {IN_PLACE}")


IN_PLACE = (
    "swap_attention changed the layers of this model in place and returned their paths. Go on with the model itself, "
    "swap_attention(model), not model = swap_attention(model)"
)


def swap_attention(
    model: PreTrainedModel,
    layers: Iterable[int] | str | None = None,
    *,
    backend: str | None = None,
    recompute: str = "auto",
    memory_share: float | None = None,
    **config: Any,
) -> list[str]:
    """Run layers of a transformers model by our forward, in place.

    KDA layers (Kimi-Linear, GLM-5.3-Flash, Ling / Ring), gated delta nets (Qwen3-Next, Qwen3.5, Qwen4, OLMo Hybrid) or
    biased softmax attention (Doge) compute with our forward over the same parameters, so checkpoints, parameter names
    and optimizers stay. The class of a model with linear attention becomes a subclass of the same name, whose
    `generate` has its loop on the device. `restore_attention` undoes all of it. For a softmax decoder (Llama, Qwen2,
    Qwen3, Mistral) see `convert_attention`.

    Args:
        model: the transformers model.
        layers: indices of decoder layers; None means all that can be swapped.
        backend: name of a kernel backend for these layers; None chooses (see `kda_layers.explain`).
        recompute, memory_share: for KDA layers and gated delta nets, as in `KimiDeltaAttention`.
        **config: deprecated, as is a softmax decoder for model: call `convert_attention`, which takes both.

    Returns:
        The module paths that were changed.

    Raises:
        TypeError: model is not a PreTrainedModel but, for instance, a wrapper of one (PEFT, torch.compile); layers that
            are neither text nor integers; an unexpected keyword.
        ValueError: a model class that is not supported; layers that do not exist, are not of the right kind or are
            swapped already; a gate, convolution, bias, window or dropout that layers here do not have; weights sharded
            by tensor parallelism; an unknown backend; a bad recompute or memory_share, or one for layers without it
            (Doge). The model is unchanged then.
    """
    check_model(model)
    if model.config.model_type in VARIANTS:
        warn_deprecated(f"swap_attention of a {type(model).__name__}", "kda_layers.convert_attention")
        given = dict(linear_recompute=recompute, linear_memory_share=memory_share)
        given = {name: value for name, value in given.items() if value not in ("auto", None)}
        if twice := given.keys() & config.keys():
            raise TypeError(f"{', '.join(sorted(twice))} must be left out beside recompute and memory_share, the same")
        return convert_attention(model, layers, backend=backend, **given, **config)
    recompute, memory_share = recompute_words(recompute, memory_share)
    check_recompute(recompute, memory_share)
    family = _stock_family(model)
    check_backend(backend, family.operator.backends())
    if (recompute, memory_share) != ("auto", None) and not family.recomputes:
        raise ValueError(
            f"recompute must be 'auto' and memory_share None for a {type(model).__name__}, without KDA layers, got "
            f"{recompute!r} and {memory_share}"
        )
    if config:
        raise TypeError(f"{type(model).__name__} keeps its layers' shapes: unexpected {sorted(config)}")
    chosen = _chosen_layers(model, family, layers)
    for path, layer in chosen.items():
        try:
            family.check(layer)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        check_numbers(path, layer)
        check_not_sharded(path, layer, _hint_of_plan(model, path, layer))
        if "forward" in layer.__dict__ and "_old_forward" not in layer.__dict__:
            raise ValueError(f"{path}: forward must be the class's own, but something has replaced it on the instance")
    family.warn(model, list(chosen.values()))
    for path, layer in chosen.items():
        options = dict(recompute=recompute, memory_share=memory_share)
        vars(layer).update(family.attributes(model, path, layer, backend, **options))
        _set_class(layer, family.layer)
    if isinstance(family, KDAFamily):
        add_loop(model)
    for base in _base_models(model, family):
        if family.prepare_call not in base._forward_pre_hooks.values():
            base.register_forward_pre_hook(family.prepare_call, with_kwargs=True)
    accept_saved_names(model)
    return ChangedPaths(chosen)


def restore_attention(model: PreTrainedModel) -> list[str]:
    """Undo `swap_attention` on a model that it changed in place, and `enable_speculative_decoding`.

    Returns:
        The module paths that were changed back.

    Raises:
        TypeError: model is not a PreTrainedModel.
        ValueError: no layer is swapped; a converted softmax decoder, whose original was never changed.
    """
    check_model(model)
    family = _stock_family(model)
    swapped = {path: m for path, m in model.named_modules() if type(m) is family.layer}
    if not swapped:
        raise ValueError(f"{type(model).__name__} must have swapped layers to restore, got none")
    for path, layer in swapped.items():
        _set_class(layer, family.stock_layer)
        attributes = family.attributes(model, path, layer, None, recompute="auto", memory_share=None)
        for name in (*attributes, "_gradient_checkpointing_func"):
            vars(layer).pop(name, None)
    for base in _base_models(model, family):
        for key, hook in list(base._forward_pre_hooks.items()):
            if hook is family.prepare_call:
                del base._forward_pre_hooks[key]
                base._forward_pre_hooks_with_kwargs.pop(key, None)
    refuse_saved_names(model)
    remove_loop(model)
    for name in ("_is_stateful", "_get_candidate_generator"):
        model.__dict__.pop(name, None)
    return list(swapped)


def enable_speculative_decoding(model: PreTrainedModel) -> None:
    """Let a swapped model's `generate` draft tokens: by prompt lookup, or by an assistant model (`assistant_model=`).

    The tokens are those of greedy decoding: our layers take rejected drafts back exactly. transformers refuses to draft
    with KDA layers, because its own cannot. Models of this package and Doge need no call.

    Raises:
        TypeError: model is not a PreTrainedModel.
        ValueError: a KDA layer of the model is not swapped.
    """
    check_model(model)
    family = _stock_family(model)
    if not model._is_stateful:
        return
    stock = [path for path, m in model.named_modules() if type(m) is family.stock_layer]
    if stock:
        raise ValueError(
            f"every {family.noun} of {type(model).__name__} must be swapped before (kda_layers.swap_attention), "
            f"got stock layers at {', '.join(stock)}: they cannot take tokens back"
        )
    model._is_stateful = False
    model._get_candidate_generator = MethodType(_get_candidate_generator, model)


# Under the name of transformers' method, by which pickle finds one.
def _get_candidate_generator(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
    if generation_config.use_mtp:
        raise ValueError(
            f"use_mtp must be unset for a {type(self).__name__}, got True: transformers has no multi-token prediction "
            "for models with linear attention. Draft by prompt_lookup_num_tokens= or assistant_model="
        )
    return type(self)._get_candidate_generator(self, generation_config, *args, **kwargs)


def load_pretrained(
    path: Any,
    *,
    backend: str | None = None,
    recompute: str = "auto",
    memory_share: float | None = None,
    **kwargs: Any,
) -> Any:
    """Load a model that `swap_attention` changes in place, and swap it; A_log and dt_bias stay in fp32.

    transformers rounds these two of a Kimi-Linear to the dtype that the model is loaded in.

    Args:
        path: checkpoint folder or Hub name; also of PEFT adapters, whose base model is then loaded with them.
        backend, recompute, memory_share: as in `swap_attention`.
        **kwargs: arguments of `AutoModelForCausalLM.from_pretrained` (dtype, device_map, revision, subfolder, ...) and
            fields of the configuration (use_cache, ...). trust_remote_code is ignored with a warning: the layers that
            are swapped are those of transformers' own classes.

    Returns:
        The model, of the class of transformers that the configuration names in architectures; if it names none, of the
        language model of its type; as `swap_attention` leaves it. With output_loading_info=True also the dict that
        from_pretrained returns then.

    Raises:
        ValueError: a checkpoint of an unsupported family; what `swap_attention` raises.
    """
    if kwargs.pop("trust_remote_code", None):
        logger.warning("trust_remote_code=True is ignored: the layers of transformers' own classes are swapped")
    loaded = _AutoStockModel.from_pretrained(path, trust_remote_code=False, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    swap_attention(model, backend=backend, recompute=recompute, memory_share=memory_share)
    return loaded


class _StockModel:
    """The class of transformers that a configuration describes, made to keep what its family keeps in fp32."""

    @staticmethod
    def from_pretrained(path: Any, *, config: Any, **kwargs: Any) -> Any:
        family = _family(config.model_type, str(path))
        stock = _stock_class(config)
        strict = list(stock._keep_in_fp32_modules_strict or [])
        # transformers looks up how checkpoints are named by the class's name and module: keep those of the stock class.
        attributes = dict(__module__=stock.__module__, _keep_in_fp32_modules_strict=[*strict, *family.kept_in_fp32])
        kept = type(stock.__name__, (stock,), attributes)
        loaded = kept.from_pretrained(path, config=config, **kwargs)  # type: ignore[attr-defined]
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.__class__ = stock
        return loaded


class _Always(dict[Any, Any]):
    """A mapping from every key to `_StockModel`."""

    def __contains__(self, key: Any) -> bool:
        return True

    def __missing__(self, key: Any) -> Any:
        return _StockModel


class _AutoStockModel(AutoModelForCausalLM):
    """AutoModelForCausalLM, which reads configuration and adapters, with `_StockModel` for the class of the model."""

    _model_mapping = _Always()


def _stock_class(config: Any) -> Any:
    """Return the class that the configuration names if transformers has it, else the language model of its type."""
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if getattr(named, "config_class", None) is type(config):
            return named
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel):
        known = auto._model_mapping.get(type(config), None)  # that of a vision-language model may be its text model's
        if getattr(known, "config_class", None) is type(config):
            return known
    raise ValueError(
        f"the configuration must be of a class for which transformers has a model, got {type(config).__name__} with "
        f"architectures {config.architectures}"
    )


def _family(kind: str, what: str) -> StockFamily:
    kind = kind.removesuffix("_text")  # the text part of a vision-language model alone
    if kind not in families.IN_PLACE:
        raise unsupported(what, kind)
    return families.load(kind)


def _stock_family(model: PreTrainedModel) -> StockFamily:
    return _family(model.config.model_type, type(model).__name__)


def _base_models(model: nn.Module, family: StockFamily) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, family.base_model)]


def _chosen_layers(model: nn.Module, family: StockFamily, layers: Iterable[int] | str | None) -> dict[str, Any]:
    """Return the requested stock layers by path."""
    found: dict[str, Any] = {p: m for p, m in model.named_modules() if isinstance(m, family.stock_layer)}
    if not found:
        raise ValueError(f"{type(model).__name__} must have a {family.noun} to swap, got none")
    chosen = found
    if not (layers is None or (isinstance(layers, str) and layers == "all")):  # arrays compare element by element
        config, name = _base_models(model, family)[0].config, type(model).__name__
        by_index = {m.layer_idx: path for path, m in found.items()}
        indices = layer_indices(layers, config.num_hidden_layers, f"None, 'all' or indices for a {name}")
        for i in indices:
            if i not in by_index:
                raise ValueError(
                    f"layers must be indices of {family.noun}s, {sorted(by_index)}, got {i}, which is of "
                    f"{config.layer_types[i]}: in a {name} only these are swapped"
                )
        chosen = {by_index[i]: found[by_index[i]] for i in indices}
    swapped = [path for path, m in chosen.items() if type(m) is not family.stock_layer]
    if swapped:
        kinds = sorted({type(chosen[path]).__name__ for path in swapped})
        raise ValueError(f"layers must not be swapped already, got {', '.join(swapped)} of {', '.join(kinds)}")
    return chosen


def _hint_of_plan(model: nn.Module, path: str, layer: nn.Module) -> str:
    name, out = path.rpartition(".")[2], "out_proj" if hasattr(layer, "out_proj") else "o_proj"
    return (
        f"the plan of {type(model).__name__} does not shard it by heads. Override all its rules for {name}, "
        f"DistributedConfig(tp_plan={{'...{name}.{out}': 'replicate'}})"
    )


def _set_class(layer: Any, cls: type[nn.Module]) -> None:
    layer.__class__ = cls
    if "_old_forward" in layer.__dict__:  # accelerate's hooks call the forward that they found
        layer._old_forward = MethodType(cls.forward, layer)
