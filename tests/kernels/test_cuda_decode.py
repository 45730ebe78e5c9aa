"""The decode kernel in the emulator: stages of eight tokens, plans, small states, misaligned memory, the same bits.

test_decode.py and test_int8_state.py run it, too, as `sm90@emulator` and so on: with pools, drafts and padding.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kda_layers import kda
from kda_layers.kernels.kda.contract import DecodeInputs, Inputs
from kda_layers.kernels.kda.cuda.decode.decode import STAGE
from kda_layers.states import quantize_state
from tests import cuda_emulator
from tests.kernels import emulated
from tests.kernels.cases import (
    FP16,
    Case,
    check,
    ids,
    limits_of,
    make_inputs,
    options,
    oracle,
    sequences,
    step_inputs,
    to_fp64,
)

pytestmark = pytest.mark.emulated

STEP = ("q", "k", "v", "g", "beta")
ONE = Case(T=1, B=2, state=True)
NARROW = Case(T=3, H=1, K=64, V=64, dtype=FP16, state=True)

CASES = [
    *(replace(case, T=T, slow=True) for case in (ONE, NARROW) for T in (1, STAGE, STAGE + 1, 2 * STAGE + 1)),
    *(replace(ONE, layout=layout, group=2) for layout in ("fused", "heads_first")),
    *(Case(lengths=(3, 0, 1, 9), H=1, group=2, state=True, offsets_dtype=t) for t in (torch.int32, torch.int64)),
]  # fmt: skip


def step(x: Inputs, state: Tensor | None = None, seed: int = 0, **indices: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and final states, from copies of the initial states unless `state` is given."""
    state = emulated.end_of_memory(x.initial_state.clone() if state is None else state)
    return emulated.decode(step_inputs(x, state=state, **indices), seed=seed), state


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def check_in_budget(x: Inputs, got: tuple[Tensor, Tensor]) -> None:
    results = (oracle(cast(x)) for cast in (to_fp64, lambda x: x))
    truth, yardstick = ({"o": r.o, "state": r.final_state} for r in results)
    check(dict(zip(truth, got, strict=True)), truth, limits_of(yardstick, truth, x.q.dtype))


@pytest.mark.parametrize("case", **ids(CASES))
def test_against_fp64(case: Case) -> None:
    x = make_inputs(case)
    got = step(x)
    check_in_budget(x, got)
    assert same(step(x, seed=1), got)


def test_resets() -> None:
    """Log-decays of -200 and -1e4 in single channels, and in all of one token."""
    x = make_inputs(replace(ONE, T=5, gate="log_decay"))
    x.g[0, 1], x.g[1, 2, :, ::7], x.g[1, 4, :, ::3] = -1e4, -200.0, -1e4
    got = step(x)
    assert all(t.isfinite().all() for t in got)
    check_in_budget(x, got)


def test_a_state_in_bf16() -> None:
    """The state is rounded where it is written: after each stage of eight tokens."""
    x = make_inputs(replace(ONE, T=STAGE, slow=True))
    rounded = x._replace(initial_state=x.initial_state.bfloat16().float())
    o, state = step(x, x.initial_state.bfloat16())
    check_in_budget(rounded, (o, state.float()))


