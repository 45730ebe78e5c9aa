"""torch's default device decides where a caller's new tensors lie, and nothing about calls whose tensors are there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kda_layers import KDAConfig, KimiDeltaAttention, kda_step
from kda_layers.kernels import biased_attention
from kda_layers.kernels.fused.short_conv import short_conv
from kda_layers.kernels.kda.contract import Inputs
from kda_layers.kernels.kda.reference import recurrence
from kda_layers.modeling.layer.cache import with_kda_layers
from tests.kernels.cases import FP32, Case, call, make_inputs, options

SMALL = dict(H=1, group=2, K=4, V=6, dtype=FP32, state=True)
Call = Callable[[], list[Tensor]]  # of tensors made before


@contextlib.contextmanager
def set_default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def with_gradients(f: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> list[Tensor]:
    """Outputs of `f`, and gradients of the tensors for ones."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = f(*leaves)
    return [*out, *torch.autograd.grad(out, leaves, [torch.ones_like(t) for t in out])]


def chunks(case: Case, function: Callable[[Inputs], tuple[Tensor, ...]]) -> Call:
    x = make_inputs(case)
    return lambda: with_gradients(lambda *t: function(Inputs(*t, *x[len(t) :])), *x[:8])


def steps(case: Case, slots: Tensor | None = None) -> Call:
    x = make_inputs(case)

    def run() -> list[Tensor]:
        state = x.initial_state.clone()
        return [kda_step(*x[:5], state, **options(x), state_indices=slots), state]

    return run


def attention(offsets: Tensor | None) -> Call:
    tensors = (*(torch.randn(1, 9, 2, 4) for _ in range(3)), torch.randn(1, 2, 1, 9))
    return lambda: with_gradients(lambda *t: (biased_attention(*t, cu_seqlens=offsets),), *tensors)


def convolution(offsets: Tensor | None) -> Call:
    x, weight = torch.randn(1, 9, 6), torch.randn(6, 4)
    return lambda: with_gradients(lambda x, w: short_conv(x, w, None, offsets), x, weight)


def layer(record: bool) -> Call:
    """A prompt, a token and a few more through a layer and a cache."""
    made, x = KimiDeltaAttention(8, 1, 4, layer_idx=0), torch.randn(1, 9, 8)

    @torch.no_grad()
    def run() -> list[Tensor]:
        cache = DynamicCache(config=KDAConfig(num_hidden_layers=1))
        if record:
            cache = with_kda_layers(cache)
            cache.activate_past_recording()
        out = [made(part, past_key_values=cache) for part in x.split((5, 1, 3), 1)]
        if record:
            cache.crop(-2)
        return [*out, cache.layers[0].recurrent_states[0]]

    return run


OFFSETS = torch.tensor([0, 4, 9])
CALLS: dict[str, Callable[[], Call]] = {
    "chunks": lambda: chunks(Case(T=70, B=2, **SMALL), call),
    "packed chunks": lambda: chunks(Case(lengths=(3, 0, 66), **SMALL), call),
    "recurrence": lambda: chunks(Case(T=70, B=2, **SMALL), recurrence),
    "steps": lambda: steps(Case(T=3, B=2, **SMALL)),
    "packed steps": lambda: steps(Case(lengths=(3, 0, 2), **SMALL)),
    "steps in slots": lambda: steps(Case(T=3, B=2, **SMALL), torch.tensor([1, 0])),
    "attention": lambda: attention(None),
    "packed attention": lambda: attention(OFFSETS),
    "convolution": lambda: convolution(None),
    "packed convolution": lambda: convolution(OFFSETS),
    "layer": lambda: layer(record=False),
    "recorded layer": lambda: layer(record=True),
}


@pytest.mark.parametrize("default", [lambda: torch.device("meta"), set_default_device], ids=["with", "set"])
@pytest.mark.parametrize("name", CALLS)
def test_tensors_on_the_cpu_do_not_look_at_the_default(
    name: str, default: Callable[[], contextlib.AbstractContextManager]
) -> None:
    torch.manual_seed(0)
    run = CALLS[name]()
    want = run()
    with default():
        got = run()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
