"""Find the sequences of a model's call, padded or packed, in every form in which transformers describes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kda_layers.kernels.checks import check_is_tensor
from kda_layers.modeling.inputs.arguments import given_offsets, offsets_of
from kda_layers.modeling.seams import Cache, is_tracing

# An additive mask may hide a score with any number that makes it 0 after the softmax.
HIDDEN = -1e4


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
        attention_mask: [B, S] with 1 for real tokens; [1 or B, heads, T, S], see `read_square_mask`; or a dict of
            prepared masks by layer type, which is not read.
        position_ids: [T], [1 or B, T], or [axes, B, T] for several axes, which may not restart; the first of four axes
            is read as [B, T].
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
    if position_ids.ndim == 3 and position_ids.shape[0] == 4:  # of Qwen3.5: the first axis counts tokens
        position_ids = position_ids[0]
    if position_ids.ndim == 3:
        # Images repeat positions. Within a sequence the first axis, time, never steps back, and all axes are 0 only at
        # its first token.
        restarts = (position_ids[0].diff() < 0) | (position_ids[..., 1:] == 0).all(0)
        if padding is not None:  # whose positions are arbitrary
            real = padding.bool()
            restarts = restarts & real[:, 1:] & real[:, :-1]
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
    return offsets_of(pad(starts[0], (1, 0), value=True))


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


def readable(t: Tensor) -> bool:
    """Return False if values of `t` cannot be read: tracing, compiling, capturing a graph, on the meta device."""
    return not (t.is_meta or is_tracing(t))


def read_padding_mask(mask: Tensor, B: int, T: int) -> Tensor | None:
    """Return the mask [B, S], or None if it marks every token as real; one host synchronisation on a GPU.

    Args:
        mask: [B, S] with S >= T: 1 (or True) for real tokens, 0 for padding.
        B, T: batch rows and tokens of the call, which are the mask's last T columns.

    Raises:
        ValueError: another shape; values other than 0 and 1.
    """
    if mask.ndim != 2 or mask.shape[0] != B or mask.shape[1] < T:
        raise ValueError(f"attention_mask must have shape [{B}, at least {T}] or 4 dimensions, got {list(mask.shape)}")
    if not readable(mask):
        return mask
    ones, binary = torch.stack(((mask == 1).all(), ((mask == 0) | (mask == 1)).all())).tolist()
    if not binary:
        raise ValueError(
            f"attention_mask must hold 1 for real tokens and 0 for padding, got values from {mask.min().item():g} to "
            f"{mask.max().item():g}: to number packed documents, pass seq_idx or cu_seqlens instead"
        )
    return None if ones else mask


def read_square_mask(mask: Tensor, B: int, T: int, cached: int | Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return padding and documents of a mask of scores, which KDA cannot apply; one host synchronisation on a GPU.

    Each real token must see the real tokens of its own document up to itself, and no others. A token that does not see
    itself, or sees later ones, is padding, which no real token may see; what it sees itself does not matter.

    Args:
        mask: [1 or B, heads, T, S]: bool, True where a key is seen, or additive: 0 where it is and at most -1e4 where
            it is not.
        B, T: batch rows and tokens of the call.
        cached: tokens in the cache, before these; with any, each token must see all of them.

    Returns:
        Padding [B, T] bool, True for real tokens, or None where all are; offsets [N + 1] int64 of the documents in a
        single row, or None where each row holds one.

    Raises:
        ValueError: any other mask, or one whose values cannot be read.
    """
    if not readable(mask):
        raise ValueError(
            "attention_mask must have 2 dimensions [B, S] under torch.compile, torch.export and CUDA graph capture, "
            f"where KDA layers cannot read a mask of scores, got {list(mask.shape)}: pass cu_seqlens for packed "
            "documents, or a dict of masks by layer type"
        )
    cached = int(cached)
    if mask.shape[0] not in (1, B) or mask.shape[2] != T or mask.shape[3] < cached + T:
        raise ValueError(f"attention_mask must have shape [1 or {B}, heads, {T}, {cached + T}], got {list(mask.shape)}")
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(f"attention_mask with 4 dimensions must be bool or floating point, got {mask.dtype}")
    if mask.dtype == torch.bool:
        seen, binary = mask, torch.ones((), dtype=torch.bool, device=mask.device)
    else:
        seen = mask == 0
        binary = (seen | (mask <= HIDDEN)).all()
    alike = (seen == seen[:, :1]).all()
    seen = seen[:, 0]

    keys = torch.arange(mask.shape[3], device=mask.device)
    last = keys[cached : cached + T, None]  # each token's own key
    first = seen.to(torch.uint8).argmax(-1)  # the first key that a token sees
    real = seen.diagonal(cached, 1, 2) & ~(seen & (keys > last)).any(-1)
    real_keys = pad(real, (cached, mask.shape[3] - cached - T), value=True)
    begins = real & (first == last[:, 0])
    start = torch.zeros_like(first) if cached else torch.where(begins, first, 0).cummax(1).values  # of its document
    own = (seen == ((keys >= start[..., None]) & (keys <= last) & real_keys[:, None])).all(-1)
    gaps = (real[:, 1:] & ~real[:, :-1] & ~begins[:, 1:]).any()  # padding inside a document
    clear = binary & alike & (own & real if cached else own | ~real).all()
    facts = torch.stack((clear.long(), real.all().long(), gaps.long(), begins.sum(1).max()))
    clear, all_real, gaps, documents = facts.tolist()
    if not clear or (gaps and documents > 1):
        raise ValueError(
            f"attention_mask {list(mask.shape)} must let each token see the tokens of its own document up to itself "
            "and no others, alike in all heads: KDA layers can apply no other mask of scores. Pass padding as a mask "
            "[B, S], packed documents as cu_seqlens"
        )
    if documents <= 1:
        return None if all_real else real.expand(B, T), None
    if B != 1:
        raise ValueError(
            f"attention_mask must separate documents only in a single row, got {B} rows: put all documents in one row"
        )
    starts = begins[0].clone()
    starts[1:] |= real[0, 1:] != real[0, :-1]  # padding is then a document of its own
    starts[0] = True
    return None, offsets_of(starts)
