"""`kda_layers.testing`, as someone who writes a backend uses it."""

from __future__ import annotations

import pytest
from torch import Tensor

from kda_layers.kernels.kda.contract import Inputs, KDAOutput
from kda_layers.kernels.kda.dispatch import KDA
from kda_layers.testing.budgets import FP32
from kda_layers.testing.cases import Case
from kda_layers.testing.oracle import check_backend

CASE = Case(T=70, H=1, K=16, V=8, group=2, dtype=FP32, state=True)


def test_a_right_backend_passes() -> None:
    check_backend(CASE, "eager", "cpu")


def test_a_wrong_one_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = KDA.backends()["eager"]
    forward = eager.forward

    def wrong(x: Inputs, save: bool) -> tuple[KDAOutput, list[Tensor]]:
        out, saved = forward(x, save)
        return out._replace(o=out.o * 1.03), saved

    monkeypatch.setattr(eager, "forward", wrong)
    with pytest.raises(AssertionError, match=r"^o: error 0\.0"):
        check_backend(CASE, "eager", "cpu")
