"""Tensor parallelism: the styles that transformers' plans need for KDA layers.

A plan (`base_model_tp_plan` of a configuration) shards a KDA layer by heads: "colwise" for its projections, `A_log` and
`dt_bias`, "rowwise" for `o_proj`. The convolution and the output norm are replicated on every rank, as no style of
transformers cuts their weights by heads: the convolution's channels are those of the q, k and v heads one after the
other. The layer itself knows nothing of ranks: the sizes of its heads come from the tensors that it is given.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kda_layers.modeling.checks import is_dtensor
from kda_layers.modeling.layer.layer import KimiDeltaAttention
from kda_layers.modeling.seams import ALL_PARALLEL_STYLES, RowwiseParallel, TensorParallelLayer

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


class LocalHeads(TensorParallelLayer):
    """Style "kda_local_heads" of an attention module: its forward reads this rank's heads as plain tensors.

    For the time of the forward, parameters that the module holds itself are their local shards, and those that a KDA
    layer's submodules hold unsharded (`conv1d`, `o_norm`) are the part of this rank's heads. The latter pass an
    identity whose backward sums over the ranks the gradients of their heads. transformers'
    "replicated_with_grad_allreduce" sums in the forward of a submodule; a KDA layer reads the weights of these two
    without calling them.
    """

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Install the style.

        Args:
            module: a `KimiDeltaAttention`, or an attention of transformers with `config`.
            mesh: torch's DeviceMesh of the ranks, with one dimension.

        Raises:
            ValueError: numbers of heads that the number of ranks does not divide.
        """
        check_heads(module, mesh.size())
        return super().install_forward(module, mesh)

    @contextlib.contextmanager
    def context_around_forward(self, module: nn.Module, mesh: Any) -> Iterator[None]:
        replaced = []
        try:
            for owner, name, local in _local_parameters(module, mesh):
                replaced.append((owner, name, owner._parameters[name]))
                owner._parameters[name] = local  # type: ignore[assignment]  # not a leaf while gradients are recorded
            yield
        finally:
            for owner, name, parameter in replaced:
                owner._parameters[name] = parameter


def check_heads(module: nn.Module, ranks: int) -> None:
    """Raise a ValueError unless each of `ranks` gets full heads of an attention module, and equally many."""
    if isinstance(module, KimiDeltaAttention):
        heads = {"linear_num_heads": module.num_heads, "linear_num_value_heads": module.num_value_heads}
    else:
        config = getattr(module, "config", None)
        names = ("num_attention_heads", "num_key_value_heads")
        heads = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    if any(number % ranks for number in heads.values()):
        largest = math.gcd(*heads.values())
        raise ValueError(
            f"{' and '.join(heads)} must be multiples of tp_size = {ranks}, got "
            f"{' and '.join(map(str, heads.values()))}: a rank holds full heads. Use a tp_size that divides {largest}"
        )


def _local_parameters(module: nn.Module, mesh: Any) -> list[tuple[nn.Module, str, Tensor]]:
    """Return (owner, name, this rank's part) of each parameter that a forward reads other than it is stored."""
    own: dict[str, Any] = {name: p for name, p in module._parameters.items() if is_dtensor(p)}
    found: list[tuple[nn.Module, str, Tensor]] = [(module, name, p.to_local()) for name, p in own.items()]
    if isinstance(module, KimiDeltaAttention):
        conv, norm = module.conv1d.weight, module.o_norm.weight
        found.append((module.conv1d, "weight", _local_channels(module, _summing(conv, mesh), mesh)))
        if (scale := _summing(norm, mesh)) is not norm:
            found.append((module.o_norm, "weight", scale))
    return found


def _local_channels(layer: KimiDeltaAttention, taps: Tensor, mesh: Any) -> Tensor:
    """Return the taps [(2 H K + HV V) / ranks, 1, W] of this rank's q, k and v heads, of [2 H K + HV V, 1, W]."""
    q, v = layer.num_heads * layer.head_dim, layer.num_value_heads * layer.value_head_dim
    ranks, rank = mesh.size(), mesh.get_local_rank()
    return torch.cat([part.chunk(ranks)[rank] for part in taps.split([q, q, v])])


def _summing(replicated: Tensor, mesh: Any) -> Tensor:
    """Return `replicated`, which every rank holds; its gradient is summed over the ranks."""
    if not (torch.is_grad_enabled() and replicated.requires_grad):
        return replicated
    return DTensor.from_local(replicated, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


if torch.distributed.is_available():
    ALL_PARALLEL_STYLES.register("kda_local_heads", LocalHeads())
    # Input channels by rank, outputs summed over the ranks: each rank gets those of its heads.
    ALL_PARALLEL_STYLES.register("kda_rowwise_to_heads", RowwiseParallel(output_layouts=Shard(-1)))
