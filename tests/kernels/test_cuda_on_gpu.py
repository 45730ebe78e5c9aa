"""Our CUDA kernels on a GPU: the same bits always, in graphs, on several streams and from several processes."""

from __future__ import annotations

import multiprocessing
from unittest import mock

import pytest
import torch
from torch import Tensor

from kda_layers import KDAOutput, kda, kda_prefill, kda_step
from kda_layers.kernels.kda.backends.cuda import CudaBackend
from kda_layers.kernels.kda.contract import HEAD_GATES, KDA, Inputs, problem_of
from kda_layers.kernels.kda.cuda import forms, spec
from kda_layers.kernels.kda.cuda.backward import gradients, reverse_scan
from kda_layers.kernels.kda.cuda.forward import segments, two_roles
from kda_layers.kernels.kda.cuda.forward.costs import Split
from kda_layers.kernels.kda.cuda.spec import Signature
from kda_layers.kernels.kda.reference import activate
from tests.kernels.cases import (
    FP16,
    Case,
    call,
    check,
    ids,
    limits_of,
    make_inputs,
    options,
    oracle,
    outputs,
    run_draws,
    run_oracle,
    to_device,
    to_fp64,
)
from tests.kernels.emulated import without_two_roles

RUNS = 100
# few heads (blocks of 16 columns), many (of 32, several items a unit), and ragged sequences
CASES = [
    Case(T=700, H=2, slow=True, state=True),
    Case(T=330, B=3, H=48, slow=True, state=True),
    Case(lengths=(65, 0, 1, 300, 64), H=24, group=2, state=True),
]
NAMES = ["few", "many", "packed"]


