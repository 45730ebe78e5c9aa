"""Read the padding and the packed documents, which KDA layers need, from a caller's attention mask."""

from __future__ import annotations

import torch
from torch import Tensor

from kda_layers.modeling.inputs.offsets import offsets_of
from kda_layers.modeling.seams import is_tracing

# An additive mask may hide a score with any number that makes it 0 after the softmax.
HIDDEN = -1e4


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
    real_keys = torch.nn.functional.pad(real, (cached, mask.shape[3] - cached - T), value=True)
    own = (seen == ((keys >= first[..., None]) & (keys <= last) & real_keys[:, None])).all(-1)
    begins = real & (first == last[:, 0])
    if cached:
        in_document = real & own & (first == 0)
    else:
        before = torch.where(real, first, -1).cummax(1).values  # where the document of the last real token begins
        continues = torch.zeros_like(real)
        continues[:, 1:] = first[:, 1:] == before[:, :-1]
        in_document = ~real | (own & (begins | continues))
    gaps = (real[:, 1:] & ~real[:, :-1] & ~begins[:, 1:]).any()  # padding inside a document
    clear = binary & alike & in_document.all()
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
