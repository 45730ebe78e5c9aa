"""The backends of `linear_step`; see `registry`."""

from __future__ import annotations

from ..registry import Registry
from .contract import Backend, Problem

LINEAR_STEP: Registry[Problem, Backend] = Registry(
    "linear_step", __package__, Problem, lambda b: (b.name, b.transparent), advisory=True
)
