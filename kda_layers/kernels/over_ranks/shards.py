"""How a sequence is cut over the ranks of a process group, and what its pieces tell each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_private import process_group


class Shards(NamedTuple):
    """The places of each rank's tokens in a sequence that is cut over a process group.

    Every rank holds the same number of pieces of the sequence, all of one length, side by side along its tokens.

    Attributes:
        group: name of the process group (`group.group_name`).
        places: for each rank the places of its pieces in the sequence: ((0, 3), (1, 2)) says that rank 0 holds the
            first and the last quarter, rank 1 the second and the third.
    """

    group: str
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def contiguous(cls, group: Any = None) -> Shards:
        """Return shards of which rank r holds the r-th slice.

        Args:
            group: process group; None for all ranks

        Raises:
            RuntimeError: torch.distributed is not initialised.
            TypeError: group is neither a process group nor None.
        """
        group, ranks = _group_and_size(group)
        return cls(group.group_name, tuple((r,) for r in range(ranks)))

    @classmethod
    def balanced(cls, group: Any = None) -> Shards:
        """Return the shards of torch's `context_parallel`: of 2 P pieces, rank r of P holds r and 2 P - 1 - r.

        Arguments and errors as of `contiguous`.
        """
        group, ranks = _group_and_size(group)
        return cls(group.group_name, tuple((r, 2 * ranks - 1 - r) for r in range(ranks)))

    @property
    def pieces(self) -> int:
        """Number of pieces of each rank."""
        return len(self.places[0])

    @property
    def order(self) -> str:
        """The places as a string, as an op takes them."""
        return ";".join(",".join(map(str, of_rank)) for of_rank in self.places)

    @classmethod
    def read(cls, group: str, order: str) -> Shards:
        """Return the shards of a group's name and `order`."""
        return cls(group, tuple(tuple(map(int, of_rank.split(","))) for of_rank in order.split(";")))

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        import torch.distributed as dist

        return dist.get_rank(process_group(self.group))

    def everyones(self, t: Tensor) -> Tensor:
        """Return the tensors of all ranks, [ranks, ...], in the order of the ranks."""
        import torch.distributed as dist

        everyones = t.new_empty(len(self.places) * t.shape[0], *t.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(everyones, t.contiguous(), group=process_group(self.group))
        return everyones.unflatten(0, (len(self.places), t.shape[0]))

    def gathered(self, pieces: Tensor) -> list[Tensor]:
        """Return every piece's tensor in the order of the sequence; `pieces` [pieces, ...] are this rank's."""
        everyones = self.everyones(pieces)
        at = {place: (r, i) for r, of_rank in enumerate(self.places) for i, place in enumerate(of_rank)}
        return [everyones[at[place]] for place in range(len(at))]

    def own(self, in_order: list[Tensor]) -> Tensor:
        """Return this rank's of one tensor for each piece in the order of the sequence, [pieces, ...]."""
        return torch.stack([in_order[place] for place in self.places[self.rank]])


def check_contiguous(shards: Shards) -> None:
    """Raise a ValueError if shards of packed sequences are not slices in the order of the ranks."""
    if shards.places != tuple((r,) for r in range(len(shards.places))):
        raise ValueError(
            f"shards must be contiguous with cu_seqlens, got places {shards.places}: pass Shards.contiguous(group)"
        )


def _group_and_size(group: Any) -> tuple[Any, int]:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError("group must belong to an initialised torch.distributed: call init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
    return group, dist.get_world_size(group)
