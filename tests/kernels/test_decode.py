"""Decoding: `kda_step` token by token is the recurrence, in place, with pools of states and with drafted tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers import KDAOutput, kda_step
from kda_layers.kernels.kda.contract import DecodeInputs, Inputs, problem_of, state_dtype
from tests.kernels.cases import (
    BF16,
    FP16,
    FP32,
    Case,
    call,
    check,
    check_near,
    draws,
    error,
    ids,
    limits_of,
    make_inputs,
    on_every_backend,
    on_every_device,
    on_typical_shapes,
    options,
    oracle,
    outputs,
    poisoned_memory,
    sequences,
    serve,
    to_fp64,
)

STEP = ("q", "k", "v", "g", "beta")


def step(x: Inputs, state: Tensor, backend: str | None = None, **extra: Tensor) -> Tensor:
    """`kda_step` on the tokens of `x`; its initial state is not read."""
    return kda_step(*x[:5], state, **options(x), **extra, backend=backend)


def part(x: Inputs, start: int, end: int, rows: slice = slice(None)) -> Inputs:
    """Tokens start to end of some rows, without the initial state."""
    return x._replace(**{n: getattr(x, n)[rows, start:end] for n in STEP}, initial_state=None)


def serve_step(backend: str, x: Inputs, required: frozenset[str]) -> None:
    state = x.v.new_zeros(1, dtype=state_dtype(x.v.dtype))
    fields = {n: getattr(x, n) if n in Inputs._fields else None for n in DecodeInputs._fields}
    fields |= {"state": state, "initial_state": None}
    serve(backend, problem_of(DecodeInputs(**fields)), required)


def narrow(**fields: Any) -> Case:
    """A case of the smaller width that our kernels have, in fp16."""
    return Case(**{"T": 3, "H": 1, "K": 64, "V": 64, "dtype": FP16, "state": True} | fields)


DECODED = [
    Case(T=70, B=2, state=True),
    Case(T=70, B=2, slow=True, beta_wide=True, g_wide=True, state=True),
    Case(T=9, dtype=FP16, state=True),
    Case(T=70, B=2, K=32, V=64, dtype=FP32, slow=True, state=True),
    Case(T=9, H=2, group=4, slow=True, state=True),
    Case(T=9, B=3, H=1, group=2, K=60, V=100, dtype=FP32, state=True),
    Case(T=9, K=100, V=60, gate="softplus", state=True),
    Case(T=9, gate="softplus", dt_bias=False, beta="2sigmoid", slow=True, state=True),
    Case(T=9, gate="log_decay", beta="given", slow=True, state=True),
    Case(T=9, A_log=False, dt_bias=False, lower_bound=-1.0, state=True),
    Case(T=9, l2norm=False, scale=0.5, state=True),
    *(narrow(beta=beta, beta_wide=wide) for beta in ("2sigmoid", "given") for wide in (False, True)),
    *(narrow(gate=gate, slow=True) for gate in ("softplus", "log_decay")),
    narrow(g_wide=True),
    narrow(B=3, H=3, group=3),
    narrow(l2norm=False, scale=0.5),
    Case(T=9, B=2, group=2, head_gates=True, slow=True, state=True),
    *(narrow(head_gates=True, gate=gate, g_wide=gate == "softplus") for gate in ("softplus", "log_decay")),
    *(Case(T=9, A_log=a, dt_bias=b, state=True) for a, b in ((False, True), (True, False))),
    Case(T=9, layout="fused", B=2, group=2, state=True),
    Case(T=9, layout="heads_first", B=2, K=32, V=64, dtype=FP32, state=True),
]


@on_every_backend
@on_every_device
@pytest.mark.parametrize("case", **ids(DECODED))
def test_token_by_token_against_fp64(case: Case, device: str, backend: str, required_backends: frozenset[str]) -> None:
    drawn = draws(case, backend, device, needs_grad=False)
    serve_step(backend, drawn[0], required_backends)
    names = ("o", "final_state")
    truth, yardstick = (
        {n: torch.stack([getattr(oracle(cast(x)), n) for x in drawn]) for n in names} for cast in (to_fp64, lambda x: x)
    )
    got: dict[str, list[Tensor]] = {n: [] for n in names}
    for x in drawn:
        state = x.initial_state.clone()
        with poisoned_memory():
            o = torch.cat([step(part(x, t, t + 1), state, backend) for t in range(case.T)], 1)
        got["o"].append(o.cpu())
        got["final_state"].append(state.cpu())
    check({n: torch.stack(t) for n, t in got.items()}, truth, limits_of(yardstick, truth, case.dtype))


@on_every_backend
@on_every_device
@on_typical_shapes
@pytest.mark.parametrize("split", [1, 5, 63, 64, 65, 100, 129])
def test_prefill_and_decode_are_one_pass(
    split: int, shape: dict, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """From any token on, by `kda` or by `kda_step`, one or three tokens at a time: outputs, states and checkpoints."""
    T, dtype = 131, shape["dtype"]
    x = make_inputs(Case(T=T, B=2, H=1, group=2, slow=True, state=True, **shape), device)
    serve(backend, problem_of(x), required_backends)
    serve_step(backend, x, required_backends)
    truth, yardstick = (outputs(oracle(cast(x))) for cast in (to_fp64, lambda x: x))
    limits = limits_of(yardstick, truth, dtype)

    head = call(part(x, 0, split)._replace(initial_state=x.initial_state), backend)
    tail = call(part(x, split, T)._replace(initial_state=head.final_state), backend)
    assert error(torch.cat((head.o, tail.o), 1), truth["o"]) <= limits["o"]
    assert error(tail.final_state, truth["final_state"]) <= limits["final_state"]

    for tokens in (1, 3):
        state, o, boundaries = head.final_state.clone(), [head.o], list(head.checkpoints.unbind(1))
        for start in range(split, T, tokens):
            o.append(step(part(x, start, min(start + tokens, T)), state, backend))
            if (start + 1) % 64 == 0:
                boundaries.append(state.clone())
        got = {"o": torch.cat(o, 1), "final_state": state}
        check(got, {n: truth[n] for n in got}, limits)
        if tokens == 1:
            assert error(torch.stack(boundaries, 1), truth["checkpoints"]) <= limits["checkpoints"]


@on_every_backend
@on_every_device
@on_typical_shapes
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_packed_steps(
    offsets_dtype: torch.dtype, shape: dict, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """Sequences with different numbers of new tokens, none among them: each as if it were alone."""
    dtype = shape["dtype"]
    case = Case(lengths=(3, 0, 1, 5, 1), group=2, state=True, offsets_dtype=offsets_dtype, **shape)
    x = make_inputs(case, device)
    serve_step(backend, x, required_backends)
    tokens = [n for n, length in enumerate(case.lengths) if length]
    alone = {
        name: lambda cast, name=name: torch.cat(
            [getattr(oracle(s), name) for s in sequences(cast(x)) if s.q.shape[1]], 1 if name == "o" else 0
        )
        for name in ("o", "final_state")
    }
    state = x.initial_state.clone()
    check_near(step(x, state, backend), alone["o"], dtype)
    check_near(state[tokens], alone["final_state"], dtype)
    assert torch.equal(state[1], x.initial_state[1])

    slots = torch.tensor([6, 2, 0, 3, 5], device=device, dtype=offsets_dtype)
    pool = torch.full_like(x.initial_state[:1], torch.nan).repeat(7, 1, 1, 1)
    pool[slots.long()] = x.initial_state
    check_near(step(x, pool, backend, state_indices=slots), alone["o"], dtype)
    check_near(pool[slots.long()[tokens]], alone["final_state"], dtype)
    assert torch.equal(pool[2], x.initial_state[1])
    assert pool[[1, 4]].isnan().all()


@on_every_backend
@on_every_device
def test_the_state_is_updated_in_place(device: str, backend: str, required_backends: frozenset[str]) -> None:
    x = make_inputs(Case(T=3, B=2, state=True), device)
    serve_step(backend, x, required_backends)
    state = x.initial_state.clone()
    address, other = state.data_ptr(), state.view(-1)
    before = [t.clone() if isinstance(t, Tensor) else t for t in x]
    first = step(x, state, backend)
    assert state.data_ptr() == address
    assert torch.equal(other, state.view(-1))
    assert not torch.equal(state, x.initial_state)
    for name, old, new in zip(Inputs._fields, before, x, strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new, name
    again = x.initial_state.clone()
    assert torch.equal(step(x, again, backend), first)
    assert torch.equal(again, state)


@on_every_backend
@on_every_device
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_a_pool_of_states(
    T: int, index_dtype: torch.dtype, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """The slots named are updated as a state of their own would be; the others keep every bit, NaN among them."""
    x = make_inputs(Case(T=T, B=3, H=1, group=2, state=True), device)
    serve_step(backend, x, required_backends)
    slots = torch.tensor([5, 0, 3], device=device, dtype=index_dtype)
    pool = torch.full((7, *x.initial_state.shape[1:]), torch.nan, device=device)
    pool[slots.long()] = x.initial_state
    state = x.initial_state.clone()
    with poisoned_memory():
        want, got = step(x, state, backend), step(x, pool, backend, state_indices=slots)
    assert torch.equal(got, want)
    assert torch.equal(pool[slots.long()], state)
    assert pool[[1, 2, 4, 6]].isnan().all()


@on_every_backend
@on_every_device
@on_typical_shapes
@pytest.mark.parametrize("accepted", [(1, 1), (2, 4), (4, 3), (3, 2), (4, 4)], ids=str)
def test_drafted_tokens_can_be_taken_back(
    accepted: tuple[int, int], shape: dict, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """The states after each token are kept; the next call starts after the accepted ones, as if recomputed."""
    T, dtype = 4, shape["dtype"]
    x = make_inputs(Case(T=2 * T, B=2, H=1, group=2, slow=True, state=True, **shape), device)
    serve_step(backend, x, required_backends)
    slots = torch.tensor([[7, 2, 0, 9], [1, 3, 8, 5]], device=device)
    pool = torch.full((10, *x.initial_state.shape[1:]), torch.nan, device=device, dtype=x.initial_state.dtype)
    pool[slots[:, 0]] = x.initial_state

    def drafted(cast: Callable[[Inputs], Inputs], t: int, rows: slice = slice(None)) -> KDAOutput:
        return oracle(part(cast(x), 0, t, rows)._replace(initial_state=cast(x).initial_state[rows]))

    o = step(part(x, 0, T), pool, backend, state_indices=slots)
    check_near(o, lambda cast: drafted(cast, T).o, dtype)
    for t in range(T):  # slot t holds the state after token t
        check_near(pool[slots[:, t]], lambda cast, t=t: drafted(cast, t + 1).final_state, dtype)
    assert pool[[4, 6]].isnan().all()

    m = torch.tensor(accepted, device=device, dtype=torch.int32)
    o = step(part(x, T, 2 * T), pool, backend, state_indices=slots, num_accepted=m)
    for n, m_n in enumerate(accepted):
        row = slice(n, n + 1)

        def verified(cast: Callable[[Inputs], Inputs], row: slice = row, m_n: int = m_n) -> KDAOutput:
            return oracle(part(cast(x), T, 2 * T, row)._replace(initial_state=drafted(cast, m_n, row).final_state))

        check_near(o[row], lambda cast, f=verified: f(cast).o, dtype)
        check_near(pool[slots[n, -1:]], lambda cast, f=verified: f(cast).final_state, dtype)
    assert pool[[4, 6]].isnan().all()


@on_every_backend
@on_every_device
@on_typical_shapes
def test_more_slots_than_tokens(shape: dict, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """A call of two tokens after one of four of which three were accepted: the slots left over stay as they are."""
    dtype = shape["dtype"]
    x = make_inputs(Case(T=6, B=2, H=1, slow=True, state=True, **shape), device)
    serve_step(backend, x, required_backends)
    slots = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]], device=device)
    pool = torch.full((8, *x.initial_state.shape[1:]), torch.nan, device=device, dtype=x.initial_state.dtype)
    pool[slots[:, 0]] = x.initial_state
    step(part(x, 0, 4), pool, backend, state_indices=slots)
    drafted = pool.clone()
    three = torch.tensor([3, 3], device=device)
    o = step(part(x, 4, 6), pool, backend, state_indices=slots, num_accepted=three)

    def verified(cast: Callable[[Inputs], Inputs]) -> KDAOutput:
        accepted = oracle(part(cast(x), 0, 3)._replace(initial_state=cast(x).initial_state))
        return oracle(part(cast(x), 4, 6)._replace(initial_state=accepted.final_state))

    check_near(o, lambda cast: verified(cast).o, dtype)
    check_near(pool[slots[:, 1]], lambda cast: verified(cast).final_state, dtype)
    assert torch.equal(pool[slots[:, 2:]], drafted[slots[:, 2:]])


@on_every_backend
@on_every_device
@on_typical_shapes
def test_drafted_tokens_of_different_numbers(
    shape: dict, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """Packed drafts of 1, 3 and 2 tokens: the slots beyond a sequence's length are not touched."""
    case, dtype = Case(lengths=(1, 3, 2), H=1, slow=True, state=True, **shape), shape["dtype"]
    x = make_inputs(case, device)
    serve_step(backend, x, required_backends)
    slots = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]], device=device)
    pool = torch.full((9, *x.initial_state.shape[1:]), torch.nan, device=device, dtype=x.initial_state.dtype)
    accepted = torch.tensor([3, 1, 2], device=device)
    pool[slots[torch.arange(3), accepted - 1]] = x.initial_state
    o = step(x, pool, backend, state_indices=slots, num_accepted=accepted)
    check_near(o, lambda cast: torch.cat([oracle(s).o for s in sequences(cast(x))], 1), dtype)
    last = torch.stack([pool[slots[n, length - 1]] for n, length in enumerate(case.lengths)])
    check_near(last, lambda cast: torch.cat([oracle(s).final_state for s in sequences(cast(x))]), dtype)
    assert pool[1].isnan().all()  # the first sequence has one token: its second slot stays as it was
    assert torch.equal(pool[2], x.initial_state[0])  # and so does the third, which it read
    assert pool[8].isnan().all()


