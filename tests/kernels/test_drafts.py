"""`kda_verify` and `kda_commit`: the bits of `kda_step` for drafted tokens, whatever part of them is accepted."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers import explain, kda_commit, kda_prefill, kda_step, kda_verify
from kda_layers.kernels.kda import drafts
from kda_layers.kernels.kda.contract import KDA, MOST_DRAFTED, DecodeInputs, Inputs, problem_of, state_dtype
from kda_layers.testing.hard_inputs import HARD, Kind, hard_inputs
from tests import cuda_emulator
from tests.kernels import emulated
from tests.kernels.cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    Case,
    check_near,
    ids,
    make_inputs,
    map_tensors,
    on_every_backend,
    on_every_device,
    on_typical_shapes,
    options,
    oracle,
    poisoned_memory,
    serve,
    step_inputs,
)
from tests.kernels.emulated_backends import EMULATED, registered

TOKENS = ("q", "k", "v", "g", "beta")


def part(x: Inputs, start: int, end: int, rows: slice = slice(None)) -> Inputs:
    """Tokens start to end of some rows."""
    return x._replace(**{n: getattr(x, n)[rows, start:end] for n in TOKENS})


def packed(x: Inputs, lengths: list[int]) -> Inputs:
    """The first tokens of each row, packed."""
    tokens = {n: torch.cat([getattr(x, n)[row, :m] for row, m in enumerate(lengths)])[None] for n in TOKENS}
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=x.q.device)
    return x._replace(**tokens, cu_seqlens=offsets)


def new_updates(x: Inputs, tokens: int, slots: int | None = None) -> Tensor:
    """Updates of x's sequences, or of a pool, that nothing has written: NaN."""
    (N, HV, V, K), wide = x.initial_state.shape, state_dtype(x.q.dtype)
    return x.q.new_full((slots or N, tokens, HV, 2 * K + V), torch.nan, dtype=wide)


def serve_drafts(backend: str, x: Inputs, required: frozenset[str] = frozenset()) -> None:
    problem = problem_of(step_inputs(x, updates=x.initial_state))
    if backend != "fla" or problem.device != "cuda":
        serve(backend, problem, required)
    else:
        serve(backend, problem, frozenset())  # which declines drafts


def verify(x: Inputs, state: Tensor, updates: Tensor, backend: str | None = None, **more: Any) -> Tensor:
    with torch.no_grad(), poisoned_memory():
        return kda_verify(*x[:5], state, updates, **options(x), **more, backend=backend)


def stepped(x: Inputs, state: Tensor, backend: str) -> tuple[Tensor, list[Tensor]]:
    """Outputs and the states before the first and after each token, by `kda_step` with a slot for each token."""
    N, T = x.q.shape[:2]
    slots = torch.arange(N * T, device=state.device).view(N, T)
    pool = state.repeat_interleave(T, 0)
    with torch.no_grad():
        o = kda_step(*x[:5], pool, **options(x), state_indices=slots, backend=backend)
    return o, [state, *(pool[slots[:, t]] for t in range(T))]


def check_same(got: Tensor, want: Tensor, backend: str) -> None:
    """Fail unless both have the same bits; in plain PyTorch, whose activations depend on a token's place, nearly."""
    if backend == "eager":
        torch.testing.assert_close(got, want)
    else:
        assert torch.equal(got, want)


