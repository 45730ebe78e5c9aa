"""`kda_layers.testing`, as someone who writes a backend uses it, and the backends that are under test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kda_layers.kernels.cuda.arch import ARCHS
from kda_layers.kernels.declarations import arch_of
from kda_layers.kernels.kda.backends.cuda import CudaBackend
from kda_layers.kernels.kda.contract import KDA, Inputs, KDAOutput
from kda_layers.testing.budgets import FP32
from kda_layers.testing.cases import Case
from kda_layers.testing.oracle import check_backend
from tests.kernels.cases import installed_backends

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


def test_the_kernels_for_this_gpu_are_under_test() -> None:
    """Without a GPU the kernels for Hopper are under test, and no others of ours."""
    capability = arch_of(torch.device("cuda")) if torch.cuda.is_available() else 90
    ours = [n for n in installed_backends() if isinstance(KDA.backends()[n], CudaBackend)]
    assert ours == ([ARCHS[capability].backend] if capability in ARCHS else [])
