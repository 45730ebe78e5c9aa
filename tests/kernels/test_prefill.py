"""`kda_prefill`: from and into slots of a pool, one boundary state of each sequence, outputs that are given."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers import explain, kda, kda_prefill
from kda_layers.kernels.kda import op
from kda_layers.kernels.kda import slots as slot_copies
from kda_layers.kernels.kda.contract import KDA, Inputs, PrefillInputs, PrefillOutput, problem_of
from kda_layers.kernels.kda.cuda import prefill as launcher
from tests.kernels.cases import (
    BF16,
    FP64,
    Case,
    call,
    check,
    limits_of,
    make_inputs,
    on_every_backend,
    on_every_device,
    on_typical_shapes,
    options,
    oracle,
    poisoned_memory,
    serve,
    to_fp64,
)
from tests.kernels.emulated_backends import EMULATED, registered

LENGTHS = (70, 0, 128, 1, 64)
SLOTS = (6, 2, 0, 3, 5)  # of 8
AT = (64, 0, 64, 0, 64)
on_rows_and_packed = pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["rows", "packed"])


def engine_case(lengths: tuple[int, ...] | None, **fields: Any) -> Case:
    if lengths is None:
        return Case(**{"T": 131, "B": 5, "H": 1, "group": 2, "slow": True, "state": True} | fields)
    return Case(**{"lengths": lengths, "H": 1, "group": 2, "slow": True, "state": True} | fields)


def prefill(x: Inputs, backend: str | None, state: Tensor | None, **engine: Any) -> PrefillOutput:
    """`kda_prefill` on the fields of Inputs."""
    with torch.no_grad(), poisoned_memory():
        return kda_prefill(*x[:5], state, **options(x), **engine, backend=backend)


def serve_prefill(backend: str, x: Inputs, required: frozenset[str]) -> None:
    fields = {n: getattr(x, n, None) for n in PrefillInputs._fields}
    x = PrefillInputs(**fields | {"state": x.initial_state, "checkpoint_at": x.q})
    serve(backend, problem_of(x), required)


def pool_of(states: Tensor, slots: tuple[int, ...] = SLOTS, size: int = 8) -> Tensor:
    """A pool of NaN but for the states [N, ...] in their slots; states without one are left out."""
    pool = torch.full_like(states[:1], torch.nan).repeat(size, 1, 1, 1)
    for state, slot in zip(states, slots, strict=True):
        if slot >= 0:
            pool[slot] = state
    return pool


def tokens_of(x: Inputs, n: int) -> tuple[slice, slice]:
    """The row and the tokens of sequence n."""
    if x.cu_seqlens is None:
        return slice(n, n + 1), slice(None)
    start, end = x.cu_seqlens[n : n + 2].tolist()
    return slice(None), slice(start, end)


@on_every_backend
@on_every_device
@on_typical_shapes
@on_rows_and_packed
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_the_bits_of_a_plain_call(
    index: torch.dtype, lengths: Any, shape: dict, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """Outputs, states and boundary states, in place; other slots keep every bit, NaN among them."""
    x = make_inputs(engine_case(lengths, **shape), device)
    serve_prefill(backend, x, required_backends)
    want = call(x._replace(final_state=True, checkpoint_every=64), backend)
    pool, out = pool_of(x.initial_state), torch.full_like(x.v, torch.nan)
    slots, at = (torch.tensor(t, device=device, dtype=index) for t in (SLOTS, AT))
    got = prefill(x, backend, pool, state_indices=slots, checkpoint_at=at, out=out)
    assert got.o is out
    assert torch.equal(out, want.o)
    assert torch.equal(pool[list(SLOTS)], want.final_state)
    assert pool[[1, 4, 7]].isnan().all()
    first = 0
    for n, a in enumerate(AT):
        state = want.checkpoints[n, 0] if lengths is None else want.checkpoints[0, first]
        assert torch.equal(got.checkpoints[n], state if a else x.initial_state[n]), n
        first += 0 if lengths is None else lengths[n] // 64


@on_every_backend
@on_every_device
@on_rows_and_packed
@pytest.mark.parametrize("padding", [(1, 3), (0, 1, 2, 3, 4)], ids=["some", "all"])
def test_padding(
    padding: tuple[int, ...], lengths: Any, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """Sequences without a slot get zeros whatever they hold, and change nothing; the others keep their bits."""
    lengths = lengths and (70, 3, 128, 65, 64)
    x = make_inputs(engine_case(lengths), device)
    serve_prefill(backend, x, required_backends)
    want = call(x._replace(final_state=True, checkpoint_every=64), backend)
    for n in padding:
        rows, tokens = tokens_of(x, n)
        for t in x[:5]:
            t[rows, tokens] = torch.nan
    slots = [-1 if n in padding else slot for n, slot in enumerate(SLOTS)]
    pool = pool_of(x.initial_state, tuple(slots))
    before = pool.clone()
    at = torch.full((5,), 64, device=device)
    index = torch.tensor(slots, device=device, dtype=torch.int32)
    if lengths is not None:
        at[1] = 0
    got = prefill(x, backend, pool, state_indices=index, checkpoint_at=at)
    for n in range(5):
        rows, tokens = tokens_of(x, n)
        if n in padding:
            assert not got.o[rows, tokens].any()
            assert not got.checkpoints[n].any()
        else:
            assert torch.equal(got.o[rows, tokens], want.o[rows, tokens])
            assert torch.equal(pool[slots[n]], want.final_state[n])
    others = [slot for slot in range(8) if slot not in slots]
    assert torch.equal(pool[others].isnan(), before[others].isnan())
    assert pool[others].isnan().all()


@on_every_backend
@on_every_device
@pytest.mark.parametrize("lengths", [None, (70, 65, 128, 64, 2)], ids=["rows", "packed"])
def test_each_option_alone(lengths: Any, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Without state_indices, `state` holds one for each sequence; None is zero and not kept."""
    x = make_inputs(engine_case(lengths), device)
    serve_prefill(backend, x, required_backends)
    want, initial = call(x._replace(final_state=True, checkpoint_every=64), backend), x.initial_state.clone()
    out = torch.empty_like(x.v)
    state = initial.clone()
    got = prefill(x, backend, state, out=out)
    assert torch.equal(out, want.o)
    assert got.o is out
    assert got.checkpoints is None
    assert torch.equal(state, want.final_state)
    at = torch.tensor([64, 64, 0, -1, 0], device=device)
    got = prefill(x, backend, initial.clone(), checkpoint_at=at)
    assert torch.equal(got.o, want.o)
    assert torch.equal(got.checkpoints[0], want.checkpoints.flatten(0, 1)[0])
    assert torch.equal(got.checkpoints[[2, 4]], initial[[2, 4]])
    assert not got.checkpoints[3].any()
    pool = pool_of(x.initial_state)
    assert torch.equal(prefill(x, backend, pool, state_indices=torch.tensor(SLOTS, device=device)).o, want.o)
    assert torch.equal(pool[list(SLOTS)], want.final_state)


