"""Arguments that come by several names: the cache, and the offsets of packed sequences.

transformers before 5.24 calls the argument `cache` of models and layers past_key_values or cache_params.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels.checks import check_is_tensor, check_offsets, sequence_offsets

OLD_NAMES = ("past_key_values", "cache_params")


def rename_cache(kwargs: dict[str, Any], name: str = "cache") -> dict[str, Any]:
    """Return keywords in which the cache has this name, whichever of its names it came by.

    Raises:
        TypeError: two different caches under two names.
    """
    given = [old for old in ("cache", *OLD_NAMES) if old in kwargs]
    if given == [name] or not given:
        return kwargs
    caches = {old: kwargs[old] for old in given if kwargs[old] is not None}
    first = next(iter(caches.values()), None)
    if any(other is not first for other in caches.values()):
        raise TypeError(f"{' and '.join(caches)} are names of one argument, got two caches: pass one of them")
    return {key: value for key, value in kwargs.items() if key not in given} | {name: first}


def takes_cache(forward: Callable[..., Any]) -> Any:
    """Decorate a function with an argument `cache`, so that it takes the argument by its old names too."""

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for old in OLD_NAMES:
            if old in kwargs:
                return forward(*args, **rename_cache(kwargs))
        return forward(*args, **kwargs)

    return wrapper


def given_offsets(
    tokens: Tensor, cu_seqlens: Tensor | None, cu_seq_lens_q: Tensor | None, seq_idx: Tensor | None
) -> Tensor | None:
    """Return the offsets [N + 1] of the sequences packed in a row, or None if the caller gives none.

    Args:
        tokens: [B, T, ...] token ids or embeddings; B = 1 with any of the others.
        cu_seqlens, cu_seq_lens_q: [N + 1] int32 or int64 offsets; values are read on a CPU only.
        seq_idx: [1, T] number of each token's sequence; read only without offsets.

    Raises:
        TypeError: an argument that is no tensor, or offsets that are no integers.
        ValueError: another shape, more than one row, offsets that do not go from 0 to T, or two that differ.
    """
    offsets = None
    for name, given in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seqlens", cu_seqlens)):
        if given is not None:
            check_offsets(given, tokens, name, "input_ids")
            if given.device.type == "cpu" and not torch.compiler.is_compiling():
                sequence_offsets(given, tokens.shape[1], name)
                if offsets is not None and given.tolist() != offsets.tolist():
                    raise ValueError(
                        f"cu_seqlens and cu_seq_lens_q must be the same if both are given, got {given.tolist()} and "
                        f"{offsets.tolist()}"
                    )
            offsets = given
    if offsets is not None:
        return offsets
    if seq_idx is None:
        return None
    check_is_tensor("seq_idx", seq_idx)
    B, T = tokens.shape[:2]
    if B != 1 or tuple(seq_idx.shape) != (1, T):
        raise ValueError(
            f"seq_idx must have shape [1, {T}], the sequences of a single row, got {list(seq_idx.shape)} for {B} rows"
        )
    starts = seq_idx[0].diff() != 0
    return offsets_of(torch.nn.functional.pad(starts, (1, 0), value=True))


def offsets_of(starts: Tensor) -> Tensor:
    """Return the offsets [N + 1] int64 of the sequences that start where `starts` [T] is True."""
    return torch.nn.functional.pad(starts.nonzero()[:, 0], (0, 1), value=starts.shape[0])
