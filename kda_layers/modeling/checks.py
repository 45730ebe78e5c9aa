"""Argument checks shared by layers, configurations and `swap_attention`."""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..kernels.checks import DTYPES
from ..kernels.declarations import one_of
from ..kernels.deprecation import OLD_KEYWORDS, new_keywords
from ..kernels.kda.activations import GATES
from ..kernels.kda.checks import check_lower_bound, check_recompute
from ..kernels.kda.contract import state_dtype

F = TypeVar("F", bound=Callable[..., Any])
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}  # names for `stored_dtype`
DEQUANTISE = (
    "quantised weights mean nothing without their scales: dequantise the model first (model.dequantize() of "
    "transformers), or load a checkpoint that is not quantised"
)


def as_int(name: str, value: Any) -> int:
    """Return the value as an int; raise a TypeError unless it is an integer of Python or NumPy."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, got {value!r}")


def as_rank(name: str, value: Any) -> int:
    """Return the rank of a projection as an int; raise a TypeError or ValueError unless it is 0 (full rank) or more."""
    rank = as_int(name, value)
    if rank < 0:
        raise ValueError(f"{name} must be 0 (full rank) or more, got {rank}")
    return rank


def check_kda_arguments(given: Mapping[str, Any], prefix: str = "") -> None:
    """Raise a TypeError or ValueError, which names `prefix` + the argument, for bad arguments of KimiDeltaAttention."""
    for name in ("num_heads", "head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim"):
        if given[name] < 1:
            raise ValueError(f"{prefix}{name} must be at least 1, got {given[name]}")
    heads, value_heads, gate = given["num_heads"], given["num_value_heads"], given["gate_activation"]
    if value_heads % heads:
        raise ValueError(
            f"{prefix}num_value_heads must be a multiple of {prefix}num_heads = {heads}, got {value_heads}"
        )
    if gate not in ("lower_bound", "softplus"):
        raise ValueError(f"{prefix}gate_activation must be 'lower_bound' or 'softplus', got {gate!r}")
    if not given["learned_rate"] and GATES[gate].needs_rate:
        raise ValueError(
            f"{prefix}learned_rate must be True with gate_activation={gate!r}, got {given['learned_rate']}: only the "
            "lower-bound gate has a form without A_log"
        )
    try:
        check_lower_bound(gate, given["lower_bound"])
        check_recompute(given["recompute"], given["memory_share"])
        stored_dtype(given["state_dtype"])
    except (TypeError, ValueError) as error:
        raise type(error)(f"{prefix}{error}") from error
    for name in ("gate_rank", "decay_rank"):
        as_rank(prefix + name, given[name] or 0)
    if given["decay"] not in ("channel", "head"):
        raise ValueError(f"{prefix}decay must be 'channel' or 'head', got {given['decay']!r}")
    if given["decay"] == "head" and given["decay_rank"]:
        raise ValueError(
            f"{prefix}decay_rank must be None or 0 with {prefix}decay='head', got {given['decay_rank']}: the "
            "projection has one row for each value head only, and is stored at full rank"
        )
    check_epsilon("rms_norm_eps", given["rms_norm_eps"])


def stored_dtype(name: Any, dtype: torch.dtype = torch.float32) -> torch.dtype:
    """Return the dtype in which recurrent states are kept, of its name and the dtype of the layer's inputs.

    Raises:
        ValueError: another name, or one of fewer bits for inputs in fp64.
    """
    if not isinstance(name, str) or name not in STATE_DTYPES:
        raise ValueError(f"state_dtype must be {one_of([repr(n) for n in STATE_DTYPES])}, got {name!r}")
    computed, kept = state_dtype(dtype), STATE_DTYPES[name]
    if kept == torch.float32:  # the one in which states are computed
        return computed
    if computed == torch.float64:
        raise ValueError(f"state_dtype must be 'float32' for inputs in float64, whose states are too, got {name!r}")
    return kept


# Arguments of flash-linear-attention's layer, and what is used here.
OF_FLA = {
    "expand_v": "value_head_dim = head_dim * expand_v",
    "safe_gate": "gate_activation='lower_bound' for True, 'softplus' with lower_bound=None for False",
    "mode": "backend",
}


def check_no_unknown(cls: type, unknown: dict[str, Any]) -> None:
    """Raise a TypeError for keywords that `cls` does not take, with what to use instead where it is known."""
    if unknown:
        hints = [f"{name}{f' (use {OF_FLA[name]})' if name in OF_FLA else ''}" for name in unknown]
        raise TypeError(f"{cls.__name__} got an unexpected keyword argument {', '.join(hints)}")


def reads_old_keywords(function: str) -> Callable[[F], F]:
    """Decorate a function to take its old keywords, too; type checkers and `inspect` see the new ones alone."""
    names = OLD_KEYWORDS[function].keys()

    def decorate(f: F) -> F:
        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not names.isdisjoint(kwargs):
                new = new_keywords(function, {name: kwargs.pop(name) for name in [*kwargs] if name in names})
                if twice := new.keys() & kwargs.keys():
                    raise TypeError(f"{function}() got {', '.join(sorted(twice))} under its old name, too")
                kwargs |= new
            return f(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def layer_indices(layers: Any, total: int, forms: str) -> list[int]:
    """Return indices of layers in [0, total), in the given order.

    Args:
        layers: integers in [-total, total); negative ones count from the end.
        total: number of layers of the model.
        forms: description of what `layers` may be, for the error message.

    Raises:
        TypeError: not an iterable of integers.
        ValueError: no index, one out of range, or two of the same layer.
    """
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise (ValueError if isinstance(layers, str) else TypeError)(f"layers must be {forms}, got {layers!r}")
    given = [as_int("every index in layers", i) for i in layers]
    if not given:
        raise ValueError("layers must hold at least one index, got none")
    if missing := [i for i in given if not -total <= i < total]:
        raise ValueError(f"layers must be in [{-total}, {total}) for a model of {total} layers, got {missing}")
    if len({i % total for i in given}) < len(given):
        raise ValueError(f"layers must name each layer once, got {given} for a model of {total} layers")
    return [i % total for i in given]


def check_epsilon(name: str, value: Any) -> None:
    """Raise a TypeError or ValueError unless the value is a finite number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be finite and 0 or more, got {value}")