@on_every_backend
@on_every_device
@on_rows_and_packed
def test_no_state_at_all(lengths: Any, device: str, backend: str, required_backends: frozenset[str]) -> None:
    x = make_inputs(engine_case(lengths, state=False), device)
    serve_prefill(backend, x, required_backends)
    want = call(x._replace(final_state=True, checkpoint_every=64), backend)
    at = torch.tensor(AT, device=device)
    got = prefill(x, backend, None, out=torch.empty_like(x.v), checkpoint_at=at)
    assert torch.equal(got.o, want.o)
    assert torch.equal(got.checkpoints[0], want.checkpoints.flatten(0, 1)[0])
    assert not got.checkpoints[1].any()


@on_every_backend
@on_every_device
@on_typical_shapes
def test_chunks_of_a_prefill_are_one_pass(
    shape: dict, device: str, backend: str, required_backends: frozenset[str]
) -> None:
    """Sequences in parts that end at boundaries, in batches of other sizes: the bits of the whole."""
    x = make_inputs(engine_case(None, **shape), device)
    serve_prefill(backend, x, required_backends)
    truth = oracle(to_fp64(x))
    limits = limits_of({"o": oracle(x).o}, {"o": truth.o}, shape["dtype"])
    pool, o = pool_of(x.initial_state), torch.empty_like(x.v)
    for (start, end), batches in zip(
        itertools.pairwise((0, 64, 128, 131)), ([(0, 5)], [(0, 1), (1, 5)], [(0, 2), (2, 4), (4, 5)]), strict=True
    ):
        for a, b in batches:
            part = {n: getattr(x, n)[a:b, start:end].contiguous() for n in ("q", "k", "v", "g", "beta")}
            index = torch.tensor(SLOTS[a:b], device=device)
            o[a:b, start:end] = prefill(x._replace(**part), backend, pool, state_indices=index).o
    check({"o": o}, {"o": truth.o}, limits)
    whole = call(x._replace(final_state=True), backend)
    if backend != "eager" and "fla" not in backend:
        assert torch.equal(o, whole.o)
        assert torch.equal(pool[list(SLOTS)], whole.final_state)


