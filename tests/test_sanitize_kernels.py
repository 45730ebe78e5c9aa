"""The program of `make sanitize` with another backend: the truth, the pools of states, the end."""

from __future__ import annotations

import pytest
import torch

from tools import sanitize_kernels


@pytest.fixture(autouse=True)
def _few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize_kernels, "CHUNKS", sanitize_kernels.CHUNKS[-2:-1])
    monkeypatch.setattr(sanitize_kernels, "TRAININGS", sanitize_kernels.TRAININGS[-1:])
    monkeypatch.setattr(sanitize_kernels, "WIDTHS", (64,))
    monkeypatch.setattr(sanitize_kernels, "STATES", (torch.float32, torch.int8))  # all that eager takes


def test_every_case_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.no_grad():
        sanitize_kernels.main("cpu", "eager")
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "all 20 cases"
    assert len(lines) == 20
    assert lines[0].startswith("kda group=2,gate=log_decay,g_wide=True: o ")
    assert lines[1].startswith("gradients T=70,group=2,gate=log_decay,g_wide=True,beta=given: o ")
    assert lines[2].startswith("kda_verify K=64, bfloat16, state float32: o ")
    assert lines[-1].startswith("kda_step many heads, K=64, float16, state int8: o ")


def test_a_kernel_that_does_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize_kernels, "kda_step", lambda q, k, v, *args, **options: torch.zeros_like(v))
    message = "errors of kda_step one token, K=64, bfloat16, state float32 must be below 0.03, got .*'o': 1.0"
    with pytest.raises(RuntimeError, match=message), torch.no_grad():
        sanitize_kernels.main("cpu", "eager")
