"""Find the sequences of a model's call, padded or packed, in every form in which transformers describes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_layers.kernels.checks import check_is_tensor
from kda_layers.modeling.inputs.masks import read_padding_mask, read_square_mask, readable
from kda_layers.modeling.inputs.offsets import given_offsets, offsets_of
from kda_layers.modeling.seams import Cache


class Layout(NamedTuple):
    """The sequences of a call, for both kinds of layers."""

    cu_seqlens: Tensor | None  # [N + 1] offsets of packed sequences; None for one in each row
    positions: Tensor | None  # [1, T], restarting at 0 where a packed sequence starts; None for one in each row
    padding: Tensor | None  # [B, T] nonzero for real tokens, for KDA layers; None where nothing is padded
    attention_mask: Any  # for softmax layers: as given, or None for a mask [B, S] that hides nothing


def read_layout(
    tokens: Tensor,
    attention_mask: Tensor | dict[str, Tensor] | None = None,
    position_ids: Tensor | None = None,
    cache: Cache | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> Layout:
    """Return the layout of a model's call; raise if its layers would read the arguments differently.

    Positions are read only without a cache. The rule is that of transformers' masks: a row starts at 0 or 1, +1
    continues a sequence, and a step back or a repeat begins the next one. Values are not readable under torch.compile
    and graph capture: a mask of scores is an error there, and positions are asserted on the device not to restart.

    Args:
        tokens: [B, T, ...] token ids or embeddings.
        attention_mask: [B, S] with 1 for real tokens; [1 or B, heads, T, S], see `masks.read_square_mask`; or a dict of
            prepared masks by layer type, which is not read.
        position_ids: [T], [1 or B, T], or [axes, B, T] for several axes, which may not restart.
        cache: the cache before this call.
        cu_seqlens, cu_seq_lens_q: [N + 1] offsets; None if not given.
        seq_idx: [1, T] number of each token's sequence.

    Raises:
        TypeError: another kind of mask.
        ValueError: packed sequences in more than one row or with padding; positions that jump forward or start beyond
            1; a mask that KDA layers cannot apply; sequences described in two ways that differ.
    """
    if attention_mask is not None and not isinstance(attention_mask, Tensor | dict):
        raise TypeError(
            f"attention_mask must be a tensor or a dict of masks by layer type, got {type(attention_mask).__name__}: "
            "KDA layers cannot read documents out of it, pass cu_seqlens"
        )
    B, T = tokens.shape[:2]
    offsets = given_offsets(tokens, cu_seqlens, cu_seq_lens_q, seq_idx)
    if position_ids is not None:
        check_is_tensor("position_ids", position_ids)
    padding = documents = None
    square = isinstance(attention_mask, Tensor) and attention_mask.ndim == 4
    if isinstance(attention_mask, Tensor) and (square or T > 1 or cache is None):
        cached = 0 if cache is None else cache.get_seq_length()  # a static cache returns a tensor
        if square:
            padding, documents = read_square_mask(attention_mask, B, T, cached)
        elif (mask := read_padding_mask(attention_mask, B, T)) is not None:
            padding = _columns(mask, T, cached)
        elif offsets is not None or (isinstance(cached, int) and attention_mask.shape[1] == cached + T):
            attention_mask = None  # nothing to hide: one column per key, while a static cache has empty slots
    if offsets is None and position_ids is not None and cache is None:
        offsets = _offsets_of_positions(position_ids, padding, B)
    if offsets is None:
        offsets = documents
    elif padding is not None:
        raise ValueError("attention_mask must be None with packed sequences: they have no padding, drop those tokens")
    elif square:
        in_mask = [0, T] if documents is None else documents.tolist()
        if set(in_mask) != set(offsets.tolist()):  # empty sequences repeat an offset
            raise ValueError(
                f"attention_mask must separate the sequences of the other arguments, at {offsets.tolist()}, "
                f"got documents at {in_mask}"
            )
    positions = None if offsets is None else _packed_positions(offsets, T)
    return Layout(offsets, positions, padding, attention_mask)


def _columns(mask: Tensor, T: int, cached: int | Tensor) -> Tensor:
    """Return the columns [B, T] of a mask [B, S] for the tokens after `cached` ones; later ones are empty slots."""
    if isinstance(cached, Tensor):  # counted on the device, where it is not read
        if mask.shape[1] == T:
            return mask
        return mask.index_select(1, torch.arange(T, device=mask.device) + cached.to(mask.device))
    if mask.shape[1] < cached + T:
        raise ValueError(
            f"attention_mask must have a column for each of {cached} cached tokens and of these {T}, "
            f"got {list(mask.shape)}"
        )
    return mask[:, cached : cached + T].contiguous()


def _offsets_of_positions(position_ids: Tensor, padding: Tensor | None, B: int) -> Tensor | None:
    """Return offsets of the sequences that positions begin, None for one per row; one host synchronisation on a GPU."""
    if position_ids.ndim == 3:
        # Images repeat positions. Within a sequence the first axis, time, never steps back, and all axes are 0 only at
        # its first token.
        restarts = (position_ids[0].diff() < 0) | (position_ids[..., 1:] == 0).all(0)
        if _any(restarts, "position_ids of several axes must not restart: pass cu_seq_lens_q"):
            raise ValueError(
                f"position_ids {list(position_ids.shape)} of several axes must not restart: describe packed sequences "
                "by cu_seq_lens_q or seq_idx"
            )
        return None
    rows = position_ids[None] if position_ids.ndim == 1 else position_ids
    if rows.ndim != 2 or rows.shape[0] not in (1, B):
        raise ValueError(f"position_ids must have shape [T], [1, T] or [{B}, T], got {list(position_ids.shape)}")
    step = rows.diff()
    if padding is not None:
        # Positions of padding are arbitrary, and so is the step over it.
        real = padding.bool()
        restarts = (step < 1) & real[:, 1:] & real[:, :-1]
        if _any(restarts, "position_ids must not restart in a row with padding"):
            raise ValueError(
                "position_ids must not restart in a row with padding, as packed sequences have none: drop the padding "
                "tokens and the attention_mask, or give each sequence a row"
            )
        return None
    starts = step != 1
    if not readable(rows):
        _any(starts, "position_ids must not restart under torch.compile or graph capture: pass cu_seqlens")
        _any((rows[:, 0] < 0) | (rows[:, 0] > 1), "position_ids must start at 0 or 1 under torch.compile")
        return None
    first = rows[:, 0]
    packed, jumps, least, most = torch.stack((starts.any(), (step > 1).any(), first.min(), first.max())).tolist()
    if least < 0 or most > 1 or jumps:
        what = f"a row that starts at {least if least < 0 else most}" if least < 0 or most > 1 else "a jump forward"
        raise ValueError(
            f"position_ids must start at 0 or 1 and go on by 1 within a sequence, got {what}: KDA layers would start "
            "from an empty state, without the earlier tokens. If the sequence was split over ranks (context parallel), "
            "call kda_layers.parallel.enable_context_parallel, or give each rank full sequences"
        )
    if not packed:
        return None
    if B != 1:
        raise ValueError(
            f"position_ids must restart only in a single row of packed sequences, got {B} rows: put all sequences in "
            "one row"
        )
    return offsets_of(torch.nn.functional.pad(starts[0], (1, 0), value=True))


def _any(condition: Tensor, message: str) -> bool:
    """Return True if the condition holds anywhere; if that is not readable, assert on the device that it does not."""
    if readable(condition):
        return bool(condition.any())
    if not condition.is_meta:
        torch._assert_async(~condition.any(), message)
    return False


def _packed_positions(cu_seqlens: Tensor, T: int) -> Tensor:
    """Return positions [1, T] that restart at 0 with each sequence, by which softmax layers separate sequences."""
    tokens = torch.arange(T, device=cu_seqlens.device)
    starts = cu_seqlens[torch.searchsorted(cu_seqlens, tokens, right=True) - 1]
    return (tokens - starts)[None]


def check_positions(position_ids: Tensor | None, layout: Layout) -> None:
    """Raise a ValueError unless positions [T] or [1, T] go on by 1 within each packed sequence of the layout."""
    if position_ids is None or position_ids.ndim > 2:  # models with positions of several axes encode none
        return
    assert layout.positions is not None
    jumps = (position_ids.view(1, -1).diff() != 1) & (layout.positions[:, 1:] != 0)
    if _any(jumps, "position_ids must go on by 1 within each packed sequence"):
        raise ValueError(
            "position_ids must go on by 1 within each packed sequence of a swapped model, which derives masks and "
            "encodings from the same positions: leave them out"
        )
