"""The values of indices into pools and sequences, which plain PyTorch checks before anything is written."""

from __future__ import annotations

import itertools
from collections import Counter

from ...checks import sequence_offsets
from ..contract import CHUNK, NO_SLOT, PrefillInputs
from .decode import check_slots_exist


def check_indices(x: PrefillInputs) -> None:
    """Raise a ValueError for a slot that does not exist or is given twice, or a boundary outside of its sequence."""
    B, T = x.q.shape[:2]
    offsets = [n * T for n in range(B + 1)] if x.cu_seqlens is None else sequence_offsets(x.cu_seqlens, T)
    if x.state_indices is not None and x.state is not None:
        slots = x.state_indices.tolist()
        check_slots_exist(slots, x.state.shape[0])
        slot, times = Counter(s for s in slots if s != NO_SLOT).most_common(1)[0] if max(slots) >= 0 else (0, 1)
        if times > 1:
            raise ValueError(
                f"state_indices must give each slot to one sequence, got slot {slot} {times} times: an update would be "
                "lost"
            )
    if x.checkpoint_at is None:
        return
    for n, (at, (start, end)) in enumerate(zip(x.checkpoint_at.tolist(), itertools.pairwise(offsets), strict=True)):
        if at != NO_SLOT and (at % CHUNK or not 0 <= at <= end - start):
            raise ValueError(
                f"checkpoint_at must be multiples of {CHUNK} within the sequences, or -1 for none, got {at} for "
                f"sequence {n} of {end - start} tokens"
            )
