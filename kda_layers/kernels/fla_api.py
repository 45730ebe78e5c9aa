"""The interface of flash-linear-attention over our operator; see `kda.fla.api`."""

from .kda.fla.api import *  # noqa: F403
from .kda.fla.api import __all__ as __all__
