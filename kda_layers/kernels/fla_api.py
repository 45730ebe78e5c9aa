"""The interface of flash-linear-attention over our operator; see `kda.fla_api`."""

from .kda.fla_api import *  # noqa: F403
from .kda.fla_api import __all__ as __all__