@on_every_backend
@on_every_device
@on_rows_and_packed
def test_views_of_wider_rows(lengths: Any, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """q, k, v and beta of one projection, a pool whose slots are apart, every second slot index."""
    x = make_inputs(engine_case(lengths), device)
    serve_prefill(backend, x, required_backends)
    B, T = x.q.shape[:2]
    wide = torch.cat([t.flatten(2) for t in (x.q, x.k, x.v)] + [x.beta, x.beta.new_zeros(B, T, 6)], -1)
    sizes = [t.flatten(2).shape[2] for t in (x.q, x.k, x.v)]
    q, k, v, beta, _ = wide.split([*sizes, x.beta.shape[2], 6], -1)
    views = x._replace(q=q.view(x.q.shape), k=k.view(x.k.shape), v=v.unflatten(-1, x.v.shape[2:]), beta=beta)
    want = call(x._replace(final_state=True), backend)
    HV, V, K = x.initial_state.shape[1:]
    buffer = torch.full((8, HV * V * K + 64), torch.nan, device=device, dtype=x.initial_state.dtype)
    pool = buffer[:, : HV * V * K].view(8, HV, V, K)
    pool.copy_(pool_of(x.initial_state))
    slots = torch.tensor([[slot, 7] for slot in SLOTS], device=device)[:, 0]
    got = prefill(views, backend, pool, state_indices=slots)
    assert torch.equal(got.o, want.o)
    assert torch.equal(pool[list(SLOTS)], want.final_state)
    assert buffer[:, HV * V * K :].isnan().all()
    assert pool[[1, 4, 7]].isnan().all()


@on_every_backend
@on_every_device
def test_one_token_of_each_sequence(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Rows of a batch that are views of packed tokens, as an engine has them: strides of a dimension of size 1."""
    x = make_inputs(engine_case(None, T=1), device)
    serve_prefill(backend, x, required_backends)
    want = call(x._replace(final_state=True), backend)
    rows = {n: getattr(x, n)[:, 0][None] for n in ("q", "k", "v", "g", "beta")}
    views = {n: t.clone(memory_format=torch.contiguous_format).transpose(0, 1) for n, t in rows.items()}
    assert views["q"].stride(1) == 5 * views["q"].stride(0)
    pool = pool_of(x.initial_state)
    slots = torch.tensor(SLOTS, device=device)
    got = prefill(x._replace(**views), backend, pool, state_indices=slots)
    assert torch.equal(got.o, want.o)
    assert torch.equal(pool[list(SLOTS)], want.final_state)


@on_every_backend
@on_every_device
@on_rows_and_packed
def test_what_only_the_gpu_knows(lengths: Any, device: str, backend: str, required_backends: frozenset[str]) -> None:
    """Slots that do not exist are padding, and what is no boundary of the sequence gives zeros; "eager" raises."""
    lengths = lengths and (70, 64, 128, 65, 64)
    x = make_inputs(engine_case(lengths), device)
    serve_prefill(backend, x, required_backends)
    want = call(x._replace(final_state=True), backend)
    for at in (1, 63, 70, 131, 192, -2):
        pool = pool_of(x.initial_state, (6, 2, -1, -1, 5))
        slots = torch.tensor([6, 2, 8, -7, 5], device=device, dtype=torch.int32)
        boundaries = torch.tensor([at, 64, 64, 64, at], device=device, dtype=torch.int32)
        if backend == "eager":
            before = pool.clone()
            for given in (dict(state_indices=slots), dict(state_indices=slots.clamp(-1, 7), checkpoint_at=boundaries)):
                with pytest.raises(ValueError, match=r"state_indices must be in|checkpoint_at must be multiples of 64"):
                    prefill(x, backend, pool, **given)
            assert torch.equal(pool.nan_to_num(7), before.nan_to_num(7))
            continue
        got = prefill(x, backend, pool, state_indices=slots, checkpoint_at=boundaries)
        assert not got.checkpoints[[0, 2, 3, 4]].any(), at
        assert got.checkpoints[1].any()
        for n, live in enumerate((True, True, False, False, True)):
            rows, tokens = tokens_of(x, n)
            assert torch.equal(got.o[rows, tokens], want.o[rows, tokens]) if live else not got.o[rows, tokens].any()
        assert torch.equal(pool[[6, 2, 5]], want.final_state[[0, 1, 4]])
        assert pool[[0, 1, 3, 4, 7]].isnan().all()


def test_slots_are_not_read_by_the_host() -> None:
    """On meta tensors, which have no values."""
    meta = functools.partial(torch.zeros, device="meta")
    live, states = meta(3, dtype=torch.bool), meta(3, 2, 4, 4)
    slot_copies._put_back(meta(5, 2, 4, 4), meta(3, dtype=torch.int32), live, states)
    slot_copies.clear_padding(meta(1, 9, 2, 4), live, meta(4, dtype=torch.int32))
    slot_copies.clear_padding(meta(3, 9, 2, 4), live, None)
    x = make_inputs(engine_case((70, 64)), "meta")
    chosen = {n: getattr(x, n, None) for n in PrefillInputs._fields}
    more = {"checkpoints": meta(2, 2, 128, 128), "checkpoint_at": meta(2, dtype=torch.int32)}
    slot_copies._choose(PrefillInputs(**chosen | more), meta(1, 2, 2, 128, 128), None, meta(2, dtype=torch.bool))


@pytest.mark.emulated
def test_views_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our CUDA forward copies rows only where it cannot read them by vectors."""
    backend = EMULATED["sm90@emulator"]
    copied: list[Tensor] = []
    plain = launcher.aligned
    monkeypatch.setattr(launcher, "aligned", lambda t: copied.append(t) or plain(t))
    x = make_inputs(engine_case((3, 1), K=64, V=64, group=1), "cpu")
    for offset, in_place in ((0, True), (1, False)):
        wide = torch.zeros(1, 4, 3 * 64 + 8, dtype=BF16)
        q, k, v = (wide[..., offset + 64 * i : offset + 64 * (i + 1)].unflatten(-1, (1, 64)) for i in range(3))
        for view, t in ((q, x.q), (k, x.k), (v, x.v)):
            view.copy_(t)
        copied.clear()
        with registered(backend):
            prefill(x._replace(q=q, k=k, v=v), backend.name, None, out=torch.empty_like(x.v))
        assert [any(t.data_ptr() == view.data_ptr() for t in copied) for view in (q, k, v)] == [not in_place] * 3


@on_every_backend
@on_every_device
def test_a_pool_in_bf16(device: str, backend: str, required_backends: frozenset[str]) -> None:
    """States are rounded once, where they are stored."""
    x = make_inputs(engine_case(LENGTHS, dtype=BF16), device)
    serve_prefill(backend, x, required_backends)
    initial = x.initial_state.to(BF16)
    want = call(x._replace(initial_state=initial.float(), final_state=True), backend)
    pool = pool_of(initial)
    got = prefill(x, backend, pool, state_indices=torch.tensor(SLOTS, device=device))
    assert torch.equal(got.o, want.o)
    assert torch.equal(pool[list(SLOTS)], want.final_state.to(BF16))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(state=None), ValueError, "state must be a pool of states with state_indices, got None"),
        (dict(state=[0]), TypeError, "state must be a torch.Tensor, got list"),
        (dict(state=torch.zeros(3, 2, 32, 16), state_indices=None), ValueError, r"state must have shape .*\[2, 2, 32"),
        (dict(state=torch.zeros(1, 2, 32, 16).expand(2, -1, -1, -1), state_indices=None), ValueError,
         "state must not be expanded"),
        (dict(state_indices=torch.zeros(3, dtype=torch.int32)), ValueError, r"state_indices must have shape \[2\]"),
        (dict(state_indices=torch.zeros(2)), TypeError, "state_indices must be int32 or int64, got torch.float32"),
        (dict(state_indices=[0, 1]), TypeError, "state_indices must be a torch.Tensor, got list: pass torch.tensor"),
        (dict(state_indices=torch.tensor([1, 1])), ValueError, "got slot 1 twice: an update would be lost"),
        (dict(state_indices=torch.tensor([0, 4])), ValueError, r"state_indices must be in \[0, 3\], got 0 to 4"),
        (dict(checkpoint_at=torch.tensor([0, 63])), ValueError,
         "checkpoint_at must be multiples of 64 within the sequences, or -1 for none, got 63 for sequence 1 of 70 tok"),
        (dict(checkpoint_at=torch.tensor([0, 128])), ValueError, "got 128 for sequence 1 of 70 tokens"),
        (dict(out=torch.zeros(2, 70, 2, 33)), ValueError, r"out must have shape \[2, 70, 2, 32\]"),
        (dict(out=torch.zeros(2, 70, 2, 32, dtype=FP64)), TypeError, "out must be float32"),
        (dict(out=torch.zeros(2, 70, 32, 2).mT), ValueError, "out must be contiguous, got strides"),
        (dict(state=torch.zeros(0, 2, 32, 16)), ValueError, "state must have at least 1 slot, got 0"),
        (dict(state=torch.zeros(1, 2, 32, 16).expand(4, -1, -1, -1)), ValueError, "must not be expanded"),
    ],
)  # fmt: skip
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    """Nothing is written before one is raised."""
    x = make_inputs(Case(T=70, B=2, H=1, group=2, K=16, V=32, dtype=torch.float32), "cpu")
    pool = torch.ones(4, 2, 32, 16)
    given = dict(state=pool, state_indices=torch.tensor([2, 0])) | change
    with torch.no_grad(), pytest.raises(error, match=message):
        kda_prefill(*x[:5], **options(x), **given)
    assert (pool == 1).all()