@pytest.fixture
def backend() -> str:
    """The one for this GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    problem = problem_of(make_inputs(CASES[0], "cuda"))
    ours = [b for b in KDA.backends().values() if isinstance(b, CudaBackend) and not b.unsupported(problem)]
    if not ours:
        pytest.skip(f"no CUDA kernels serve [{problem}]")
    return ours[0].name


def run(x: Inputs, backend: str) -> dict[str, Tensor]:
    with torch.no_grad():
        return {n: t.clone() for n, t in outputs(call(x, backend)).items()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [n for n in got if not torch.equal(got[n], expected[n])] == []


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_many_runs_give_the_same_bits(case: Case, backend: str) -> None:
    x = make_inputs(case, "cuda")
    first = run(x, backend)
    for _ in range(RUNS - 1):
        assert_same(run(x, backend), first)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_graph_replays_on_new_inputs(case: Case, backend: str) -> None:
    x, other = (make_inputs(case, "cuda", draw) for draw in (0, 1))
    run(x, backend)  # compiles and loads
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out: KDAOutput = call(x, backend)
    for draw in (other, make_inputs(case, "cuda", 2)):
        for mine, new in zip(x[:9], draw[:9], strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(new)
        graph.replay()
        assert_same(outputs(out), run(draw, backend))


@pytest.mark.parametrize("H", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_segments(H: int, backend: str) -> None:
    """Outputs and gradients of sequences that are cut: within the budgets, and the same in every run."""
    case = Case(lengths=(2600, 70, 0, 1501), H=H, group=2, slow=True, state=True)
    xs = [make_inputs(case, "cuda")._replace(segments="always")]
    if not KDA.backends()[backend].archs[0].bulk_copies:  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="segments is 'always', needs a GPU with bulk copies"):
            call(xs[0], backend)
        return
    got = run_draws(lambda x: call(x, backend), xs)
    # The recurrence takes minutes for 16 draws of one head, which have as many elements as sixteen heads.
    if H == 16:
        truth, yardstick = (run_oracle([to_device(cast(x), "cuda") for x in xs]) for cast in (to_fp64, lambda x: x))
        check(got, truth, limits_of(yardstick, truth, case.dtype))
    for _ in range(5):
        assert_same(run_draws(lambda x: call(x, backend), xs), got)


@pytest.mark.parametrize("final", [False, True])
def test_transitions_of_segments(final: bool, backend: str) -> None:
    """Specialised CTAs give the bits of CTAs of one role, in every run; gradients too."""
    if backend != "sm90":
        pytest.skip(f"two roles are for sm_90, this GPU has {backend}")
    x = make_inputs(Case(T=20000, B=2, H=3, slow=True, state=True, final=final, checkpoints=False), "cuda")
    x = x._replace(segments="always")
    with without_two_roles():
        want, gradients = run(x, backend), run_draws(lambda x: call(x, backend), [x])
    machine = KDA.backends()[backend].machine  # type: ignore[attr-defined]
    assert segments.splits(Signature.of(x), machine.properties(x.q.device))
    for _ in range(RUNS):
        assert_same(run(x, backend), want)
    assert_same(run_draws(lambda x: call(x, backend), [x]), gradients)


TWO_ROLES = [
    Case(T=4096, H=12, slow=True, state=True, checkpoints=False),
    Case(T=8192 + 3, H=8, group=2, dtype=FP16, checkpoints=False),
    Case(T=4096 + 40, B=2, H=10, final=False, g_wide=True, checkpoints=False),
    Case(T=4096, B=4, H=12, state=True, checkpoints=False),  # several tiles a group
    Case(T=4096, H=12, A_log=False, dt_bias=False, checkpoints=False),
    Case(T=8192, H=1, checkpoints=False),
    Case(T=8192, H=3, state=True, checkpoints=False),  # an odd number of groups
    Case(T=4096 + 3, B=2, H=12, slow=True, state=True),
    Case(T=4096, B=4, H=12, g_wide=True),  # several tiles a group, some shared
    Case(lengths=(128,) * 64, H=32, slow=True, checkpoints=False),
    Case(lengths=(130, 0, 4, 2000, 64, 1, 777, 3000), H=16, group=2, state=True),
    Case(lengths=(100, 1, 164, 66) * 30, H=8),
    Case(lengths=(130, 0, 4, 2000, 64, 1, 777, 3000), H=16, group=2, state=True, checkpoints=False),
    Case(lengths=(100, 1, 164, 66) * 30, H=8, state=True, final=False, checkpoints=False),  # listed by length
]


@pytest.mark.parametrize("case", **ids(TWO_ROLES))
def test_two_roles(case: Case, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Specialised CTAs give the bits of CTAs of one role, in every run."""
    if backend != "sm90":
        pytest.skip(f"two roles are for sm_90, this GPU has {backend}")
    x = make_inputs(case, "cuda")
    with without_two_roles():
        want = run(x, backend)
    launched = mock.Mock(wraps=forms.run)
    monkeypatch.setattr(forms, "run", launched)
    form = forms.TWO_ROLES._replace(serves=lambda *_: [], expected_us=lambda *_: 0.0)
    monkeypatch.setattr(forms, "FORMS", (form, forms.ONE_ROLE))
    forms._planned.cache_clear()
    if x.cu_seqlens is not None:  # packed sequences so uneven are left to blocks of one role
        monkeypatch.setattr(two_roles, "split_of", lambda s, processors: Split.of(22, (processors - 44) // 2 * 2))
        two_roles.plan_of.cache_clear()
    for _ in range(RUNS):
        assert_same(run(x, backend), want)
    assert [plan.launches[0].cooperative for _, plan, _ in (c.args for c in launched.call_args_list)] == [True] * RUNS
    forms._planned.cache_clear()
    two_roles.plan_of.cache_clear()


PREFILLS = [
    Case(T=8192 + 3, H=32, state=True, checkpoints=False),
    Case(lengths=(8192,), H=12, slow=True, state=True, checkpoints=False),
    Case(T=4096, B=3, H=10, dtype=FP16, g_wide=True, state=True, checkpoints=False),
    Case(lengths=(512,) * 16, H=32, slow=True, state=True, checkpoints=False),
    Case(lengths=(130, 0, 4, 2000, 64, 1, 777, 3000), H=16, group=2, g_wide=True, state=True, checkpoints=False),
    Case(lengths=(100, 1, 164, 66) * 30, H=8, state=True, checkpoints=False),  # listed by length
    Case(lengths=(130, 0, 4, 2000, 64, 1, 777, 3000), H=16, group=2, head_gates=True, state=True, checkpoints=False),
]


@pytest.mark.parametrize("case", **ids(PREFILLS))
def test_prefill_in_two_roles(case: Case, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From and into slots, with boundary states and padding: the bits of CTAs of one role, in every run."""
    if backend != "sm90":
        pytest.skip(f"two roles are for sm_90, this GPU has {backend}")
    x = make_inputs(case, "cuda")
    assert x.initial_state is not None
    N = x.initial_state.shape[0]
    index = torch.arange(N, device="cuda")
    slots, at = torch.where(index % 5 == 1, -1, index.flip(0)), 64 * index

    def prefilled() -> list[Tensor]:
        pool = x.initial_state.clone()  # type: ignore[union-attr]
        given = options(x) | dict(state_indices=slots, checkpoint_at=at, backend=backend)
        found = kda_prefill(*x[:5], pool, **given)
        return [found.o, pool, found.checkpoints]  # type: ignore[list-item]

    with torch.no_grad():
        with without_two_roles():
            want = prefilled()
        form = forms.TWO_ROLES._replace(serves=lambda *_: [], expected_us=lambda *_: 0.0)
        monkeypatch.setattr(forms, "FORMS", (form, forms.ONE_ROLE))
        forms._planned.cache_clear()
        if case.lengths and len(case.lengths) > 1:
            monkeypatch.setattr(two_roles, "split_of", lambda s, processors: Split.of(22, (processors - 44) // 2 * 2))
            two_roles.plan_of.cache_clear()
        planned = mock.Mock(wraps=forms.planned)
        monkeypatch.setattr(forms, "planned", planned)
        for _ in range(RUNS):
            assert all(map(torch.equal, prefilled(), want))
        assert planned.call_count == RUNS
        assert forms.planned(KDA.backends()[backend].machine, planned.call_args.args[1])[0] is form  # type: ignore[attr-defined]
    forms._planned.cache_clear()
    two_roles.plan_of.cache_clear()


SAVING = [
    Case(T=4096, H=12, slow=True, state=True, checkpoints=False),
    Case(T=8192, H=32, final=False, checkpoints=False),
    Case(T=4096 + 40, B=2, H=10, group=2, dtype=FP16, g_wide=True, state=True),
    Case(lengths=(130, 0, 4, 2000, 64, 1, 777, 3000), H=16, group=2, state=True),
    Case(lengths=(100, 1, 164, 66) * 30, H=8, final=False, checkpoints=False),
]
LONG = Case(T=16384 + 40, B=2, H=2, group=2, dtype=FP16, g_wide=True, state=True, checkpoints=False)
SAVING_SPLITS = [*((case, 0) for case in SAVING), (SAVING[0], 18), (LONG, 24)]


@pytest.mark.parametrize(("case", "followers"), SAVING_SPLITS, ids=str)
def test_saving_in_two_roles(case: Case, followers: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Specialised CTAs save the bits that CTAs of one role save, in every run."""
    if backend != "sm90":
        pytest.skip(f"two roles are for sm_90, this GPU has {backend}")
    x = spec.aligned_inputs(make_inputs(case, "cuda"))
    machine, s = KDA.backends()[backend].machine, Signature.of(x, True)  # type: ignore[attr-defined]
    groups = 24 if s.packed else min(24, s.sequences * x.v.shape[2])
    rest = machine.properties(x.q.device).processors // 2 * 2 - 2 * (groups + followers)
    split = Split.of(groups, rest, followers)
    monkeypatch.setattr(two_roles, "split_of", lambda *_: split)
    two_roles.plan_of.cache_clear()

    def saved(form: forms.Form) -> dict[str, Tensor]:
        out, kept = forms.launch(x, machine, s, form=form)
        assert kept is not None
        every = {**outputs(out), **kept._asdict()}
        if case.lengths:  # rows that these sequences leave over
            rows = sum(-(-n // 64) for n in case.lengths)
            every |= {n: every[n][:rows] for n in ("prepared", "states", "T_fp16") if every[n] is not None}
        return {n: t.contiguous().view(torch.uint8) for n, t in every.items() if t is not None}

    want = saved(forms.ONE_ROLE)
    for _ in range(RUNS // 5):
        assert_same(saved(forms.TWO_ROLES), want)
    two_roles.plan_of.cache_clear()


BACKWARDS = [
    Case(T=8192, H=8, final=False, checkpoints=False),
    Case(T=4096 + 40, B=2, H=5, group=2, slow=True, state=True),
    Case(T=4096, H=80, checkpoints=False),  # more blocks than multiprocessors
    Case(T=8192, H=6, K=64, V=64, dtype=FP16, gate="softplus", g_wide=True, state=True),
    Case(T=4096, H=4, head_gates=True, checkpoints=False),
    Case(lengths=(130, 0, 4, 2000, 64, 1, 777, 3000), H=8, group=2, state=True),
    Case(lengths=(100, 1, 164, 66) * 30, H=8, checkpoints=False),
]


@pytest.mark.parametrize("case", **ids(BACKWARDS))
def test_gradients_beside_the_scan(case: Case, backend: str) -> None:
    """The gradients kernel gives the bits that it gives after the reverse scan, in every run."""
    x = spec.aligned_inputs(activate(make_inputs(case, "cuda"), ("gate", "beta", "qk_l2norm", HEAD_GATES)))
    machine, s = KDA.backends()[backend].machine, Signature.of(x, True)  # type: ignore[attr-defined]
    out, saved = forms.launch(x, machine, s)
    assert saved is not None
    d_o, d_final = torch.randn_like(out.o), None if out.final_state is None else torch.randn_like(out.final_state)

    def run_backward(waits: bool) -> dict[str, Tensor]:
        # The scan's outputs get this memory: what is read too early is NaN
        poison = [torch.full_like(t, torch.nan) for t in (saved.errors, saved.states)]
        torch.cuda.synchronize()
        del poison
        scanned = reverse_scan.reverse_scan(x, machine, saved, d_o, d_final, None)
        if waits:
            torch.cuda.synchronize()
        found = gradients.gradients(x, machine, saved, scanned, d_o)._asdict()
        return {n: t for n, t in found.items() if t is not None}

    want = run_backward(True)
    assert not any(t.isnan().any() for t in want.values())
    for _ in range(RUNS // 5):
        assert_same(run_backward(False), want)


AT_ONCE = {"many": CASES[1:2] * 4, "few and many": [TWO_ROLES[0], CASES[1], TWO_ROLES[1], TWO_ROLES[3]]}


@pytest.mark.parametrize("cases", AT_ONCE.values(), ids=AT_ONCE)
def test_streams_at_once(cases: list[Case], backend: str) -> None:
    """Blocks wait for each other, also when launches share the multiprocessors and some have priority."""
    inputs = [make_inputs(case, "cuda", draw) for draw, case in enumerate(cases)]
    expected = [run(x, backend) for x in inputs]
    streams = [torch.cuda.Stream(priority=-(i % 2)) for i in range(len(cases))]
    torch.cuda.synchronize()
    for _ in range(10):
        got = []
        for x, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(run(x, backend))
        torch.cuda.synchronize()
        for mine, right in zip(got, expected, strict=True):
            assert_same(mine, right)


def _work(backend: str, draw: int) -> None:
    x = make_inputs(CASES[1], "cuda", draw)
    truth, yardstick = outputs(oracle(to_fp64(x))), outputs(oracle(x))
    limits = limits_of(yardstick, truth, x.q.dtype)
    for _ in range(10):
        check(run(x, backend), truth, limits)


def test_two_processes_at_once(backend: str) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_work, args=(backend, draw)) for draw in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=300)
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_decoding_in_a_graph(backend: str) -> None:
    x = make_inputs(Case(T=1, B=5, H=4, group=2, state=True), "cuda")
    assert x.initial_state is not None
    state, expected_state = x.initial_state.clone(), x.initial_state.clone()
    with torch.no_grad():
        kda_step(*x[:5], state.clone(), **options(x), backend=backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = kda_step(*x[:5], state, **options(x), backend=backend)
        for _ in range(3):
            graph.replay()
            expected = kda_step(*x[:5], expected_state, **options(x), backend=backend)
            assert torch.equal(o, expected)
            assert torch.equal(state, expected_state)


def test_a_bf16_state(backend: str) -> None:
    """As exact as its rounding, at every call: also from a prefill on."""
    x = make_inputs(Case(T=1, B=5, H=4, group=2, state=True), "cuda")
    assert x.initial_state is not None
    narrow = x.initial_state.bfloat16()
    with torch.no_grad():
        state, wide = (
            kda(*x[:5], **options(x), initial_state=s, return_final_state=True, backend=backend).final_state
            for s in (narrow, narrow.float())
        )
        assert torch.equal(state, wide.bfloat16())
        wide = state.float()
        o = kda_step(*x[:5], state, **options(x), backend=backend)
        expected = kda_step(*x[:5], wide, **options(x), backend=backend)
    # The same fp32 sums in another order, rounded: a unit in bf16's last place at most.
    torch.testing.assert_close(o, expected, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(state, wide.bfloat16(), rtol=2**-7, atol=1e-6)
