"""The Trainer of transformers over excerpts that are cut over processes: context parallelism.

accelerate (1.15) refuses the Trainer's own for every model with linear attention, so that this one cuts them itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.data import Dataset, RandomSampler, Sampler, SequentialSampler
from transformers import Trainer

import kda_layers

IGNORED = -100  # a label that is not learnt


class Repeated(Sampler[int]):
    """Indices in blocks of `size`, each `times` over: as many processes in turn get the same batch.

    The last block is filled up from its beginning.
    """

    def __init__(self, indices: Sampler[int], size: int, times: int):
        self.indices, self.size, self.times = indices, size, times

    def __len__(self) -> int:
        return -(-len(self.indices) // self.size) * self.size * self.times  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        everything = list(self.indices)
        for start in range(0, len(everything), self.size):
            block = everything[start : start + self.size]
            block = (block * self.size)[: self.size]
            yield from block * self.times


class ContextParallelTrainer(Trainer):
    """A Trainer whose processes share excerpts along a mesh of one dimension, each with the same part of all of them.

    Slices are contiguous in models of KDA layers alone; torch's `context_parallel` balances those of models with
    softmax layers, and runs their attention over all processes.
    """

    def __init__(self, model: Any, arguments: Any, mesh: DeviceMesh, **options: Any):
        super().__init__(model, arguments, **options)
        self.mesh = mesh
        kda_layers.parallel.enable_context_parallel(model, mesh)

    def get_cp_size(self) -> int:
        """Number of processes that share an excerpt, for the Trainer's count of batches."""
        return self.mesh.size()

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Tensor | None:
        """Return how many labels a step has, each counted once: transformers 5.17 does not divide by `get_cp_size`."""
        if not batch_samples:
            return None
        counts = [(batch["labels"][:, 1:] != IGNORED).sum() for batch in batch_samples]
        return self.accelerator.gather(torch.stack(counts).sum().to(device)).sum() / self.mesh.size()

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        generator = torch.Generator().manual_seed(self.args.seed)  # one order in all processes
        return self._repeated(RandomSampler(dataset, generator=generator), self.args.train_batch_size)

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler[int]:
        return self._repeated(SequentialSampler(eval_dataset), self.args.eval_batch_size)  # type: ignore[arg-type]

    def _repeated(self, indices: Any, size: int) -> Sampler[int]:
        return Repeated(indices, size, self.mesh.size())

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """Return the context of a step, and this process's part of its inputs."""
        inputs = self._prepare_inputs(inputs)
        ids, labels = inputs["input_ids"], nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        parts: list[Tensor] = [t.clone() for t in (ids, labels, positions)]
        context: Callable[[], Any] = contextlib.nullcontext
        if set(self.model.config.layer_types) == {"linear_attention"}:
            parts = [t.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()].contiguous() for t in parts]
        else:
            options: dict[str, Any] = dict(buffers=parts, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(parts))
            context = partial(context_parallel, self.mesh, **options)
        ids, labels, positions = parts
        return context, dict(input_ids=ids, labels=labels, shift_labels=labels, position_ids=positions)

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        loss, *rest = super().prediction_step(*args, **options)
        dist.all_reduce(loss, group=self.mesh.get_group())  # its parts differ, and the Trainer may leave out some
        return loss / self.mesh.size(), *rest