def test_calls_alike_are_known() -> None:
    """With other tensors, and without holding any."""
    op._prefill_cache.clear()
    for seed in range(3):
        x = make_inputs(engine_case(LENGTHS, dtype=torch.float32, K=16, V=32), "cpu", seed)
        slots, at = torch.tensor(SLOTS), torch.tensor(AT)
        prefill(x, "eager", pool_of(x.initial_state), state_indices=slots, checkpoint_at=at)
    ((_, alike),) = op._prefill_cache._values.items()
    assert len(alike) == 1
    held = [t for key in op._prefill_cache._values for t in key if isinstance(t, Tensor)]
    assert held == []


def test_an_output_over_an_input_is_refused() -> None:
    x = make_inputs(Case(T=70, H=2, K=16, V=16, dtype=torch.float32), "cpu")
    for name in ("q", "v"):
        with (
            torch.no_grad(),
            pytest.raises(ValueError, match=f"out must not overlap an input, got the memory of {name}"),
        ):
            kda_prefill(*x[:5], None, **options(x), out=getattr(x, name))


def test_gradients_are_refused() -> None:
    x = make_inputs(Case(T=70, dtype=torch.float32), "cpu")
    with pytest.raises(ValueError, match=r"kda_prefill updates .* no gradient: call it under torch.no_grad\(\)"):
        kda_prefill(x.q.requires_grad_(), *x[1:5], None, **options(x))