def unwrapped_hint(module: Any) -> str:
    """Return a hint that names the module wrapped by torch.compile, PEFT or data parallelism; '' without a wrapper."""
    for attribute, way in (("_orig_mod", "._orig_mod"), ("get_base_model", ".get_base_model()"), ("module", ".module")):
        if hasattr(module, attribute):
            return f": pass the module that it wraps, {way}"
    return ""


def check_no_adapter(layer: Any, names: Iterable[str]) -> None:
    """Raise a ValueError if a submodule whose weight the layer reads without calling it has an adapter."""
    for name in names:
        module = getattr(layer, name)
        if "base_layer" in module._modules:  # as PEFT's layers hold the module that they adapt
            own = next(child for child, m in layer._modules.items() if m is module)  # stock layers have other names
            raise ValueError(
                f"{own} must have no adapter, got {type(module).__name__}: its weight is read without calling it, "
                f"so an adapter has no effect. Leave {own} out of target_modules, or train its weight itself "
                f"with modules_to_save=[{own!r}]"
            )


def is_quantised(t: Tensor) -> bool:
    """Return True for codes instead of numbers: integers, float8, packed dtypes, and torchao's tensors with scales."""
    return t.dtype not in DTYPES or (is_traceable_wrapper_subclass(t) and not is_dtensor(t))


def check_numbers(what: str, module: nn.Module) -> None:
    """Raise a ValueError if torch's own layers in `module` hold bare codes as weights, which they take for numbers."""
    for path, owner in module.named_modules():
        if type(owner) in (nn.Linear, nn.Conv1d, nn.Embedding) and owner.weight.dtype not in DTYPES:
            raise ValueError(
                f"{what} must have weights in floating point of 16 bits or more, got {owner.weight.dtype} at "
                f"{path}: {DEQUANTISE}"
            )


def check_not_sharded(what: str, module: nn.Module, hint: str) -> None:
    """Raise a ValueError if this rank holds only shards of some of the module's weights by tensor parallelism."""
    sharded = [
        f"{path}.{name}".lstrip(".")
        for path, owner in module.named_modules()
        for name, p in owner.named_parameters(recurse=False)
        if _is_tensor_parallel(owner, p)
    ]
    if sharded:
        raise ValueError(
            f"{what} must have unsharded weights on every rank, got shards of tensor parallelism at "
            f"{', '.join(sharded[:4])}{', ...' if sharded[4:] else ''}: {hint}"
        )


def _is_tensor_parallel(owner: nn.Module, p: Any) -> bool:
    """Return True for a shard of tensor parallelism; False for an unsharded tensor and for a shard of FSDP2."""
    if not is_dtensor(p):
        return False
    names = p.device_mesh.mesh_dim_names  # None in transformers 5.17, which marks the module as 5.23 does
    placements = p.placements if names is None else [p.placements[i] for i, name in enumerate(names) if name == "tp"]
    return (names is not None or hasattr(owner, "_is_hooked")) and not all(way.is_replicate() for way in placements)


def is_dtensor(t: Any) -> bool:
    """Return True for a torch DTensor, without importing its module, which takes half a second."""
    return hasattr(t, "device_mesh")


def is_stock(module: Any) -> bool:
    """Return True for one of transformers' own KDA layers or gated delta nets that is not swapped."""
    decays = hasattr(module, "forget_gate") or (hasattr(module, "A_log") and hasattr(module, "head_k_dim"))
    return decays and not hasattr(module, "kda_options")