def int8_step(x: Inputs, states: tuple[Tensor, Tensor], **launch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, states and scales, from copies of int8 states."""
    state, scale = (emulated.end_of_memory(t.clone()) for t in states)
    return emulated.decode(step_inputs(x, state=state, state_scale=scale), **launch), state, scale


@pytest.mark.parametrize("launch", [{"seed": 1}, {"busy": True}, {"warps": 2}, {"rows": 8, "warps": 1}], ids=str)
@pytest.mark.parametrize("case", **ids([replace(ONE, T=3), NARROW]))
def test_tilings_of_an_int8_state(case: Case, launch: dict[str, int]) -> None:
    x = make_inputs(case)
    states = quantize_state(x.initial_state)
    for got, want in zip(int8_step(x, states, **launch), int8_step(x, states), strict=True):
        assert torch.equal(got, want)


def test_stages_of_an_int8_state() -> None:
    """A call of nine tokens, more than a stage, gives the bits of nine calls."""
    x = make_inputs(replace(ONE, T=STAGE + 1, slow=True))
    states = quantize_state(x.initial_state)
    o, *got = int8_step(x, states)
    for t in range(STAGE + 1):
        token = x._replace(**{n: getattr(x, n)[:, t : t + 1] for n in STEP})
        token_o, *states = int8_step(token, states)
        assert torch.equal(token_o, o[:, t : t + 1])
    assert torch.equal(got[0], states[0])
    assert torch.equal(got[1], states[1])


@pytest.mark.parametrize("busy", [False, True])
def test_padding_of_an_int8_state(busy: bool) -> None:
    """A sequence without a slot gets zeros in every row, and changes no state."""
    x = make_inputs(ONE)
    states = quantize_state(x.initial_state)
    state, scale = (t.clone() for t in states)
    slots = torch.tensor([-1, 1])
    o = emulated.decode(step_inputs(x, state=state, state_scale=scale, state_indices=slots), busy=busy)
    want_o, want, want_scale = int8_step(x, states)
    assert not o[0].any()
    assert torch.equal(o[1], want_o[1])
    assert torch.equal(state, torch.stack((states[0][0], want[1])))
    assert torch.equal(scale, torch.stack((states[1][0], want_scale[1])))


def test_a_misaligned_int8_state() -> None:
    x = make_inputs(replace(ONE, T=2))
    state, scale = quantize_state(x.initial_state)
    view = torch.cat((state.flatten()[:1], state.flatten()))[1:].view_as(state)
    want_o, *want = int8_step(x, (state, scale))
    assert torch.equal(emulated.decode(step_inputs(x, state=view, state_scale=scale)), want_o)
    assert torch.equal(view, want[0])
    assert torch.equal(scale, want[1])


def test_memory_accesses_of_an_int8_state_are_ordered() -> None:
    x = make_inputs(replace(NARROW, T=STAGE + 1))
    states = quantize_state(x.initial_state)
    with cuda_emulator.order_checked():
        int8_step(x, states)


def test_a_prefill_to_a_bf16_state() -> None:
    """Decoding reads what `kda` returned, and nothing else is rounded."""
    x = make_inputs(replace(ONE, T=20, slow=True))
    head, tail = (x._replace(**{n: getattr(x, n)[:, part] for n in STEP}) for part in (slice(19), slice(19, None)))
    final = dict(return_final_state=True, state_dtype=torch.bfloat16)
    prefilled = kda(*head[:5], **options(x), **final, backend="eager").final_state
    o, state = step(tail, prefilled)
    wide_o, wide_state = step(tail, prefilled.float())
    assert torch.equal(o, wide_o)
    assert torch.equal(state, wide_state.bfloat16())


@pytest.mark.parametrize("shape", [{"busy": True}, {"warps": 2}], ids=str)
@pytest.mark.parametrize("case", **ids([replace(ONE, T=2), NARROW]))
def test_tilings(case: Case, shape: dict[str, int]) -> None:
    x = make_inputs(case)
    state = x.initial_state.clone()
    o = emulated.decode(step_inputs(x, state=state), **shape)
    assert same((o, state), step(x))


def test_batched_packed_and_alone() -> None:
    """A sequence gives the same bits alone, in a batch, packed, and token by token."""
    x = make_inputs(replace(ONE, T=9, B=3))
    o, state = step(x)
    flat = {n: getattr(x, n).flatten(0, 1)[None] for n in STEP}
    packed = x._replace(**flat, cu_seqlens=9 * torch.arange(4, dtype=torch.int32))
    assert same(step(packed), (o.flatten(0, 1)[None], state))
    for n, alone in enumerate(sequences(packed)):
        assert same(step(alone), (o[n : n + 1], state[n : n + 1]))
    one_by_one = x.initial_state.clone()
    for t in range(9):
        token = x._replace(**{n: getattr(x, n)[:, t : t + 1] for n in STEP})
        assert torch.equal(emulated.decode(step_inputs(token, state=one_by_one)), o[:, t : t + 1])
    assert torch.equal(one_by_one, state)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_a_pool_of_states(dtype: torch.dtype) -> None:
    """Slots outside of the pool change nothing and give zeros; no other slot is touched."""
    x = make_inputs(replace(ONE, T=2, B=5))
    slots = torch.tensor([5, -1, 3, 7, 0], dtype=dtype)
    inside = [0, 2, 4]
    pool = torch.full((7, *x.initial_state.shape[1:]), torch.nan)
    pool[slots[inside].long()] = x.initial_state[inside]
    o, pool = step(x, pool, state_indices=slots)
    want_o, want = step(x)
    assert torch.equal(o[inside], want_o[inside])
    assert not o[[1, 3]].any()
    assert torch.equal(pool[slots[inside].long()], want[inside])
    assert pool[[1, 2, 4, 6]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_drafts(dtype: torch.dtype) -> None:
    """Packed drafts of 1, 3 and 2 tokens: read from the accepted slot, written to one slot for each token."""
    x = make_inputs(Case(lengths=(1, 3, 2), H=1, slow=True, state=True, offsets_dtype=dtype))
    slots, accepted = torch.arange(9, dtype=dtype).view(3, 3).flip(0), torch.tensor([3, 1, 2], dtype=dtype)
    pool = torch.full((9, *x.initial_state.shape[1:]), torch.nan)
    pool[slots[torch.arange(3), accepted - 1].long()] = x.initial_state
    before = pool.clone()
    o, pool = step(x, pool, state_indices=slots, num_accepted=accepted)
    written = torch.zeros(9, dtype=torch.bool)
    for n, s in enumerate(sequences(x)):
        first, tokens = int(x.cu_seqlens[n]), s.q.shape[1]
        for t in range(tokens):
            head = s._replace(**{name: getattr(s, name)[:, : t + 1] for name in STEP})
            want_o, want = step(head)
            assert torch.equal(o[:, first : first + t + 1], want_o)
            assert torch.equal(pool[slots[n, t]], want[0])
        written[slots[n, :tokens].long()] = True
    assert torch.equal(pool[~written].nan_to_num(7.0), before[~written].nan_to_num(7.0))


def test_a_draft_longer_than_its_slots() -> None:
    """Its last tokens' states are kept nowhere: what follows in the table of slots is not read."""
    x = make_inputs(Case(lengths=(3, 3), H=1, state=True))
    pool = x.initial_state.repeat_interleave(2, 0)
    o, pool = step(x, pool, state_indices=torch.arange(4).view(2, 2))
    want_o, _ = step(x)
    assert torch.equal(o, want_o)
    first_two = x._replace(**{n: getattr(x, n)[:, [0, 1, 3, 4]] for n in STEP}, cu_seqlens=torch.tensor([0, 2, 4]))
    assert torch.equal(pool[1::2], step(first_two)[1])


def test_a_misaligned_state() -> None:
    x = make_inputs(replace(ONE, T=2))
    store = torch.full((4 * 128 * 128 + 1,), 7.0)
    view = store[1:].view(2, 2, 128, 128)
    view.copy_(x.initial_state)
    o = emulated.decode(step_inputs(x, state=view))
    assert same((o, view), step(x))
    view.fill_(7.0)
    assert (store == 7.0).all()


def test_misaligned_inputs() -> None:
    """The launcher copies a tensor that a lane cannot read with one load."""
    x = make_inputs(replace(ONE, T=2))
    moved = {n: torch.cat((t.flatten()[:1], t.flatten()))[1:].view_as(t) for n in "qkg" for t in [getattr(x, n)]}
    state = x.initial_state.clone()
    inputs: DecodeInputs = step_inputs(x._replace(**moved), state=state)
    assert inputs.q.data_ptr() % 4
    assert same((emulated.decode(inputs), state), step(x))