DEPRECATED = r"kda\(state_indices=, checkpoint_at=, out=\) is deprecated: use kda_layers.kda_prefill"


@on_rows_and_packed
def test_keywords_of_kda_for_one_release(lengths: Any) -> None:
    """`kda` warns and does what it did: only a pool is written."""
    x = make_inputs(engine_case(lengths, dtype=torch.float32, K=16, V=32), "cpu")
    want, initial = call(x._replace(final_state=True, checkpoint_every=64)), x.initial_state.clone()
    slots, at, out = torch.tensor(SLOTS), torch.tensor(AT), torch.empty_like(x.v)
    pool = pool_of(x.initial_state)
    with torch.no_grad(), pytest.warns(DeprecationWarning, match=DEPRECATED):
        got = kda(*x[:5], **options(x), initial_state=pool, state_indices=slots, checkpoint_at=at, out=out)
    assert got.o is out
    assert got.final_state is None
    assert torch.equal(out, want.o)
    assert torch.equal(pool[list(SLOTS)], want.final_state)
    assert torch.equal(got.checkpoints[1], initial[1])
    for state in (initial, None):
        with torch.no_grad(), pytest.warns(DeprecationWarning, match=DEPRECATED):
            got = kda(*x[:5], **options(x), initial_state=state, return_final_state=True, out=out)
        assert torch.equal(got.final_state, call(x._replace(initial_state=state, final_state=True)).final_state)
    assert torch.equal(initial, x.initial_state)
    for change, message in (
        (dict(return_final_state=True), "final_state False with state_indices"),
        (dict(initial_state=None), "initial_state must be a pool of states and"),
        (dict(checkpoint_every=64), "checkpoint_every must be 0 with state_indices, checkpoint_at or out, got 64"),
        (dict(segments="always"), "segments must be 'never' or 'auto' with state_indices"),
    ):
        given: dict[str, Any] = dict(initial_state=pool, state_indices=slots) | change
        with (
            torch.no_grad(),
            pytest.warns(DeprecationWarning, match=DEPRECATED),
            pytest.raises(ValueError, match=message),
        ):
            kda(*x[:5], **options(x), **given)