@on_every_backend
@on_every_device
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_padding(
    T: int, index_dtype: torch.dtype, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """Sequences of slot -1 get 0 and touch nothing; the others are as without them. Also where all are padding."""
    x = make_inputs(Case(T=T, B=4, H=1, group=2, state=True), device)
    serve_step(backend, x, required_backends)
    slots, real = torch.tensor([5, -1, 0, -1], device=device, dtype=index_dtype), [0, 2]
    pool = torch.full((7, *x.initial_state.shape[1:]), torch.nan, device=device)
    pool[[5, 0]] = x.initial_state[real]
    state = x.initial_state.clone()
    want = step(x, state, backend)
    with poisoned_memory():
        got = step(x, pool, backend, state_indices=slots)
    assert torch.equal(got[real], want[real])
    assert not got[[1, 3]].any()
    assert torch.equal(pool[[5, 0]], state[real])
    assert pool[[1, 2, 3, 4, 6]].isnan().all()
    after = pool.clone()
    with poisoned_memory():
        assert not step(x, pool, backend, state_indices=torch.full_like(slots, -1)).any()
    assert torch.equal(pool.nan_to_num(7.0), after.nan_to_num(7.0))


@on_every_backend
@on_every_device
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_padding_among_drafts(packed: bool, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """-1 as the slot that is read makes a sequence padding; as one that is written, that state is stored nowhere."""
    x = make_inputs(Case(T=3, B=4, H=1, state=True), device)
    want = [x.initial_state.clone()]
    serve_step(backend, x, required_backends)
    want_o = []
    for t in range(3):
        want.append(want[-1].clone())
        want_o.append(step(part(x, t, t + 1), want[-1], backend))
    slots = torch.tensor([[3, -1, 5], [-1, 1, 8], [7, 4, -1], [-1, -1, -1]], device=device)
    accepted = torch.tensor([1, 1, 2, 0], device=device)
    pool = torch.full((9, *x.initial_state.shape[1:]), torch.nan, device=device)
    pool[[3, 4]] = x.initial_state[[0, 2]]
    if packed:
        flat = {n: getattr(x, n).flatten(0, 1)[None] for n in STEP}
        x = x._replace(**flat, cu_seqlens=torch.arange(0, 13, 3, device=device, dtype=torch.int32))
    with poisoned_memory():
        o = step(x, pool, backend, state_indices=slots, num_accepted=accepted).view(4, 3, *x.v.shape[2:])
    assert torch.equal(o[[0, 2]], torch.cat(want_o, 1)[[0, 2]])
    assert not o[[1, 3]].any()
    for slot, row, t in ((3, 0, 0), (5, 0, 2), (7, 2, 0), (4, 2, 1)):
        assert torch.equal(pool[slot], want[t + 1][row]), f"slot {slot}"
    assert pool[[0, 1, 2, 6, 8]].isnan().all()


@on_every_backend
@on_every_device
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_states_are_read_from_another_pool(
    packed: bool, dtype: torch.dtype, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """Drafts as engines verify them: the pool of states is only read, and those after each token go to a buffer."""
    x = make_inputs(Case(T=3, B=4, H=1, group=2, state=True), device)
    if backend in ("eager", "fla") and dtype == BF16:
        pytest.skip(f"'{backend}' keeps no bf16 states")
    x = x._replace(initial_state=x.initial_state.to(dtype))
    serve_step(backend, x, required_backends)
    shape = x.initial_state.shape[1:]
    want = torch.full((5, 3, *shape), torch.nan, device=device, dtype=dtype)
    indices = torch.tensor([[6, 7, 8], [0, 1, 2], [9, 10, -1], [3, 4, 5]], device=device, dtype=torch.int32)
    want[[2, 0, 3], 0] = x.initial_state[[0, 1, 2]]
    padded = indices.clone()
    padded[3] = -1
    if packed:
        flat = {n: getattr(x, n).flatten(0, 1)[None] for n in STEP}
        x = x._replace(**flat, cu_seqlens=torch.arange(0, 13, 3, device=device, dtype=torch.int32))
    want_o = step(x, want.flatten(0, 1), backend, state_indices=padded)

    # Slots farther apart than their size; two belong to no sequence.
    store = torch.full((6, 2, *shape), torch.nan, device=device, dtype=dtype)
    pool, slots = store[:, 0], torch.tensor([4, 1, 0, -1], device=device)
    pool[[4, 1, 0]] = x.initial_state[:3]
    before, buffer = store.clone(), torch.full_like(want, torch.nan)
    with poisoned_memory():
        o = step(
            x, buffer.flatten(0, 1), backend, state_indices=indices, initial_state=pool, initial_indices=slots
        )  # fmt: skip
    assert torch.equal(o, want_o)
    assert torch.equal(buffer.nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(store.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"initial_indices": None}, "initial_state and initial_indices must be given together"),
        ({"state_indices": None}, "initial_state needs state_indices"),
        ({"num_accepted": torch.ones(2, dtype=torch.int32)}, "no num_accepted"),
        ({"initial_state": torch.zeros(3, 2, 128, 128, dtype=BF16)}, "initial_state must be float32"),
        ({"initial_state": torch.zeros(3, 2, 128, 64)}, "initial_state must have shape"),
        ({"initial_indices": torch.tensor([0, 3])}, "initial_indices must be in"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_a_pool_to_read_from_that_cannot_be_read(change: dict[str, Any], message: str) -> None:
    x = make_inputs(Case(T=1, B=2, state=True))
    pool = torch.zeros(4, 2, 128, 128)
    given: dict[str, Any] = dict(
        state_indices=torch.tensor([[0], [1]]), initial_state=torch.zeros(3, 2, 128, 128),
        initial_indices=torch.tensor([0, 2]),
    )  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=message):
        step(x, pool[:2] if change.get("state_indices", 0) is None else pool, "eager", **given | change)


@on_every_backend
@on_every_device
@pytest.mark.parametrize("kind", ["every second slot", "some heads of more", "slots and heads swapped"])
def test_a_state_that_is_a_view(kind: str, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Only the [V, K] matrices have to be contiguous; what lies between them is left alone."""
    x = make_inputs(Case(T=2, B=2, state=True), device)
    serve_step(backend, x, required_backends)
    store, view = {
        "every second slot": (s := torch.full((4, 2, 128, 128), 7.0, device=device), s[::2]),
        "some heads of more": (s := torch.full((2, 5, 128, 128), 7.0, device=device), s[:, 1:3]),
        "slots and heads swapped": (s := torch.full((2, 2, 128, 128), 7.0, device=device), s.transpose(0, 1)),
    }[kind]
    view.copy_(x.initial_state)
    state = x.initial_state.clone()
    want = step(x, state, backend)
    got = step(x, view, backend)
    assert torch.equal(got, want)
    assert torch.equal(view, state)
    view.fill_(7.0)
    assert (store == 7.0).all()


@on_every_backend
@on_every_device
def test_under_inference_mode(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Prefill and decode as `generate` runs them, the inputs made outside and inside."""
    x = make_inputs(Case(T=9, B=2, state=True, dtype=BF16), device)
    serve(backend, problem_of(x), required_backends)
    serve_step(backend, x, required_backends)
    want = outputs(call(x, backend))
    state = x.initial_state.clone()
    want_step = step(x, state, backend)
    with torch.inference_mode():
        assert torch.equal(call(x, backend).o, want["o"])
        inside = call(x, backend).final_state
        assert torch.equal(inside, want["final_state"])
        again = x.initial_state.clone()
        assert torch.equal(step(x, again, backend), want_step)
        assert torch.equal(again, state)
        step(part(x, 0, 1), inside, backend)


def test_an_inference_state_outside_of_inference_mode_stays_as_it_was() -> None:
    """torch refuses to write it: an error before anything has changed, with the way out."""
    x = make_inputs(Case(T=1, B=2, H=1, dtype=FP32, state=True))
    with torch.inference_mode():
        state = x.initial_state.clone()
    with torch.no_grad(), pytest.raises(ValueError, match=r"state must not be an inference tensor.*state.clone\(\)"):
        step(x, state, "eager")
    assert torch.equal(state, x.initial_state)


def test_an_expanded_state_is_refused() -> None:
    """Its sequences would overwrite each other's states."""
    x = make_inputs(Case(T=1, B=2, H=1, dtype=FP32, state=True))
    state = x.initial_state[:1].clone()
    with pytest.raises(ValueError, match=r"state must not be expanded"):
        step(x, state.expand(2, -1, -1, -1), "eager")
    assert torch.equal(state, x.initial_state[:1])


@on_every_backend
@on_every_device
@pytest.mark.parametrize("lengths", [None, (3, 0, 1, 5, 1)], ids=["rows", "packed"])
def test_the_output_is_written_where_asked(
    lengths: tuple[int, ...] | None, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    case = Case(T=3, B=5, state=True) if lengths is None else Case(lengths=lengths, state=True)
    x = make_inputs(case, device)
    serve_step(backend, x, required_backends)
    slots = torch.tensor([4, 0, 3, -1, 2], device=device)
    results = []
    for given in (None, torch.full_like(x.v, torch.nan)):
        state = x.initial_state.clone()
        more = {} if given is None else {"out": given}
        with poisoned_memory():
            o = step(x, state, backend, state_indices=slots, **more)
        assert given is None or o is given
        results.append((o, state))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.zeros(2, 3, 2, 33), ValueError, r"out must have shape \[2, 3, 2, 32\]"),
        (torch.zeros(2, 3, 2, 32, dtype=torch.float64), TypeError, "out must be float32"),
        (torch.zeros(2, 3, 32, 2).mT, ValueError, "out must be contiguous, got strides"),
    ],
)
def test_outputs_that_cannot_be_written(out: Tensor, error: type[Exception], message: str) -> None:
    x = make_inputs(Case(T=3, B=2, H=2, K=16, V=32, dtype=FP32, state=True), "cpu")
    before = x.initial_state.clone()
    with pytest.raises(error, match=message):
        step(x, x.initial_state, out=out)
    assert torch.equal(x.initial_state, before)
