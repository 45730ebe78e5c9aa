"""The backends of `short_conv`; see `registry`."""

from __future__ import annotations

from ..registry import Registry
from .contract import Backend, Problem

SHORT_CONV: Registry[Problem, Backend] = Registry(
    "short_conv", __package__, Problem, lambda b: (b.name, b.transparent), advisory=True
)
