"""The last few tokens of sequences, which our CUDA kernels decode: accurate, and with the same bits in any company."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kda_layers import KDAOutput, kda, kda_prefill, kda_step
from kda_layers.kernels.kda.contract import CHUNK, Inputs, PrefillInputs, PrefillOutput, problem_of
from kda_layers.kernels.kda.cuda.decode import decode
from kda_layers.kernels.kda.cuda.forward import last_tokens
from kda_layers.kernels.kda.cuda.spec import LAST_TOKENS, Signature
from tests.kernels.cases import (
    FP16,
    Case,
    call,
    check,
    ids,
    limits_of,
    make_inputs,
    on_every_backend,
    on_every_device,
    options,
    oracle,
    outputs,
    poisoned_memory,
    serve,
    to_fp64,
)
from tests.kernels.emulated_backends import EMULATED

SEQUENCE = ("q", "k", "v", "g", "beta")
# More than are visited without a list; last tokens after no, one and two chunks, none, and too many to be decoded.
LENGTHS = (1, 4, 0, 5, 64, 65, *(1,) * 50, 63, 68, 69, 128, 130, 2, *(3,) * 8)
ALONE = (0, 1, 2, 3, 4, 5, 56, 57, 58, 59, 60, 61, 62)


@pytest.fixture(autouse=True)
def _listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are listed from fewer on than in use: the emulator is slow."""
    monkeypatch.setattr(last_tokens, "MANY", 64)


def run(x: Inputs, backend: str, **engine: Any) -> KDAOutput:
    with torch.no_grad(), poisoned_memory():
        return kda(*x[:5], **options(x), **{"initial_state": x.initial_state} | engine, backend=backend)


def prefill(x: Inputs, backend: str, pool: Tensor, **engine: Any) -> PrefillOutput:
    with torch.no_grad(), poisoned_memory():
        return kda_prefill(*x[:5], pool, **options(x), **engine, backend=backend)


def alone(x: Inputs, n: int) -> Inputs:
    """Sequence n of packed ones as a call of its own."""
    start, end = x.cu_seqlens[n : n + 2].tolist()
    state = None if x.initial_state is None else x.initial_state[n : n + 1]
    part = {name: getattr(x, name)[:, start:end] for name in SEQUENCE}
    return x._replace(**part, cu_seqlens=None, initial_state=state)


def served(case: Case, device: str, backend: str, required: frozenset[str]) -> Inputs:
    x = make_inputs(case, device)
    serve(backend, problem_of(x), required)
    return x


def check_outputs(got: KDAOutput, x: Inputs) -> None:
    truth, yardstick = ({n: outputs(oracle(y))[n] for n in outputs(got)} for y in (to_fp64(x), x))
    check(outputs(got), truth, limits_of(yardstick, truth, x.q.dtype))


def is_ours(backend: str) -> bool:
    """Return True for the CUDA kernels, whose bits depend on a sequence alone."""
    return backend.startswith("sm")


PACKED = Case(lengths=LENGTHS, H=1, K=64, V=64, slow=True)


