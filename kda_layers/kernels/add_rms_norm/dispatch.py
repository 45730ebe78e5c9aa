"""The backends of `add_rms_norm`; see `registry`."""

from __future__ import annotations

from ..registry import Registry
from .contract import Backend, Problem

ADD_RMS_NORM: Registry[Problem, Backend] = Registry("add_rms_norm", __package__, Problem, advisory=True)
