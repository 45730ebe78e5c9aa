"""The backends of `swiglu`; see `registry`."""

from __future__ import annotations

from ..registry import Registry
from .contract import Backend, Problem

SWIGLU: Registry[Problem, Backend] = Registry(
    "swiglu", __package__, Problem, lambda b: (b.name, b.transparent), advisory=True
)
