"""Slots of a pool of states for flash-linear-attention's decode kernel, which has no notion of a missing slot."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import DecodeInputs


def with_padding(x: DecodeInputs) -> tuple[DecodeInputs, Tensor, Tensor]:
    """Redirect sequences and states without a slot to a scratch slot outside of the pool; no host reads.

    Returns:
        the inputs, a bool mask [N] of the sequences that are padding, and the memory of the scratch slot, to be kept
        until the kernel is launched
    """
    assert x.state_indices is not None
    pool, slots = x.state, x.state_indices.long()
    if pool.shape[0] == 1:
        pool = pool.flatten().view(pool.shape)  # a single slot may have any stride
    slots = slots if slots.ndim == 2 else slots[:, None].expand(-1, x.q.shape[1])
    scratch = pool.new_empty(2 * pool.stride(0))
    first, bytes_per_slot = scratch.data_ptr() - pool.data_ptr(), pool.stride(0) * pool.element_size()
    scratch_slot = -(-first // bytes_per_slot)
    there = (slots >= 0) & (slots < pool.shape[0])
    if x.num_accepted is None:
        accepted, live = None, there[:, 0]
    else:
        accepted = x.num_accepted.long().clamp(1, slots.shape[1])
        live = there.gather(1, accepted[:, None] - 1)[:, 0] & (accepted == x.num_accepted)
    slots = torch.where(there & live[:, None], slots, scratch_slot)
    return x._replace(state=pool, state_indices=slots, num_accepted=accepted), ~live, scratch
