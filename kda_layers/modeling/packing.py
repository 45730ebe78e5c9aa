"""Packed sequences: from the ways in which transformers describes them to offsets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


def packed_offsets(
    position_ids: Tensor | None,
    attention_mask: Tensor | dict[str, Tensor] | None,
    cache: Cache | None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Offsets [N + 1] of the packed sequences that transformers' ways of describing them mean, or None if unpacked.

    Args:
        position_ids: [1, T], restarting at 0 where a sequence starts; not looked at with a mask or a cache, in a
            batch, or under torch.compile (their number is not known there: pass cu_seqlens).
        attention_mask, cache: those of the call.
        cu_seq_lens_q: the offsets themselves.
        seq_idx: [1, T] the number of each token's sequence, ascending.

    Raises:
        ValueError: position_ids that restart in a batch of several rows: packed sequences come in one row.
    """
    if cu_seq_lens_q is not None:
        return cu_seq_lens_q
    if seq_idx is not None:
        starts = torch.nn.functional.pad(seq_idx[0].diff() != 0, (1, 0), value=True)
    elif (
        position_ids is None
        or attention_mask is not None
        or cache is not None
        or position_ids.ndim != 2
        or torch.compiler.is_compiling()
        or not bool((position_ids[:, 1:] == 0).any())
    ):
        return None
    elif position_ids.shape[0] != 1:
        raise ValueError(
            f"position_ids must restart only in a single row of packed sequences, got {position_ids.shape[0]} rows: "
            "put all sequences in one row"
        )
    else:
        starts = position_ids[0] == 0
        starts[0] = True
    return torch.nn.functional.pad(starts.nonzero()[:, 0], (0, 1), value=starts.shape[0])


def packed_positions(cu_seqlens: Tensor, T: int) -> Tensor:
    """Positions [1, T] that restart at 0 where a sequence starts; they keep sequences apart in softmax layers."""
    tokens = torch.arange(T, device=cu_seqlens.device)
    starts = cu_seqlens[torch.searchsorted(cu_seqlens, tokens, right=True) - 1]
    return (tokens - starts)[None]
