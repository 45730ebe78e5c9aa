"""The backends of `layer_step`; see `registry`."""

from __future__ import annotations

from ..registry import Registry
from .contract import Backend, Problem

LAYER_STEP: Registry[Problem, Backend] = Registry("layer_step", __package__, Problem, advisory=True)
