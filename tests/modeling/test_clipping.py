"""Clipping by one kernel for each dtype has the bits of torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kda_layers.modeling.cuda_graphs import clipping
from kda_layers.modeling.cuda_graphs.clipping import clip_grad_norm_
from tests.kernels.cases import BF16, DEVICES, FP64

FP16, FP32 = torch.float16, torch.float32
DTYPES = [(BF16, FP32), (FP16, FP32), (BF16, FP16), (BF16, FP32, FP64), (FP16, BF16, FP32), (BF16,), (FP32,)]
on_all_dtypes = pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: " ".join(str(x)[6:] for x in d))
on_all_values = pytest.mark.parametrize("value", [None, float("inf"), float("-inf"), float("nan")])
MAX_NORM = 3.337  # the coefficient has more bits than bfloat16


def parameters(dtypes: Any, device: str, value: float | None = None) -> list[nn.Parameter]:
    """Parameters of odd sizes with gradients, one of them with an element `value`, and one without a gradient."""
    generator, found = torch.Generator().manual_seed(0), []
    for n, dtype in enumerate(3 * dtypes):
        p = nn.Parameter(torch.empty(7 + n, 131, dtype=dtype, device=device))
        p.grad = (torch.randn(p.shape, generator=generator) * 3).to(device, dtype)
        found.append(p)
    if value is not None:
        found[1].grad[3, 5] = value
    return [*found, nn.Parameter(torch.ones(2, device=device))]


def bits(norm: Tensor, ps: list[nn.Parameter]) -> list[Tensor]:
    return [norm, *(p.grad for p in ps if p.grad is not None)]


def check_same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_norm", [MAX_NORM, 1e-7, 1e7])
@on_all_dtypes
@on_all_values
def test_bits_of_torch(value: float | None, dtypes: Any, max_norm: float, device: str) -> None:
    got, want = parameters(dtypes, device, value), parameters(dtypes, device, value)
    norms = clip_grad_norm_(iter(got), max_norm), nn.utils.clip_grad_norm_(want, max_norm)
    check_same(bits(norms[0], got), bits(norms[1], want))
    if value is None and max_norm == MAX_NORM:
        assert norms[0] > max_norm, "nothing is clipped"


@pytest.mark.parametrize("max_norm", [MAX_NORM, 1e-7, 1e7])
@on_all_dtypes
@on_all_values
def test_rounding_of_a_gpu(value: float | None, dtypes: Any, max_norm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with gradients of several dtypes, the coefficient is rounded to the dtype of the gradient."""
    monkeypatch.setattr(clipping, "DEVICES", ("cpu",))
    got, want = parameters(dtypes, "cpu", value), parameters(dtypes, "cpu", value)
    norm = nn.utils.get_total_norm([p.grad for p in want if p.grad is not None])
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in want:
        if p.grad is not None:
            factor = coefficient.to(p.grad.dtype) if len(dtypes) > 1 else coefficient
            p.grad = (p.grad.double() * factor.double()).to(FP64 if p.grad.dtype == FP64 else FP32).to(p.grad.dtype)
    check_same(bits(clip_grad_norm_(got, max_norm), got), bits(norm, want))


def test_rounding_shows() -> None:
    """The values above would differ if the coefficient were not rounded."""
    ps = parameters((BF16, FP32), "cpu")
    coefficient = MAX_NORM / (nn.utils.get_total_norm([p.grad for p in ps if p.grad is not None]) + 1e-6)
    gradient = ps[0].grad
    assert gradient is not None
    assert not torch.equal(gradient * coefficient.to(BF16), (gradient.float() * coefficient).to(BF16))


def test_no_gradients() -> None:
    p = nn.Parameter(torch.ones(2))
    assert clip_grad_norm_([p], 1.0) == nn.utils.clip_grad_norm_([p], 1.0) == 0
