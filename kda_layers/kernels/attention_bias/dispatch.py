"""The backends of `biased_attention`; see `registry`."""

from __future__ import annotations

from ..registry import Registry
from .contract import Backend, Problem

ATTENTION: Registry[Problem, Backend] = Registry("biased_attention", __package__, Problem)
default_problem, problem_of = Problem.default, ATTENTION.problem_of
