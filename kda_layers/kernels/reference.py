"""The definition of the operator in plain torch; see `kda.reference`."""

from .kda.reference import activate, l2norm, log_decay, recurrence

__all__ = ["activate", "l2norm", "log_decay", "recurrence"]
