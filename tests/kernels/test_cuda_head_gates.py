"""Gates of heads in the CUDA kernels, in the emulator: one logit of a token, with the bits of the logit repeated.

The tests of every backend compare the operators with fp64 for such gates, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers.kernels.kda.contract import HEAD_GATES, Inputs
from kda_layers.kernels.kda.cuda.decode import decode as decode_launcher
from kda_layers.kernels.kda.reference import activate
from kda_layers.states import quantize_state
from tests.kernels import emulated
from tests.kernels.cases import (
    BF16,
    FP16,
    FP32,
    Case,
    check,
    ids,
    limits_of,
    make_inputs,
    oracle,
    step_inputs,
    to_fp64,
)
from tests.kernels.test_head_gates import for_each_channel

pytestmark = pytest.mark.emulated

FUSED = ("gate", "beta", "qk_l2norm", HEAD_GATES)
NARROW = Case(H=1, K=64, V=64, dtype=FP16, head_gates=True, state=True)


def of_heads(case: Case) -> tuple[Inputs, Inputs, Inputs]:
    """The inputs of a case, and as kernels get them: with the gates of heads, and with these repeated."""
    x = make_inputs(case)
    return x, activate(x, FUSED), for_each_channel(x)


def in_wider_rows(t: Tensor, before: int) -> Tensor:
    """The same values as a slice, from element `before` on, of rows that hold more than a token's heads."""
    B, T, HV = t.shape[:3]
    rows = t.new_full((B, T, before + HV + 4), torch.nan)
    rows[..., before : before + HV] = t[..., 0]
    return rows[..., before : before + HV, None]


# ---------------------------------------------------------------- decoding

STEPS = [
    *(Case(T=2, B=2, H=1, group=2, gate=g, head_gates=True, state=True) for g in ("lower_bound", "log_decay")),
    *(replace(NARROW, T=9, gate="softplus", g_wide=wide) for wide in (False, True)),
    Case(lengths=(3, 0, 1), H=1, group=2, head_gates=True, dt_bias=False, A_log=False, state=True),
]


def step(x: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and the states after them, from copies of the initial states in `dtype`."""
    assert x.initial_state is not None
    states = dict(state=x.initial_state.to(dtype, copy=True))
    if dtype == torch.int8:
        states = dict(zip(("state", "state_scale"), quantize_state(x.initial_state), strict=True))
    return [emulated.decode(step_inputs(x, **states)), *states.values()]


@pytest.mark.parametrize("case", **ids(STEPS))
def test_steps_against_fp64(case: Case) -> None:
    x, native, _ = of_heads(case)
    truth, yardstick = (dict(o=r.o, state=r.final_state) for r in (oracle(cast(x)) for cast in (to_fp64, lambda x: x)))
    check(dict(zip(truth, step(native, FP32), strict=True)), truth, limits_of(yardstick, truth, x.q.dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.int8], ids=["fp32", "bf16", "int8"])
@pytest.mark.parametrize("case", **ids(STEPS))
def test_bits_of_a_step(case: Case, dtype: torch.dtype) -> None:
    _, native, repeated = of_heads(case)
    for got, want in zip(step(native, dtype), step(repeated, dtype), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("case", **ids(STEPS))
def test_bits_of_a_verification(case: Case) -> None:
    """The updates of drafted tokens, too: they keep a decay for each channel."""
    _, native, repeated = of_heads(case)
    HV, V, K = native.initial_state.shape[1:]
    results = []
    for x in (native, repeated):
        state = x.initial_state.clone()
        updates = torch.zeros(state.shape[0], case.T if case.lengths is None else 3, HV, 2 * K + V)
        more: dict[str, Any] = dict(num_accepted=torch.zeros(state.shape[0], dtype=torch.int32))
        o = emulated.verify(step_inputs(x, state=state, updates=updates, **more))
        results.append((o, state, updates))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    decays = results[0][2][..., :K]
    assert decays.count_nonzero()
    assert torch.equal(decays, decays[..., :1].expand_as(decays))


@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "fp32"])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_gates_of_a_step_are_read_where_they_are(before: int, wide: bool) -> None:
    """A head's logit and bias need no alignment, and the rows of tokens any stride: nothing is copied."""
    _, x, _ = of_heads(Case(T=3, B=2, H=3, head_gates=True, g_wide=wide, state=True))
    assert x.dt_bias is not None
    moved = x._replace(g=in_wider_rows(x.g, before), dt_bias=torch.cat((x.dt_bias[:1], x.dt_bias))[1:])
    inputs = step_inputs(moved, state=x.initial_state.clone())
    machine = emulated.Emulator()
    *_, read = decode_launcher.pack(inputs, torch.empty_like(x.v), machine)
    assert read is inputs
    o = decode_launcher.decode(inputs, machine)
    want_o, want = step(x, FP32)
    assert torch.equal(o, want_o)
    assert torch.equal(inputs.state, want)
