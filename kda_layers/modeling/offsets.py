"""Offsets of packed sequences, from the keywords in which a caller gives them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.checks import check_is_tensor, check_offsets


def given_offsets(
    tokens: Tensor, cu_seqlens: Tensor | None, cu_seq_lens_q: Tensor | None, seq_idx: Tensor | None
) -> Tensor | None:
    """Return the offsets [N + 1] of the sequences packed in a row, or None if the caller gives none.

    Args:
        tokens: [B, T, ...] token ids or embeddings; B = 1 with any of the others.
        cu_seqlens, cu_seq_lens_q: [N + 1] int32 or int64 offsets, the first of them counts.
        seq_idx: [1, T] number of each token's sequence; read only without offsets.

    Raises:
        TypeError: an argument that is no tensor, or offsets that are no integers.
        ValueError: another shape, or more than one row.
    """
    offsets = cu_seqlens if cu_seqlens is not None else cu_seq_lens_q
    if offsets is not None:
        check_offsets(offsets, tokens)
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