def test_a_backend_without_prefill_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feature of its own: the other functions may still choose the backend."""
    eager = KDA.backends()["eager"]
    other = type("Other", (type(eager),), {"name": "other", "features": eager.features - {"prefill"}, "priority": 99})()
    x = make_inputs(Case(T=70, H=1, K=16, V=16, dtype=torch.float32, state=True), "cpu")
    fields = {n: getattr(x, n, None) for n in PrefillInputs._fields} | {"state": x.initial_state}
    reason = "prefills states in place, needs kda with return_final_state=True"
    monkeypatch.setattr(KDA, "_found", {"other": other, "eager": eager})
    KDA.clear_caches()
    try:
        asked = problem_of(PrefillInputs(**fields))
        assert KDA.select(asked) is eager
        assert f"other    cannot: {reason}" in explain(asked)
        assert KDA.select(problem_of(x)) is other
        with torch.no_grad(), pytest.raises(ValueError, match=f"'other' cannot serve .*: {reason}"):
            kda_prefill(*x[:5], x.initial_state.clone(), **options(x), backend="other")
        prefill(x, None, x.initial_state.clone())
    finally:
        KDA.clear_caches()


@pytest.mark.compiles
@on_every_device
def test_compiled(device: str) -> None:
    x = make_inputs(replace(engine_case(LENGTHS), dtype=torch.float32, K=16, V=32), device)
    slots, at = (torch.tensor(t, device=device) for t in (SLOTS, AT))

    def step(pool: Tensor, out: Tensor) -> Tensor:
        got = kda_prefill(*x[:5], pool, **options(x), state_indices=slots, checkpoint_at=at, out=out)
        return got.checkpoints + 0

    results = []
    for f in (step, torch.compile(step, fullgraph=True)):
        pool, out = pool_of(x.initial_state), torch.empty_like(x.v)
        with torch.no_grad():
            checkpoints = f(pool, out)
        results.append((checkpoints, pool[list(SLOTS)], out))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sm90", "fla"])
def test_captured_in_a_graph(backend: str, required_backends: frozenset[str]) -> None:
    """One graph for every batch of up to 5 sequences: offsets, slots, boundaries and tokens are read on the GPU."""
    x = make_inputs(engine_case((70, 3, 128, 65, 64)), "cuda")
    serve_prefill(backend, x, required_backends)
    slots, at = torch.tensor(SLOTS, device="cuda"), torch.tensor((64, 0, 128, 64, -1), device="cuda")
    pool, out, results = pool_of(x.initial_state), torch.empty_like(x.v), []

    def step() -> Tensor:
        return prefill(x, backend, pool, state_indices=slots, checkpoint_at=at, out=out).checkpoints

    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        checkpoints = step()
    slots.copy_(torch.tensor((1, -1, 4, 7, -1)))
    x.cu_seqlens.copy_(torch.tensor((0, 130, 130, 200, 300, 330)))
    for run in (step, graph.replay):
        pool.copy_(pool_of(x.initial_state, (1, -1, 4, 7, -1)))
        out.fill_(torch.nan)
        found = run()
        results.append((out.clone(), pool.clone(), (checkpoints if found is None else found).clone()))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))
