"""The backends of `kda` and `kda_step`; see `registry`."""

from __future__ import annotations

from ..registry import Registry
from .contract import Backend, Problem

KDA: Registry[Problem, Backend] = Registry(
    "kda", __package__, Problem, lambda b: (b.name, *sorted(b.fused)), kind=Backend
)
default_problem, problem_of = Problem.default, KDA.problem_of
