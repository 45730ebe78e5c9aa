"""Calls of a model: refuse keywords that would be ignored, and choose the attention kernels of decode steps."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kda_layers.modeling.seams import CACHE, RENAMED, Cache, ForCausalLMLoss, TransformersKwargs

# Inputs of a base model, in the order of its forward.
INPUTS = ("input_ids", "attention_mask", "position_ids", CACHE, "inputs_embeds", "use_cache")
# Keywords that transformers passes to any model: declared ones, options of its loss, those of tokenizers and generate.
KNOWN = (
    frozenset(TransformersKwargs.__annotations__)
    | (inspect.signature(ForCausalLMLoss).parameters.keys() - {"logits", "labels", "vocab_size", "kwargs"})
    | {*INPUTS, "cu_seqlens", "return_dict", "token_type_ids", "mm_token_type_ids", "cache_position"}
)

SEQUENCES = ("cu_seqlens", "cu_seq_lens_q", "seq_idx", "position_ids", "attention_mask")  # describe sequences

FEW_QUERIES = 16  # tokens of a decode step, drafts included
_lock, _inside = threading.Lock(), 0  # calls of `_without_cudnn` in progress, in all threads


def is_engine_cache(cache: Any) -> bool:
    """Return True for the cache of transformers' continuous batching, which calls a model with it."""
    return cache is not None and not isinstance(cache, Cache) and hasattr(cache, "cache_allocators")


def is_checkpointed(model: Any) -> bool:
    """Return True if this call of a model with gradient checkpointing recomputes its layers in the backward."""
    return model.gradient_checkpointing and model.training and (not RENAMED or torch.is_grad_enabled())


def refuse_misspelt(kwargs: dict[str, Any], model: type[nn.Module]) -> None:
    """Raise a TypeError if a call of a stock model has keywords that are close to those that describe sequences.

    Others pass: its loss function, which the base model does not know, may read them.
    """
    for name in kwargs:
        if name not in KNOWN and (close := difflib.get_close_matches(name, SEQUENCES, n=1, cutoff=0.75)):
            raise TypeError(
                f"{name} is not an argument of {model.__name__} and would be ignored: did you mean {close[0]}?"
            )


def refuse_unknown(kwargs: dict[str, Any], model: type[nn.Module]) -> None:
    """Raise a TypeError if a call of `model` has keywords that neither its forward nor transformers name."""
    for name in kwargs:  # a loop: torch.compile of torch 2.11 has no set algebra
        if name in KNOWN:
            continue
        arguments = inspect.signature(model.forward).parameters.keys() - {"self", "kwargs"}
        if name not in arguments:
            close = difflib.get_close_matches(name, sorted(arguments | KNOWN), n=1)
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(sorted(arguments))}"
            raise TypeError(f"{name} is not an argument of {model.__name__} and would be ignored: {hint}")


def loss_options(kwargs: dict[str, Any], loss: Callable[..., Any]) -> dict[str, Any]:
    """Return the keywords of a call that only its loss function names."""
    unknown = [name for name in kwargs if name not in KNOWN]
    if not unknown:
        return {}
    names = inspect.signature(loss).parameters.keys()
    return {name: kwargs[name] for name in unknown if name in names}


def without_plans(x: Tensor, cache: Cache | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a decode step [B, T, D] uses attention kernels that need no plan per number of keys.

    cuDNN attention builds a plan for each new shape, which takes about 18 ms per layer on an H200, and the number of
    keys grows with each step. Compiled steps have static shapes and need no context.
    """
    if cache is None or x.shape[1] > FEW_QUERIES or not x.is_cuda or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return _without_cudnn()


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    """Exclude cuDNN from torch's choice if another kernel is enabled; other switches stay.

    The switch is global to the process: the first of several threads turns it off, and the last one turns it on.
    """
    global _inside
    switches = torch.backends.cuda
    with _lock:
        others = switches.flash_sdp_enabled() or switches.mem_efficient_sdp_enabled() or switches.math_sdp_enabled()
        counted = _inside > 0 or (switches.cudnn_sdp_enabled() and others)
        if counted:
            _inside += 1
            switches.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        if counted:
            with _lock:
                _inside -= 1
                if _inside == 0:
                    switches.enable_cudnn_sdp(True)
