"""Let `load_state_dict` of a stock model read weights in the names that its `save_pretrained` writes.

transformers converts names and merges tensors in from_pretrained only. Its Trainer resumes and restores the best model
with a non-strict `load_state_dict`, which skips every name that differs.
"""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kda_layers.modeling.seams import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    get_model_conversion_mapping,
    rename_source_key,
)

Parts = dict[str, dict[str, Tensor]]  # of parameters that are merged: saved tensors by their names

# Parts whose others are in further shards, and the hook that forbids a forward until then.
_waiting: WeakKeyDictionary[nn.Module, tuple[Parts, RemovableHandle]] = WeakKeyDictionary()


def accept_saved_names(model: PreTrainedModel) -> None:
    """Make `load_state_dict` of the model, also within a wrapper, convert saved names."""
    if not _hooks(model):
        model.register_load_state_dict_pre_hook(convert_saved_names)


def refuse_saved_names(model: PreTrainedModel) -> None:
    """Undo `accept_saved_names`."""
    _wait_for(model, {})
    for key in _hooks(model):
        del model._load_state_dict_pre_hooks[key]


def convert_saved_names(model: PreTrainedModel, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Convert a state dict in place to the names and tensors of the model; a pre-hook of `load_state_dict`.

    A parameter that is merged from several saved tensors (experts, short convolutions) may come in several shards,
    which are loaded one by one: its parts are kept until they are complete, and a forward before is an error. State
    dicts that the model knows as they are, such as its own or those of adapters, are not changed.

    Raises:
        RuntimeError: some names are converted, but others are neither the model's nor its checkpoints'.
    """
    own = model.state_dict()
    given = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
    waiting = _waiting[model][0] if model in _waiting else {}
    foreign = {name: given[name] for name in given.keys() - own.keys()}
    for target, parts in waiting.items():
        if target not in given:
            foreign |= parts
    converted, incomplete, unknown = _convert(model, own, foreign)
    if converted or incomplete:
        _check_known(model, unknown)
    for name in foreign.keys() - unknown:
        state_dict.pop(prefix + name, None)
    state_dict.update({prefix + name: t for name, t in converted.items()})
    _wait_for(model, incomplete)


def _convert(
    model: PreTrainedModel, own: dict[str, Tensor], saved: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Parts, set[str]]:
    """Return tensors under the model's names, the parts of incomplete ones, and the names that lead nowhere."""
    if not saved:
        return {}, {}, set()
    transforms = copy.deepcopy(getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model))
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: t for t in converters for pattern in t.source_patterns}
    converted: dict[str, Tensor] = {}
    merged: dict[str, WeightConverter] = {}
    parts: Parts = {}
    unknown = set()
    for name in sorted(saved, key=dot_natural_key):  # experts are stacked in this order
        target, pattern = rename_source_key(name, renamings, converters)
        if target not in own:
            unknown.add(name)
        elif pattern is None:
            converted[target] = saved[name]
        else:
            merged.setdefault(target, copy.deepcopy(by_pattern[pattern])).add_tensor(target, name, pattern, saved[name])
            parts.setdefault(target, {})[name] = saved[name]
    for target, converter in merged.items():
        targets = [target.replace(converter.target_patterns[0], t) for t in converter.target_patterns]
        missing = sum(own[t].numel() for t in targets) - sum(t.numel() for t in parts[target].values())
        if missing <= 0:  # torch refuses the wrong shape of too many values
            del parts[target]
            for name, value in converter.convert(target, model=model, config=model.config).items():
                converted[name] = value[0] if isinstance(value, list) else value
    return converted, parts, unknown


def _check_known(model: PreTrainedModel, unknown: set[str]) -> None:
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    names = sorted(n for n in unknown if not any(re.search(pattern, n) for pattern in ignored))
    if names:
        raise RuntimeError(
            f"state_dict must hold weights of {type(model).__name__} in its own names or in those that its "
            f"save_pretrained writes, got also {', '.join(names[:4])}{', ...' if names[4:] else ''}: load the "
            "checkpoint with kda_layers.load_pretrained, or leave these tensors out"
        )


def _wait_for(model: nn.Module, incomplete: Parts) -> None:
    """Keep these parts for the next shard, and forbid a forward if there are any."""
    _, handle = _waiting.pop(model, ({}, None))
    if handle is not None:
        handle.remove()
    if incomplete:
        refuse = partial(_refuse_forward, sorted(incomplete))
        _waiting[model] = incomplete, model.register_forward_pre_hook(refuse)


def _refuse_forward(names: list[str], model: nn.Module, *_: Any) -> None:
    raise RuntimeError(
        f"{type(model).__name__} must be loaded before it runs, but load_state_dict got only parts of "
        f"{', '.join(names[:4])}{', ...' if names[4:] else ''}: load the other shards of the checkpoint"
    )


def _hooks(model: PreTrainedModel) -> list[int]:
    return [key for key, hook in model._load_state_dict_pre_hooks.items() if hook.hook is convert_saved_names]