def of_rows(counts: list[int], like: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(counts, dtype=dtype, device=like.device)


CASES = [
    Case(T=8, B=2, H=1, group=2, slow=True, state=True),
    Case(T=MOST_DRAFTED, B=1, H=1, state=True),
    Case(T=3, B=2, H=1, K=64, V=64, dtype=FP16, state=True, layout="fused"),
    Case(T=9, B=1, H=1, K=64, V=64, dtype=FP16, gate="softplus", beta="2sigmoid", slow=True, state=True),
    Case(T=2, B=2, H=1, gate="log_decay", beta="given", g_wide=True, beta_wide=True, state=True),
    Case(T=2, B=1, H=2, A_log=False, dt_bias=False, l2norm=False, scale=0.5, layout="heads_first", state=True),
    Case(T=5, B=40, H=2, K=16, V=32, dtype=FP64, state=True),
    Case(T=4, B=3, H=1, group=2, K=60, V=100, dtype=FP32, state=True),
    Case(T=4, B=2, H=1, group=2, head_gates=True, slow=True, state=True),
]


@on_every_backend
@on_every_device
@pytest.mark.parametrize("case", **ids(CASES))
def test_bits_of_steps(case: Case, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Outputs, and the state after any number of accepted tokens, are those of steps with a slot for each token."""
    x = make_inputs(case, device)
    serve_drafts(backend, x, required_backends)
    want, states = stepped(x, x.initial_state, backend)
    state, updates = x.initial_state.clone(), new_updates(x, case.T)
    assert torch.equal(verify(x, state, updates, backend), want)
    assert torch.equal(state, x.initial_state), "the state was advanced"
    assert updates.isfinite().all()
    for m, after in enumerate(states):
        committed = x.initial_state.clone()
        kda_commit(committed, updates, of_rows([m] * case.B, state), backend=backend)
        assert torch.equal(committed, after), f"{m} tokens"


@on_every_backend
@on_every_device
@pytest.mark.parametrize("kind", HARD, ids=lambda kind: kind.__name__)
def test_hard_inputs(kind: Kind, device: str, backend: str, required_backends: frozenset[str]) -> None:
    x = map_tensors(hard_inputs(kind, MOST_DRAFTED, 64, 1, BF16), lambda t: t.to(device))._replace(checkpoint_every=0)
    serve_drafts(backend, x, required_backends)
    want, states = stepped(x, x.initial_state, backend)
    state, updates = x.initial_state.clone(), new_updates(x, MOST_DRAFTED)
    assert torch.equal(verify(x, state, updates, backend), want)
    kda_commit(state, updates, of_rows([MOST_DRAFTED], state), backend=backend)
    assert torch.equal(state, states[-1])


@on_every_backend
@on_every_device
@on_typical_shapes
def test_against_fp64(shape: dict, device: str, backend: str, required_backends: frozenset[str]) -> None:
    case = Case(T=8, B=2, H=1, group=2, slow=True, state=True, **shape)
    x = make_inputs(case, device)
    serve_drafts(backend, x, required_backends)
    state, updates = x.initial_state.clone(), new_updates(x, case.T)
    check_near(verify(x, state, updates, backend), lambda cast: oracle(cast(x)).o, case.dtype)
    accepted = [5, 0]
    kda_commit(state, updates, of_rows(accepted, state), backend=backend)

    def committed(cast: Callable[[Inputs], Inputs]) -> Tensor:
        y = cast(x)
        return oracle(part(y, 0, 5, slice(0, 1))._replace(initial_state=y.initial_state[:1])).final_state

    check_near(state[:1], committed, case.dtype)
    assert torch.equal(state[1], x.initial_state[1])


class Engine:
    """Requests of an engine: each verifies drafts whose accepted tokens are committed by the next call."""

    def __init__(self, x: Inputs, backend: str, index_dtype: torch.dtype) -> None:
        """Begin with the initial states of x in slots of pools of 7, in memory that is wider than they are."""
        self.x, self.backend, self.dtype = x, backend, index_dtype
        slots, like = 7, x.initial_state
        self.slots = of_rows([5, 0, 3], like, index_dtype)
        self.pool = torch.full((slots, *like.shape[1:]), torch.nan, dtype=like.dtype, device=like.device)
        self.pool[self.slots.long()] = like
        wide = new_updates(x, 6, 2 * slots)
        self.updates = wide[::2, 1:5]
        self.around = [wide[1::2], wide[:, :1], wide[:, 5:]]

    def run(self, first: list[int], lengths: list[int], accepted: list[int] | None) -> Tensor:
        """Verify tokens first[n] to first[n] + lengths[n] of each row, packed; commit what was accepted before."""
        y = self.x._replace(**{
            n: torch.stack([t[row, a : a + 4] for row, a in enumerate(first)])
            for n, t in ((n, getattr(self.x, n)) for n in TOKENS)
        })  # fmt: skip
        more = {} if accepted is None else {"num_accepted": of_rows(accepted, self.pool, self.dtype)}
        y = packed(y, lengths)
        return verify(y, self.pool, self.updates, self.backend, state_indices=self.slots, **more)

    def others(self) -> list[Tensor]:
        used = self.slots.tolist()
        free = [slot for slot in range(7) if slot not in used]
        return [self.pool[free], self.updates[free], *self.around]


@on_every_backend
@on_every_device
@on_typical_shapes
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_calls_of_an_engine(
    index_dtype: torch.dtype, shape: dict, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """Packed drafts of different lengths, also none, over slots: every call commits what the one before left."""
    x = make_inputs(Case(T=16, B=3, H=1, group=2, slow=True, state=True, **shape), device)
    serve_drafts(backend, x, required_backends)
    rows = [slice(n, n + 1) for n in range(3)]
    want, states = zip(*(stepped(part(x, 0, 16, row), x.initial_state[row], backend) for row in rows), strict=True)
    engine, at, accepted = Engine(x, backend, index_dtype), [0, 0, 0], None
    for lengths, taken in (([4, 1, 3], [2, 1, 0]), ([3, 0, 4], [3, 0, 4]), ([1, 4, 2], [1, 4, 1])):
        o = engine.run(at, lengths, accepted)
        expected = [want[n][:, a : a + m] for n, (a, m) in enumerate(zip(at, lengths, strict=True))]
        check_same(o, torch.cat(expected, 1), backend)
        for n in range(3):
            check_same(engine.pool[engine.slots[n]], states[n][at[n]][0], backend)
        at, accepted = [a + m for a, m in zip(at, taken, strict=True)], taken
    assert accepted is not None
    kda_commit(
        engine.pool, engine.updates, of_rows(accepted, x.q, index_dtype), state_indices=engine.slots, backend=backend
    )
    for n in range(3):
        check_same(engine.pool[engine.slots[n]], states[n][at[n]][0], backend)
    assert all(t.isnan().all() for t in engine.others()), "another slot was written"


@on_every_backend
@on_every_device
def test_padding(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Sequences of slot -1 get 0, whatever their num_accepted, and touch nothing; the others are as without them."""
    x = make_inputs(Case(T=3, B=4, H=1, state=True), device)
    serve_drafts(backend, x, required_backends)
    slots, real = of_rows([2, -1, 0, -1], x.q), [0, 2]
    pool = torch.full((4, *x.initial_state.shape[1:]), torch.nan, device=device)
    pool[[2, 0]] = x.initial_state[real]
    updates = new_updates(x, 3, 4)
    want, states = stepped(x, x.initial_state, backend)
    out = torch.full_like(x.v, 7.0)
    assert verify(x, pool, updates, backend, state_indices=slots, out=out) is out
    assert torch.equal(out[real], want[real])
    assert not out[[1, 3]].any()
    assert updates[[1, 3]].isnan().all()
    taken = of_rows([1, 99, 2, -5], x.q)
    verify(x, pool, updates, backend, state_indices=slots, num_accepted=taken, out=out)
    assert torch.equal(pool[2], states[1][0])
    assert torch.equal(pool[0], states[2][2])
    assert not out[[1, 3]].any()
    before = pool.clone()
    nowhere = torch.full_like(slots, -1)
    assert not verify(x, pool, updates, backend, state_indices=nowhere, num_accepted=taken).any()
    kda_commit(pool, updates, taken, state_indices=nowhere, backend=backend)
    assert torch.equal(pool.nan_to_num(7.0), before.nan_to_num(7.0))
    assert pool[[1, 3]].isnan().all()


@on_every_backend
@on_every_device
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_updates_with_slots_of_their_own(
    index_dtype: torch.dtype, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """A row for each sequence of a batch: the bits of updates beside the states; -1 makes a sequence padding."""
    x = make_inputs(Case(T=3, B=4, H=2, state=True), device)
    serve_drafts(backend, x, required_backends)
    y, slots = packed(x, [3, 1, 2, 3]), of_rows([5, 0, 3, 1], x.q, index_dtype)
    rows = of_rows([2, 0, 1, -1], x.q, index_dtype)
    pool = torch.full((6, *x.initial_state.shape[1:]), torch.nan, device=device)
    pool[slots.long()] = x.initial_state
    beside, apart, before = new_updates(x, 4, 6), new_updates(x, 4, 9)[::3], pool.clone()
    want = verify(y, pool, beside, backend, state_indices=slots)
    got = verify(y, pool, apart, backend, state_indices=slots, update_indices=rows)
    assert torch.equal(got[:, :6], want[:, :6])
    assert not got[:, 6:].any()
    check_same(apart[rows[:3].long()].nan_to_num(7.0), beside[slots[:3].long()].nan_to_num(7.0), backend)
    assert torch.equal(pool.nan_to_num(7.0), before.nan_to_num(7.0)), "the state was advanced"
    accepted, again = of_rows([2, 1, 0, 3], x.q, index_dtype), pool.clone()
    kda_commit(pool, apart, accepted, state_indices=slots, update_indices=rows, backend=backend)
    for n, m in enumerate((2, 1, 0, 0)):
        _, states = stepped(part(x, 0, 3, slice(n, n + 1)), x.initial_state[n : n + 1], backend)
        check_same(pool[slots[n]], states[m][0], backend)
    more = {"num_accepted": accepted, "state_indices": slots, "update_indices": rows}
    verify(y, again, apart, backend, **more)
    check_same(again.nan_to_num(7.0), pool.nan_to_num(7.0), backend)
    if backend == "eager":
        with pytest.raises(ValueError, match="update_indices must give each slot to one sequence, got slot 2 twice"):
            verify(y, pool, apart, backend, state_indices=slots, update_indices=of_rows([2, 0, 2, 1], x.q))


@on_every_backend
@on_every_device
def test_a_commit_from_one_slot_to_another(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """As a prefix cache keeps the state at a boundary within the drafts; the slot that is read stays as it is."""
    x = make_inputs(Case(T=3, B=5, H=2, state=True), device)
    serve_drafts(backend, x, required_backends)
    sources, targets = of_rows([0, 1, 2, -1, 4], x.q), of_rows([5, 6, 2, 8, -1], x.q)
    pool = torch.full((9, *x.initial_state.shape[1:]), torch.nan, device=device)
    pool[:5] = x.initial_state
    updates, before = new_updates(x, 3), pool.clone()
    _, states = stepped(x, x.initial_state, backend)
    verify(
        x, pool, updates, backend, state_indices=of_rows([0, 1, 2, 3, 4], x.q), update_indices=of_rows([*range(5)], x.q)
    )
    kda_commit(
        pool, updates, of_rows([2, 0, 3, 1, 1], x.q), state_indices=targets, initial_indices=sources,
        update_indices=of_rows([0, 1, 2, 3, 4], x.q), backend=backend,
    )  # fmt: skip
    for n, m in ((0, 2), (1, 0), (2, 3)):
        assert torch.equal(pool[targets[n]], states[m][n]), f"sequence {n}"
    others = [0, 1, 3, 4, 7, 8]
    assert torch.equal(pool[others].nan_to_num(7.0), before[others].nan_to_num(7.0))


@on_every_backend
@on_every_device
def test_what_cannot_be(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Values that only kernels read: 'eager' raises, before anything is written; on CUDA the sequence is padding."""
    x = make_inputs(Case(T=4, B=2, H=1, state=True), device)
    serve_drafts(backend, x, required_backends)
    updates = new_updates(x, 3).zero_()
    state, slots = x.initial_state.clone(), of_rows([0, 1], x.q)
    long = packed(x, [4, 2])
    refused: list[tuple[Inputs, dict[str, Tensor], str]] = [
        (long, {}, "updates must have room for the 4 tokens"),
        (part(x, 0, 2), {"num_accepted": of_rows([4, 0], x.q)}, r"num_accepted must be in \[0, 3\].* got 4"),
        (part(x, 0, 2), {"num_accepted": of_rows([-1, 0], x.q)}, r"num_accepted must be in \[0, 3\].* got -1"),
        (part(x, 0, 2), {"state_indices": of_rows([2, 1], x.q)}, r"state_indices must be in \[0, 1\]"),
    ]
    for y, more, text in refused:
        if backend == "eager":
            with pytest.raises(ValueError, match=text):
                verify(y, state, updates, backend, **more)
            assert not updates.any()
        else:
            o = verify(y, state, updates, backend, **more)
            assert not (o[0, :4] if y is long else o[0]).any()
            assert o.flatten(0, 1)[-1].any(), "the other sequence was not verified"
            assert not updates[0].any()
        assert torch.equal(state, x.initial_state)
    if backend == "eager":
        with pytest.raises(ValueError, match="slot 1 twice"):
            verify(part(x, 0, 2), state, updates, backend, state_indices=of_rows([1, 1], slots))


@pytest.mark.emulated
@pytest.mark.parametrize("width", [128, 64])
@pytest.mark.parametrize("backend", EMULATED)
def test_a_state_in_bf16(backend: str, width: int) -> None:
    """Rounded when it is committed: the bits of `kda_step` with a slot for each token."""
    x = make_inputs(Case(T=8, B=2, H=1, K=width, V=width, slow=True, state=True))
    states, slots = x.initial_state.bfloat16(), torch.arange(16).view(2, 8)
    pool = states.new_zeros(16, *states.shape[1:])
    pool[slots[:, 0]] = states
    with torch.no_grad():
        want = kda_step(*x[:5], pool, **options(x), state_indices=slots, backend=backend)
    state, updates = states.clone(), new_updates(x, 8)
    assert torch.equal(verify(x, state, updates, backend), want)
    accepted = torch.tensor([3, 8])
    for_next, again, kept = state.clone(), updates.clone(), updates.clone()
    kda_commit(state, updates, accepted, backend=backend)
    assert torch.equal(state, torch.stack((pool[slots[0, 2]], pool[slots[1, 7]])))
    o = verify(x, for_next, again, backend, num_accepted=accepted)
    assert torch.equal(for_next, state)
    assert torch.equal(o, verify(x, state, kept, backend)), "what is verified starts from a state that is not rounded"
    assert torch.equal(again, kept)


@pytest.mark.emulated
def test_misaligned_memory() -> None:
    """The launcher copies states and updates that a lane cannot read with one load, and writes them back."""
    x = make_inputs(Case(T=2, B=2, H=1, state=True))

    def moved(t: Tensor) -> Tensor:
        return torch.cat((t.flatten()[:1], t.flatten()))[1:].view_as(t)

    backend = "sm90@emulator"
    with registered(EMULATED[backend]):
        want, states = stepped(x, x.initial_state, backend)
        state, updates = moved(x.initial_state), moved(new_updates(x, 3))
        assert state.data_ptr() % 16
        assert torch.equal(verify(x, state, updates, backend), want)
        assert updates[:, :2].isfinite().all()
        kda_commit(state, updates, torch.tensor([2, 1]), backend=backend)
    assert torch.equal(state, torch.stack((states[2][0], states[1][1])))


@pytest.mark.emulated
@pytest.mark.parametrize("seed", [0, 1])
def test_memory_accesses_are_ordered(seed: int) -> None:
    """More updates are read than the states' memory holds, before the first is overwritten."""
    x = make_inputs(Case(T=3, B=1, H=1, K=64, V=64, dtype=FP16, state=True))
    state = x.initial_state.bfloat16()
    updates = new_updates(x, MOST_DRAFTED).normal_()
    inputs = step_inputs(x, state=state, updates=updates, num_accepted=torch.tensor([MOST_DRAFTED]))
    with cuda_emulator.order_checked():
        emulated.verify(inputs, seed=seed)


# ---------------------------------------------------------------- bytes, choice and errors


@pytest.mark.parametrize(("dtype", "most"), [(FP32, 1.2), (BF16, 1.4)], ids=["fp32", "bf16"])
def test_bytes_of_seven_drafts(dtype: torch.dtype, most: float) -> None:
    """A state with what is kept for 1 + 7 tokens, against the state alone; a slot for each would be 8."""
    state = torch.zeros(1, 32, 128, 128, dtype=dtype)
    updates = torch.empty(1, 8, 32, 2 * 128 + 128)
    assert (state.nbytes + updates.nbytes) / state.nbytes < most


def test_who_serves() -> None:
    """flash-linear-attention's kernels write a state for each token: they decline, with the way out."""
    x = make_inputs(Case(T=2, H=1, state=True))
    problem = problem_of(step_inputs(x, updates=x.initial_state))
    assert "verify" in str(problem)
    reasons = KDA.backends()["fla"].refusals(problem)
    assert any("verifies drafts without a state for each, needs kda_step" in reason for reason in reasons), reasons
    assert "verifies drafts" in explain(problem)
    assert not KDA.backends()["sm90"].refusals(dataclasses.replace(problem, device="cuda", arch=90))


@pytest.mark.parametrize(("K", "dtype", "asked"), [
    (128, BF16, {None, "sm90", "eager"}),
    (16, BF16, {"eager"}),  # flash-linear-attention's kernels serve whole sequences of this width, and no drafts
    (64, FP32, {None, "eager"}),  # no kernel serves fp32
])  # fmt: skip
def test_a_layer_verifies_by_a_kernel_or_not_at_all(
    K: int, dtype: torch.dtype, asked: set[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend in ("fla", "sm90"):
        monkeypatch.setattr(type(KDA.backends()[backend]), "problems", lambda self: [])
    monkeypatch.setattr(drafts, "arch_of", lambda device: 90)
    fields = torch.device("cuda"), dtype, dtype, K, K, 1, "lower_bound", "sigmoid", True
    drafts._verifying.cache_clear()
    assert {name for name in (None, "sm90", "fla", "eager") if drafts.verifying(name, *fields)} == asked
    drafts._verifying.cache_clear()


STEP = Case(T=3, B=2, H=1, K=4, V=6, dtype=FP32, state=True)


def arguments(**change: Any) -> dict[str, Any]:
    x = make_inputs(STEP)
    given = dict(zip(TOKENS, x[:5], strict=True)) | {"state": x.initial_state, "updates": new_updates(x, 3)}
    return given | options(x) | change


@pytest.mark.parametrize(("change", "error", "text"), [
    ({"updates": None}, TypeError, "updates must be a torch.Tensor"),
    ({"updates": torch.zeros(2, 3, 1, 13)}, ValueError, r"updates must have shape .*\[2, 3 to 16, 1, 14\], got"),
    ({"updates": torch.zeros(2, 2, 1, 14)}, ValueError, r"updates must have shape .*3 to 16"),
    ({"updates": torch.zeros(2, 17, 1, 14)}, ValueError, r"updates must have shape .*3 to 16"),
    ({"updates": torch.zeros(2, 3, 1, 14).double()}, TypeError, "updates must be float32"),
    ({"updates": torch.zeros(2, 3, 14, 2).mT[:, :, :1]}, ValueError, "updates must be contiguous in the last dim"),
    ({"updates": torch.zeros(1, 3, 1, 14).expand(2, 3, 1, 14)}, ValueError, "updates must not be expanded"),
    ({"num_accepted": torch.zeros(3, dtype=torch.int32)}, ValueError, r"num_accepted must have shape \[2\]"),
    ({"num_accepted": torch.zeros(2)}, TypeError, "num_accepted must be int32 or int64"),
    ({"state_indices": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, r"state_indices must have shape \[2\]"),
    ({"update_indices": torch.zeros(3, dtype=torch.int32)}, ValueError, r"update_indices must have shape \[2\]"),
    ({"update_indices": torch.zeros(2)}, TypeError, "update_indices must be int32 or int64"),
    ({"state": torch.zeros(2, 1, 6, 4, dtype=torch.int8)}, TypeError, r"int8: such a state is rounded .* kda_step"),
    ({"state": torch.zeros(2, 1, 4, 6)}, ValueError, "state_layout='kv'"),
    ({"out": torch.zeros(2, 3, 1, 5)}, ValueError, "out must have shape"),
    ({"q": torch.zeros(2, 3, 1, 4, requires_grad=True)}, ValueError, "kda_verify .*no gradient"),
])  # fmt: skip
def test_errors(change: dict[str, Any], error: type[Exception], text: str) -> None:
    good = arguments()
    state, updates = good["state"].clone(), good["updates"].clone()
    with pytest.raises(error, match=text):
        kda_verify(**good | change)
    assert torch.equal(good["state"], state)
    assert torch.equal(good["updates"].nan_to_num(7.0), updates.nan_to_num(7.0))
    kda_verify(**good)


def test_more_tokens_than_can_be_drafted() -> None:
    x = make_inputs(Case(T=17, B=1, H=1, K=4, V=6, dtype=FP32, state=True))
    with pytest.raises(ValueError, match="verify at most 16 tokens at once"):
        verify(x, x.initial_state, new_updates(x, 17))


@pytest.mark.parametrize(("change", "error", "text"), [
    ({"state": None}, TypeError, "state must be a torch.Tensor"),
    ({"state": torch.zeros(2, 6, 4)}, ValueError, r"state must have shape \[N, HV, V, K\]"),
    ({"state": torch.zeros(2, 1, 6, 4, dtype=torch.int8)}, TypeError, "int8: such a state"),
    ({"state": torch.zeros(2, 1, 6, 4, dtype=FP16)}, TypeError, "state must be float32, bfloat16 or float64"),
    ({"state": torch.zeros(2, 1, 4, 6).mT}, ValueError, r"state must have contiguous \[V, K\] matrices"),
    ({"updates": torch.zeros(2, 3, 1, 13)}, ValueError, r"updates must have shape .*\[2, 1 to 16, 1, 14\]"),
    ({"num_accepted": None}, TypeError, r"num_accepted must be a torch.Tensor, got NoneType: pass a tensor \[N\]"),
    ({"num_accepted": torch.ones(1, dtype=torch.int32)}, ValueError, r"num_accepted must have shape \[2\]"),
    ({"state_indices": torch.ones(1, dtype=torch.int32)}, ValueError, r"num_accepted must have shape \[1\]"),
    ({"update_indices": torch.ones(1, dtype=torch.int32)}, ValueError, r"update_indices must have shape \[2\]"),
    ({"initial_indices": torch.ones(1, dtype=torch.int32)}, ValueError, r"initial_indices must have shape \[2\]"),
    ({"initial_indices": torch.tensor([0, 2])}, ValueError, r"initial_indices must be in \[0, 1\], got 0 to 2"),
    ({"state_layout": "other"}, ValueError, "state_layout must be 'vk' or 'kv'"),
    ({"backend": "fla"}, ValueError, "backend 'fla' cannot serve"),
])  # fmt: skip
def test_errors_of_a_commit(change: dict[str, Any], error: type[Exception], text: str) -> None:
    state = torch.ones(2, 1, 6, 4)
    good = {"state": state, "updates": torch.zeros(2, 3, 1, 14), "num_accepted": torch.ones(2, dtype=torch.int32)}
    with pytest.raises(error, match=text):
        kda_commit(**good | change)
    assert (state == 1).all()
    kda_commit(**good)
    assert not state.any()


def test_transposed_states() -> None:
    """state_layout='kv': views [..., K, V] of the states, as `kda_prefill` takes them."""
    x = make_inputs(STEP)
    want, states = stepped(x, x.initial_state, "eager")
    state, updates = x.initial_state.clone(), new_updates(x, 3)
    assert torch.equal(verify(x, state.mT, updates, state_layout="kv"), want)
    kda_commit(state.mT, updates, torch.tensor([3, 1]), state_layout="kv")
    assert torch.equal(state, torch.stack((states[3][0], states[1][1])))


def test_a_prefill_between() -> None:
    """A prompt goes on from the accepted tokens once they are committed."""
    x = make_inputs(Case(T=12, B=1, H=1, K=4, V=6, dtype=FP64, state=True))
    state, updates = x.initial_state.clone(), new_updates(x, 4)
    verify(part(x, 0, 4), state, updates)
    kda_commit(state, updates, torch.tensor([2]))
    with torch.no_grad():
        rest = kda_prefill(*part(x, 2, 12)[:5], state, **options(x)).o
    torch.testing.assert_close(rest, oracle(x).o[:, 2:])


def test_the_op() -> None:
    """Schema, fake tensors and mutations are as torch declares them."""
    x = make_inputs(STEP)
    inputs: DecodeInputs = step_inputs(x, state=x.initial_state.clone(), updates=new_updates(x, 3).zero_())
    with torch.no_grad():
        torch.library.opcheck(torch.ops.kda_layers.kda_verify.default, (*inputs, "eager"))
        given = inputs.state, inputs.updates, torch.tensor([2, 1]), None, None, None
        torch.library.opcheck(
            torch.ops.kda_layers.kda_commit.default,
            (*given, "eager"),
            test_utils=("test_schema", "test_autograd_registration"),
        )


def test_compiled() -> None:
    """One graph for changing numbers of sequences, with the bits of eager mode."""
    compiled = torch.compile(
        lambda *x, **t: kda_verify(*x, **t, lower_bound=-5.0, backend="eager"), backend="aot_eager", fullgraph=True,
        dynamic=True,
    )  # fmt: skip
    for n in (3, 5):
        x = make_inputs(Case(T=4, B=n, H=2, K=4, V=6, dtype=FP32, state=True))
        want, want_updates = x.initial_state.clone(), new_updates(x, 4)
        state, updates = want.clone(), want_updates.clone()
        with torch.no_grad():
            o = compiled(*x[:5], state, updates, A_log=x.A_log, dt_bias=x.dt_bias)
        assert torch.equal(o, verify(x, want, want_updates, "eager"))
        assert torch.equal(updates, want_updates)
