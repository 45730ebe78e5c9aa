"""Sequences that are cut over the ranks of a process group: models, and the operator alone."""

from kda_layers.kernels.over_ranks.kda import kda_over_ranks
from kda_layers.kernels.over_ranks.shards import Shards
from kda_layers.modeling.parallel.context_parallel import enable_context_parallel

__all__ = ["Shards", "enable_context_parallel", "kda_over_ranks"]
