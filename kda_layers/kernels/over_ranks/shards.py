"""Cuts of a sequence over the ranks of a process group, and messages between its pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_private import in_backward, process_group

CHAINED = "chain "  # begins the string of shards that hand on states one by one


class Shards(NamedTuple):
    """The places of each rank's tokens in a sequence that is cut over a process group.

    Every rank holds the same number of pieces of the sequence, all of one length, concatenated along its tokens.

    Attributes:
        group: name of the process group (`group.group_name`).
        places: for each rank the places of its pieces in the sequence: ((0, 3), (1, 2)) says that rank 0 holds the
            first and the last quarter, rank 1 the second and the third.
        chain: the state goes from each piece to the next, with one piece for each rank. Otherwise every rank computes
            how its pieces change a state, and all ranks gather that.
        memory: what each layer got from other ranks in this call of a model, for recomputations by gradient
            checkpointing, which are run in a backward; None to exchange it again. See `of_layer`.
    """

    group: str
    places: tuple[tuple[int, ...], ...]
    chain: bool = False
    memory: dict[Any, Any] | None = None

    @classmethod
    def contiguous(cls, group: Any = None, layers: int = 1) -> Shards:
        """Return shards of which rank r holds the r-th slice.

        Args:
            group: process group; None for all ranks
            layers: how many calls follow each other in which ranks exchange nothing else, such as those of the KDA
                layers between two softmax layers. It decides on `chain`: rank r may be r calls behind the first one, so
                that a chain costs the time of a scan over the full sequence once, and gathering that of a scan over
                each rank's slice in every layer.

        Raises:
            RuntimeError: torch.distributed is not initialised.
            TypeError: group is neither a process group nor None.
        """
        group, ranks = _group_and_size(group)
        return cls(group.group_name, tuple((r,) for r in range(ranks)), chain_pays(ranks, layers))

    @classmethod
    def balanced(cls, group: Any = None) -> Shards:
        """Return the shards of torch's `context_parallel`: of 2 P pieces, rank r of P holds r and 2 P - 1 - r.

        Args:
            group: process group; None for all ranks

        Raises:
            RuntimeError, TypeError: as `contiguous`.
        """
        group, ranks = _group_and_size(group)
        return cls(group.group_name, tuple((r, 2 * ranks - 1 - r) for r in range(ranks)))

    @property
    def pieces(self) -> int:
        """Number of pieces of each rank."""
        return len(self.places[0])

    @property
    def order(self) -> str:
        """Places and `chain` as a string, as an op takes them."""
        return CHAINED * self.chain + ";".join(",".join(map(str, of_rank)) for of_rank in self.places)

    @classmethod
    def read(cls, group: str, order: str) -> Shards:
        """Return the shards of a group's name and `order`."""
        places = order.removeprefix(CHAINED).split(";")
        return cls(group, tuple(tuple(map(int, of_rank.split(","))) for of_rank in places), order.startswith(CHAINED))

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        import torch.distributed as dist

        return dist.get_rank(process_group(self.group))

    # ------------------------------------------------------------ all ranks with each other

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

    # ------------------------------------------------------------ each piece with the next

    def neighbour(self, step: int) -> int | None:
        """Return the rank of the piece `step` places after this rank's only one, or None beyond an end."""
        place = self.places[self.rank][0] + step
        return self.places.index((place,)) if 0 <= place < len(self.places) else None

    def send(self, t: Tensor, step: int) -> None:
        """Hand a tensor to the rank of the piece `step` places after this rank's, if there is one.

        Later kernels wait for NCCL's, which else had to wait for them: a kernel on all multiprocessors leaves it none.
        """
        import torch.distributed as dist

        to = self.neighbour(step)
        if to is not None:
            dist.send(t.contiguous(), group=process_group(self.group), group_dst=to)

    def receive(self, like: Tensor, step: int) -> Tensor:
        """Return what the rank of the piece `step` places after this rank's sent, zeros beyond an end.

        Args:
            like: of its shape and dtype.
        """
        import torch.distributed as dist

        sender = self.neighbour(step)
        if sender is None:
            return like.new_zeros(like.shape)
        t = like.new_empty(like.shape)
        dist.recv(t, group=process_group(self.group), group_src=sender)
        return t

    def shifted(self, pieces: Tensor, step: int) -> Tensor:
        """Return the tensors of the pieces `step` (1 or -1) places after this rank's `pieces`, zeros beyond an end."""
        if self.chain:
            self.send(pieces, -step)
            return self.receive(pieces, step)
        everyones = self.gathered(pieces)
        zeros = [torch.zeros_like(everyones[0])]
        return self.own([*everyones[1:], *zeros] if step > 0 else [*zeros, *everyones[:-1]])

    # ------------------------------------------------------------ recomputations

    def of_layer(self, layer: Any) -> Shards:
        """Return these shards with the memory of one layer alone."""
        if self.memory is None or torch.compiler.is_compiling():
            return self._replace(memory=None)
        return self._replace(memory=self.memory.setdefault(id(layer), {}))

    def recall(self, what: str) -> Tensor | None:
        """Return what this layer remembered, if it is being recomputed in a backward; else None."""
        return self.memory.get(what) if self.memory is not None and in_backward() else None

    def remember(self, what: str, t: Tensor) -> None:
        """Keep what this layer got from other ranks for a recomputation.

        Nothing of a layer that is called twice: recomputations come in another order.
        """
        if self.memory is not None and not in_backward():
            self.memory[what] = None if what in self.memory else t


def chain_pays(ranks: int, layers: int) -> bool:
    """True if handing states on from rank to rank is faster than gathering how all pieces change a state.

    With F the time of a forward and R = F / 2 that of a reverse scan over one rank's slice, a chain lets the last rank
    wait (ranks - 1) (F + R), once for all layers; to gather costs F + 2 R in every layer.
    """
    return 3 * (ranks - 1) <= 4 * layers


class Wrapped:
    """Registry of an operator over ranks: `backend(name)` wraps that backend, once."""

    def __init__(self, wrap: Callable[[str], Any]):
        self.backend = functools.cache(wrap)


def check_contiguous(shards: Shards) -> None:
    """Raise a ValueError if shards of packed sequences are not slices in the order of the ranks."""
    if shards.places != tuple((r,) for r in range(len(shards.places))):
        raise ValueError(
            f"shards must be contiguous with cu_seqlens, got places {shards.places}: pass Shards.contiguous(group)"
        )


def check_chain(shards: Shards) -> None:
    """Raise a ValueError if states are to be passed on one by one, but ranks have several pieces."""
    if shards.chain and shards.pieces > 1:
        raise ValueError(
            f"shards must have one piece for each rank with chain=True, got {shards.pieces}: pass chain=False"
        )


def _group_and_size(group: Any) -> tuple[Any, int]:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError("group must belong to an initialised torch.distributed: call init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
    return group, dist.get_world_size(group)
