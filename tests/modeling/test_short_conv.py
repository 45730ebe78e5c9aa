"""The short convolution against a loop over tokens that keeps a window of the last W inputs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from kda_layers.kernels.short_conv import short_conv
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
@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("lengths", [None, LENGTHS, (12,), (0,) * 3 + (12,)], ids=str)
def test_against_the_loop(lengths: tuple[int, ...] | None, W: int, with_state: bool) -> None:
    B, N = (3, 3) if lengths is None else (1, len(lengths))
    x, weight = normal(B, 12, D), normal(D, W, seed=1)
    state = normal(N, D, W, seed=2) if with_state else None
    before = None if state is None else state.clone()
    for dtype in (torch.int32, torch.int64):
        same(short_conv(x, weight, state, offsets(lengths, dtype)), expected(x, weight, state, lengths))
    assert state is None or torch.equal(state, before)


@pytest.mark.parametrize("split", range(10))
def test_continued_from_any_split(split: int) -> None:
    x, weight = normal(2, 9, D), normal(D, 4, seed=1)
    whole = short_conv(x, weight)
    first, state = short_conv(x[:, :split], weight)
    second, state = short_conv(x[:, split:], weight, state)
    same((torch.cat((first, second), 1), state), whole)


def test_one_step_at_a_time() -> None:
    x, weight = normal(2, 9, D), normal(D, 4, seed=1)
    outputs, state = [], None
    for t in range(9):
        y, state = short_conv(x[:, t : t + 1], weight, state)
        outputs.append(y)
    same((torch.cat(outputs, 1), state), short_conv(x, weight))


@pytest.mark.parametrize("with_state", [False, True], ids=["fresh", "state"])
@pytest.mark.parametrize("T", [1, 3, 4, 9])
def test_left_padding_is_as_if_it_were_not_there(T: int, with_state: bool) -> None:
    """Every number of padding tokens, none and all of them too, one row each."""
    padding = torch.arange(T + 1)
    x, weight = normal(T + 1, T, D), normal(D, 4, seed=1)
    x[torch.arange(T) < padding[:, None]] = 0
    state = normal(T + 1, D, 4, seed=2) if with_state else None
    y, new = short_conv(x, weight, state, left_padding=padding)
    for n in range(T + 1):
        alone = loop(x[n, n:], weight, None if state is None else state[n])
        same((y[n, n:], new[n]), alone)


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
    padding = torch.tensor([2, 0]) if case == "padded" else None

    def outputs(x: Tensor, weight: Tensor, *state: Tensor) -> tuple[Tensor, Tensor]:
        return short_conv(x, weight, *state, cu_seqlens=offsets(lengths), left_padding=padding)

    inputs = (x, weight) if case == "fresh" else (x, weight, state)
    assert gradcheck(outputs, [t.requires_grad_() for t in inputs])
