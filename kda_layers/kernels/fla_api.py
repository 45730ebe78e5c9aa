"""The interface of flash-linear-attention over our operator; see `kda.fla.api` and `kda.fla.gated_delta_rule`."""

from .kda.fla import api, gated_delta_rule
from .kda.fla.api import *  # noqa: F403
from .kda.fla.gated_delta_rule import *  # noqa: F403

__all__ = [*api.__all__, *gated_delta_rule.__all__]
