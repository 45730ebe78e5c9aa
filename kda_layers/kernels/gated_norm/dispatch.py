"""The backends of `gated_rms_norm`; see `registry`."""

from __future__ import annotations

from ..registry import Registry
from .contract import Backend, Problem

GATED_NORM: Registry[Problem, Backend] = Registry("gated_norm", __package__, Problem, advisory=True)
