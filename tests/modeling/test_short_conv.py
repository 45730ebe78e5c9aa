"""The short convolution against a loop over tokens that keeps a window of the last W inputs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from kda_layers.kernels.fused.short_conv import short_conv
from tests.kernels.cases import BF16, FP16, FP32, FP64, budget, error
from tests.modeling.common import same

D = 6
LENGTHS = (0, 1, 7, 0, 3, 1, 0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def loop(x: Tensor, weight: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One sequence, x [T, D] -> y [T, D] and the last W inputs [D, W], in the wider of the two dtypes."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    window = x.new_zeros(weight.shape) if state is None else state.clone()
    y = x.new_zeros(x.shape)
    for t, token in enumerate(x):
        window = torch.cat((window[:, 1:], token[:, None]), 1)
        total = torch.zeros(D, dtype=wide)
        for i in range(weight.shape[1]):
            total = total + window[:, i] * weight[:, i]
        y[t] = total * torch.sigmoid(total)
    return y, window


def expected(x: Tensor, weight: Tensor, state: Tensor | None, lengths: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
    rows = x if lengths is None else x[0].split(lengths)
    y, states = zip(
        *(loop(row, weight, None if state is None else state[n]) for n, row in enumerate(rows)), strict=True
    )
    return torch.stack(y) if lengths is None else torch.cat(y)[None], torch.stack(states)


def offsets(lengths: tuple[int, ...] | None, dtype: torch.dtype = torch.int32) -> Tensor | None:
    return None if lengths is None else torch.tensor((0, *itertools.accumulate(lengths)), dtype=dtype)


@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "state"])
@pytest.mark.parametrize("T", [1, 3, 4, 6])
def test_padding_is_as_if_it_were_not_there(T: int, with_state: bool) -> None:
    """Every pattern of padding, none and all of it too, one row each."""
    N = 2**T
    mask = (torch.arange(N)[:, None] >> torch.arange(T)) % 2 == 1
    x, weight = normal(N, T, D), normal(D, 4, seed=1)
    x = x * mask[..., None]
    state = normal(N, D, 4, seed=2) if with_state else None
    y, new = short_conv(x, weight, state, mask=mask)
    assert y.isfinite().all()
    for n in range(N):
        alone = loop(x[n, mask[n]], weight, None if state is None else state[n])
        same((y[n, mask[n]], new[n]), alone)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=str)
@pytest.mark.parametrize("weight_dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_dtypes(dtype: torch.dtype, weight_dtype: torch.dtype, lengths: tuple[int, ...] | None) -> None:
    """As wrong as the loop in the wider of the two dtypes, and results in that of x."""
    N = 3 if lengths is None else len(lengths)
    x, state = (normal(*shape, seed=seed).to(dtype) for seed, shape in enumerate(((N, 13, D), (N, D, 4))))
    if lengths is not None:
        x = x[:1, : sum(lengths)]
    weight = normal(D, 4, seed=2).to(weight_dtype)
    truth, last = expected(x.double(), weight.double(), state.double(), lengths)
    yardstick, _ = expected(x, weight, state, lengths)
    y, new = short_conv(x, weight, state, offsets(lengths))
    assert y.dtype == new.dtype == dtype
    assert error(y, truth) <= budget(error(yardstick, truth), dtype)
    assert torch.equal(new.double(), last)


@pytest.mark.parametrize("case", ["whole", "fresh", "packed", "padded"])
def test_gradients(case: str) -> None:
    lengths = (0, 1, 5, 1) if case == "packed" else None
    N = 4 if lengths else 2
    x, weight, state = normal(1 if lengths else N, 7, D), normal(D, 3, seed=1), normal(N, D, 3, seed=2)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 0], [1] * 7]).bool() if case == "padded" else None
    x = x if mask is None else x * mask[..., None]

    def outputs(x: Tensor, weight: Tensor, *state: Tensor) -> tuple[Tensor, Tensor]:
        return short_conv(x, weight, *state, cu_seqlens=offsets(lengths), mask=mask)

    inputs = (x, weight) if case == "fresh" else (x, weight, state)
    assert gradcheck(outputs, [t.requires_grad_() for t in inputs])