@on_every_backend
@on_every_device
@pytest.mark.parametrize("state", [False, True], ids=["", "state"])
@pytest.mark.parametrize("final", [False, True], ids=["", "final"])
def test_packed_alone_and_accurate(
    state: bool, final: bool, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """With and without memory for states between the two kernels."""
    x = served(PACKED, device, backend, required_backends)
    if state:
        N, HV = len(LENGTHS), x.v.shape[2]
        initial = torch.randn(N, HV, 64, 64, generator=torch.Generator().manual_seed(0)) / 8
        x = x._replace(initial_state=initial.to(device))
    x = x._replace(final_state=final)
    got = run(x, backend, return_final_state=final)
    check_outputs(got, x)
    if not is_ours(backend):
        return
    for n in ALONE:
        if LENGTHS[n] == 0:
            continue
        one = alone(x, n)
        want, (start, end) = run(one, backend, return_final_state=final), x.cu_seqlens[n : n + 2].tolist()
        torch.testing.assert_close(got.o[:, start:end], want.o, rtol=0, atol=0)
        if final:
            torch.testing.assert_close(got.final_state[n], want.final_state[0], rtol=0, atol=0)


@on_every_backend
@on_every_device
@pytest.mark.parametrize("T", [1, LAST_TOKENS])
def test_few_tokens_are_steps(T: int, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """A call of a few tokens has the bits of `kda_step`; one more token is a chunk."""
    x = served(Case(T=T, B=3, H=1, group=2, state=True), device, backend, required_backends)
    got, state = run(x, backend, return_final_state=True), x.initial_state.clone()
    check_outputs(got, x)
    if not is_ours(backend):
        return
    o = kda_step(*x[:5], state, **options(x), backend=backend)
    assert torch.equal(got.o, o)
    assert torch.equal(got.final_state, state)


@on_every_backend
@on_every_device
@pytest.mark.parametrize("lengths", [None, (3, 65, 0, 64)], ids=["fixed", "packed"])
def test_reentrant_checkpoints_have_the_bits_of_calls_with_gradients(
    lengths: tuple[int, ...] | None, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """Their first pass records no gradients, but no token of it is decoded: the second pass finds the same bits."""
    x = make_inputs(Case(T=66, lengths=lengths, H=1, K=64, V=64, state=True, checkpoints=False), device)
    serve(backend, problem_of(x, needs_grad=True), required_backends)
    names = (*SEQUENCE, "A_log", "dt_bias", "initial_state")

    def f(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        y = x._replace(**dict(zip(names, leaves, strict=True)))
        out = kda(*y[:5], **options(y), initial_state=y.initial_state, return_final_state=True, backend=backend)
        return out.o, out.final_state

    results = []
    for again in (False, True):
        leaves = [getattr(x, n).clone().requires_grad_() for n in names]
        with poisoned_memory():
            out = checkpoint(f, *leaves, use_reentrant=True) if again else f(*leaves)
            (out[0].float().square().sum() + out[1].square().sum()).backward()
        results.append(dict(zip(("o", "final_state", *names), (*out, *(t.grad for t in leaves)), strict=True)))
    want, got = results
    assert [n for n in want if not torch.equal(got[n], want[n])] == []


@on_every_backend
@on_every_device
@pytest.mark.parametrize("T", [66, 131])
def test_parts_are_the_whole(T: int, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Chunks in one call, the last tokens in another."""
    x = served(Case(T=T, B=2, H=1, state=True, dtype=FP16), device, backend, required_backends)
    want, cut = run(x, backend, return_final_state=True), T // CHUNK * CHUNK
    check_outputs(want, x)
    if not is_ours(backend):
        return
    first, last = (x._replace(**{n: getattr(x, n)[:, part] for n in SEQUENCE}) for part in (slice(cut), slice(cut, T)))
    got = run(first, backend, return_final_state=True)
    assert torch.equal(got.o, want.o[:, :cut])
    got = run(last._replace(initial_state=got.final_state), backend, return_final_state=True)
    assert torch.equal(got.o, want.o[:, cut:])
    assert torch.equal(got.final_state, want.final_state)


@on_every_backend
@on_every_device
def test_a_batch_of_an_engine(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Slots in any order, sequences without one, and boundary states at token 0 of sequences that are only decoded."""
    x = served(PACKED, device, backend, required_backends)
    N, HV = len(LENGTHS), x.v.shape[2]
    generator = torch.Generator().manual_seed(0)
    initial = (torch.randn(N, HV, 64, 64, generator=generator) / 8).to(device)
    plain = call(x._replace(initial_state=initial, final_state=True), backend)
    slots = torch.randperm(N + 3, generator=generator)[:N].to(device)
    padding = (1, 7, 58)
    pool = torch.full((N + 3, HV, 64, 64), torch.nan, device=device)
    pool[slots] = initial
    at = torch.full((N,), -1, device=device)
    at[[0, 1, 8, 57]] = torch.tensor([0, 0, 0, 64], device=device)
    given = slots.clone()
    given[list(padding)] = -1
    got = prefill(x, backend, pool, state_indices=given, checkpoint_at=at)
    for n in range(N):
        start, end = x.cu_seqlens[n : n + 2].tolist()
        if n in padding:
            assert not got.o[:, start:end].any()
            assert torch.equal(pool[slots[n]], initial[n])
            continue
        assert torch.equal(got.o[:, start:end], plain.o[:, start:end]), n
        assert torch.equal(pool[slots[n]], plain.final_state[n]), n
    assert torch.equal(got.checkpoints[[0, 8]], initial[[0, 8]])
    assert not got.checkpoints[1].any()
    one = alone(x._replace(initial_state=initial), 57)
    whole = one._replace(**{n: getattr(one, n)[:, :64] for n in SEQUENCE})
    if is_ours(backend):
        assert torch.equal(got.checkpoints[57], run(whole, backend, return_final_state=True).final_state[0])


@pytest.mark.emulated
@pytest.mark.parametrize("name", [name for name, backend in EMULATED.items() if backend.archs[0].bulk_copies])
@pytest.mark.parametrize("case", **ids([Case(T=1100, B=1, H=1, state=True), Case(lengths=(1026, 3, 0, 1090), H=1)]))
def test_with_segments(case: Case, name: str) -> None:
    """Cuts of a sequence do not depend on its last tokens."""
    x = make_inputs(case)._replace(segments="always", final_state=True)
    got = EMULATED[name].forward(x, False)[0]
    check_outputs(got, x)


@pytest.mark.emulated
def test_segments_of_the_chunks() -> None:
    """A sequence that would have longer segments with its last tokens."""
    x = make_inputs(Case(T=4097, B=1, H=16, K=64, V=64))._replace(segments="always", final_state=True)
    got = EMULATED["sm90@emulator"].forward(x._replace(checkpoint_every=0), False)[0]
    assert not got.o.isnan().any()
    assert not got.final_state.isnan().any()


@pytest.mark.emulated
@pytest.mark.parametrize("lengths", [(5, 65, *(0,) * 62), (*(63,) * 64, 66), (*(5,) * 70, 65, 130)])
def test_a_row_for_every_state_between_the_kernels(lengths: tuple[int, ...]) -> None:
    """Sequences with less than a chunk are listed, too, but behind those that hand a state over."""
    x = make_inputs(Case(lengths=lengths, H=1, K=64, V=64))._replace(checkpoint_every=0)
    backend = EMULATED["sm90@emulator"]
    order = last_tokens.order_of(x, None, backend.machine)
    handed = torch.tensor(
        [n for n, length in enumerate(lengths) if length > CHUNK and 1 <= length % CHUNK <= LAST_TOKENS]
    )
    assert (order.positions[handed] < last_tokens.states_before(x, order).shape[0]).all()
    got, want = (backend.forward(x._replace(final_state=final), False)[0] for final in (False, True))
    assert torch.equal(got.o, want.o)


@on_every_backend
@on_every_device
@pytest.mark.parametrize("shift", [0, 1], ids=["apart", "shifted"])
def test_a_pool_that_vectors_cannot_read(
    shift: int, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """Slots an odd number of elements apart, or from an odd one on."""
    x = served(Case(T=66, B=3, H=1, K=64, V=64, state=True), device, backend, required_backends)
    want = call(x._replace(final_state=True), backend)
    memory = torch.full((5 * 4097 + 1,), torch.nan, device=device)
    pool = memory[shift:].as_strided((5, 1, 64, 64), (4096 if shift else 4097, 4096, 64, 1))
    slots = torch.tensor([4, 0, 2], device=device)
    pool[slots] = x.initial_state
    got = prefill(x, backend, pool, state_indices=slots)
    assert torch.equal(got.o, want.o)
    assert torch.equal(pool[slots], want.final_state)
    assert pool[[1, 3]].isnan().all()


def test_more_elements_than_32_bits_count() -> None:
    """A million tokens of 32 heads: offsets in a row of the batch fit into 64 bits alone."""
    machine, kernel = mock.MagicMock(), mock.MagicMock()
    machine.load.return_value = kernel
    T, H, K = 2**20 + 1, 32, 128
    empty = functools.partial(torch.empty, device="meta", dtype=torch.bfloat16)
    q, k, v, g = (empty(1, T, H, K) for _ in range(4))
    x = Inputs(q, k, v, g, empty(1, T, H), None, None, None, None, "lower_bound", -5.0, "sigmoid", True, 1.0, False, 0)
    last_tokens.finish(x, Signature.of(x), v, None, empty(1, H, K, K, dtype=torch.float32), None, machine)
    assert len(kernel.launch.call_args.args[-1]) == decode.PARAMS.nbytes


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("with_stops", [False, True], ids=["", "stops"])
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
@pytest.mark.parametrize("count", [64, 300, 1000])
def test_order(count: int, in_place: bool, with_stops: bool, dtype: torch.dtype) -> None:
    """Sequences with chunks by classes of length, the longest first, and those without that are wanted."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(0, 6, (count,), generator=generator)
    some = torch.randint(0, count, (20,), generator=generator)
    lengths[some] = torch.randint(60, 70_000, (20,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(dtype)
    stops = torch.randint(-1, 2, (count,), generator=generator, dtype=dtype) if with_stops else None
    x: Any = make_inputs(Case(T=1, H=1))._replace(cu_seqlens=offsets)  # whose other tensors are not read
    if in_place:
        x = PrefillInputs(**{name: getattr(x, name, None) for name in PrefillInputs._fields})
    found = last_tokens.order_of(x, stops, EMULATED["sm90@emulator"].machine)
    assert found is not None
    tail = torch.where(lengths % CHUNK <= LAST_TOKENS, lengths % CHUNK, 0)
    chunks = (lengths - tail + CHUNK - 1) // CHUNK
    wanted = (chunks > 0) | ((tail == 0) & (not in_place))
    if stops is not None:
        wanted |= stops == 0
    listed = found.order[: int(wanted.sum())].long()
    assert (found.order[len(listed) :] == -1).all()
    assert sorted(listed.tolist()) == wanted.nonzero()[:, 0].tolist()
    assert torch.equal(found.positions[listed], torch.arange(len(listed), dtype=torch.int32))
    assert (chunks[listed][1:] < 4 * chunks[listed][:-1].clamp(min=1)).all()
    whole = lengths[listed] >= CHUNK
    assert whole[: int(whole.sum())].all()


def test_few_sequences_are_visited_in_turn() -> None:
    x = make_inputs(Case(lengths=(1,) * (last_tokens.MANY - 1), H=1, K=64, V=64))
    assert last_tokens.order_of(x, None, EMULATED["sm90@emulator"].machine) is None
    assert last_tokens.order_of(x._replace(cu_seqlens=None), None, EMULATED["sm90@emulator"].machine) is None
