"""Calls of a model: refuse misspelt keywords, and choose the attention kernels of decode steps."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kda_layers.kernels.torch_private import constant_to_compile
from kda_layers.modeling.seams import CACHE, RENAMED, Cache, ForCausalLMLoss, TransformersKwargs

# Inputs of a base model, in the order of its forward.
INPUTS = ("input_ids", "attention_mask", "position_ids", CACHE, "inputs_embeds", "use_cache")
# Keywords that transformers passes to any model: declared ones, options of its loss, those of tokenizers and generate.
KNOWN = (
    frozenset(TransformersKwargs.__annotations__)
    | (inspect.signature(ForCausalLMLoss).parameters.keys() - {"logits", "labels", "vocab_size", "kwargs"})
    | {*INPUTS, "cu_seqlens", "return_dict", "token_type_ids", "mm_token_type_ids", "cache_position"}
)

# Keywords that change what a base model returns, and those that only a language-model head reads.
CHANGING = (
    *INPUTS, "cache", "past_key_values", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx",
    "output_attentions", "output_hidden_states",
)  # fmt: skip
OF_HEAD = ("labels", "shift_labels", "num_items_in_batch", "ignore_index", "logits_to_keep", "skip_logits")
# What other libraries call them, and an argument of our layers that a model makes itself.
SYNONYMS = (
    dict.fromkeys(("attn_mask", "input_mask", "key_padding_mask", "mask", "padding_mask"), "attention_mask")
    | dict.fromkeys(("pos_ids", "positions"), "position_ids")
    | dict.fromkeys(("cu_lens", "offsets", "seq_lens", "seqlens"), "cu_seqlens")
    | dict.fromkeys(("doc_ids", "document_ids", "segment_ids", "seq_ids", "sequence_ids"), "seq_idx")
    | dict.fromkeys(("embeddings", "embeds", "input_embeddings"), "inputs_embeds")
    | dict.fromkeys(("kv_cache", "past", "past_kv"), "cache")
    | {"label_ids": "labels", "shards": "kda_layers.parallel.enable_context_parallel"}
)

FEW_QUERIES = 16  # tokens of a decode step, drafts included
_lock, _inside = threading.Lock(), 0  # calls of `_without_cudnn` in progress, in all threads


def is_engine_cache(cache: Any) -> bool:
    """Return True for the cache of transformers' continuous batching, which calls a model with it."""
    return cache is not None and not isinstance(cache, Cache) and hasattr(cache, "cache_allocators")


def is_checkpointed(model: Any) -> bool:
    """Return True if this call of a model with gradient checkpointing recomputes its layers in the backward."""
    return model.gradient_checkpointing and model.training and (not RENAMED or torch.is_grad_enabled())


def refuse_misspelt(kwargs: dict[str, Any], model: type[nn.Module], more: tuple[str, ...] = ()) -> None:
    """Raise a TypeError if a call of `model` has a keyword that is probably meant for one that changes its results.

    All other unknown keywords are ignored, as models of transformers ignore them: columns of a tokenizer, what
    `generate` leaves in a call, options of attention and loss functions.

    Args:
        kwargs: keywords that the forward does not name.
        model: class, for the message.
        more: keywords that change results beside `CHANGING`.
    """
    for name in kwargs:  # a loop: torch.compile of torch 2.11 has no set algebra
        if name not in KNOWN and name not in more and (meant := _meant_by(name, (*CHANGING, *more))):
            raise TypeError(
                f"{name} is not an argument of {model.__name__} and would be ignored: did you mean {meant}?"
            )


@constant_to_compile
def _meant_by(name: str, keywords: tuple[str, ...]) -> str | None:
    """Return the keyword that `name` is probably a misspelling or a synonym of; None if there is none."""
    close = difflib.get_close_matches(name, keywords, n=1, cutoff=0.85)
    meant = close[0] if close else SYNONYMS.get(name)
    return None if meant == name or (meant in OF_HEAD and meant not in keywords) else meant


def loss_options(kwargs: dict[str, Any], model: type[nn.Module], loss: Callable[..., Any]) -> dict[str, Any]:
    """Return the keywords of a call that only its loss function names; raise as `refuse_misspelt` does."""
    unknown = [name for name in kwargs if name not in KNOWN]
    if not unknown:
        return {}
    names = inspect.signature(loss).parameters.keys()
    refuse_misspelt(kwargs, model, (*OF_HEAD, *names))
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
