"""Sequences that the CUDA forward cuts into segments, in the emulator: accurate, and cut by their own length alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers import KDAOutput, kda
from kda_layers.kernels.cuda.machine import Properties
from kda_layers.kernels.kda.contract import KDA, Inputs
from kda_layers.kernels.kda.cuda import forms, spec
from kda_layers.kernels.kda.cuda.backward import reverse_scan
from kda_layers.kernels.kda.cuda.forward import costs, segments
from kda_layers.kernels.kda.cuda.forward.costs import Split
from kda_layers.kernels.kda.cuda.spec import ALWAYS, Cut, Signature
from kda_layers.testing.hard_inputs import correlated_keys, hard_inputs, repeated_token, resets, turning_keys
from tests.kernels import emulated
from tests.kernels.cases import (
    BF16,
    FP16,
    Case,
    budget,
    call,
    check,
    ids,
    limits_of,
    make_inputs,
    oracle,
    output_gradients,
    outputs,
    run,
    run_draws,
    run_oracle,
    to_fp64,
)
from tests.kernels.emulated_backends import EMULATED, registered
from tests.kernels.test_cuda_forward import assert_same
from tests.kernels.test_hard_inputs import HALF_WRONG, expected

pytestmark = pytest.mark.emulated

SHORT, TILES = 64, 4  # instead of the launcher's, so that short sequences are cut
FORMS = {"warpgroups": 90, "warps": 100}
BATCHED = ("q", "k", "v", "g", "beta", "initial_state")
in_every_form = pytest.mark.parametrize("form", FORMS)
SLOW = Case(H=1, slow=True, state=True, final=True, checkpoints=True)
SOFTPLUS = Case(K=64, V=64, dtype=FP16, gate="softplus", state=True, final=True, checkpoints=True)


def in_segments(x: Inputs, machine: Any, cut: Cut, save: bool = False) -> tuple[KDAOutput, Any]:
    with emulated.GuardedMemory():
        x = spec.aligned_inputs(emulated.guarded_inputs(x))
        return forms.run(x, plan_of(x, machine, cut, save), spec.ALL_IN_CHUNKS)


def plan_of(x: Inputs, machine: Any, cut: Cut, save: bool = False) -> spec.Plan:
    return forms.plan_of(forms.SEGMENTS, machine, Signature.of(x, save)._replace(cut=cut))


def cut(x: Inputs, form: str, processors: int = 16, seed: int = 0, longer: int = SHORT + 1) -> KDAOutput:
    machine = emulated.Emulator(FORMS[form], processors, seed)
    return in_segments(x, machine, Cut(longer, SHORT, TILES))[0]


def whole(x: Inputs, form: str) -> KDAOutput:
    return emulated.forward(x, arch=FORMS[form])


@in_every_form
@pytest.mark.parametrize(
    "case",
    **ids(
        [
            replace(SLOW, T=300),
            replace(SLOW, T=200, B=2, group=2),
            replace(SLOW, T=256, state=False, beta="given"),
            replace(SLOW, lengths=(150, 0, 1, 270, 64), g_wide=True),
            replace(SOFTPLUS, T=321, H=2),
        ]
    ),
)
def test_in_budget(case: Case, form: str) -> None:
    x = make_inputs(case)
    truth, yardstick = (outputs(oracle(cast(x))) for cast in (to_fp64, lambda x: x))
    check(outputs(cut(x, form)), truth, limits_of(yardstick, truth, x.q.dtype))


@in_every_form
@pytest.mark.parametrize(
    "kind", [repeated_token, resets, correlated_keys, turning_keys], ids=lambda kind: kind.__name__
)
def test_hard_inputs(kind: Callable[[int, int, int], dict[str, Any]], form: str) -> None:
    truth, yardstick = expected(kind, 400, 64, 2, BF16, False, True, True, "cpu")
    got = outputs(cut(hard_inputs(kind, 400, 64, 2, BF16), form))
    check(got, truth, {n: min(budget(e, BF16), HALF_WRONG) for n, e in yardstick.items()})


NARROW = replace(SLOW, K=64, V=64)


@pytest.mark.parametrize("backend", ["sm90@emulator", "sm100@emulator"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "case",
    **ids(
        [
            replace(NARROW, T=400, dtype=FP16, gate="softplus", checkpoints=False),
            replace(SLOW, lengths=(150, 0, 1, 400), group=2),
        ]
    ),
)
def test_gradients(case: Case, recompute: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In more segments than the joining kernels have stages for."""
    monkeypatch.setattr(spec, "ALWAYS", Cut(SHORT + 1, SHORT, 2 * TILES))
    xs = [make_inputs(case, draw=n)._replace(recompute_above=float(not recompute)) for n in range(case.draws)]
    xs = xs if not recompute else xs[:1]
    with registered(EMULATED[backend]):
        got = run_draws(lambda x: call(x._replace(segments="always"), backend), xs)
        if recompute:  # the bits of what was kept
            kept = run_draws(lambda x: call(x._replace(segments="always", recompute_above=1.0), backend), xs)
            assert all(torch.equal(got[name], t) for name, t in kept.items())
            return
    truth, yardstick = (run_oracle([cast(x) for x in xs]) for cast in (to_fp64, lambda x: x))
    check(got, truth, limits_of(yardstick, truth, case.dtype))


@pytest.mark.parametrize("final", [False, True])
def test_gradients_of_auto_with_and_without_recomputing(final: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits: what "auto" does not cut, as it returns states, is not cut when the forward runs again."""
    monkeypatch.setattr(spec, "AUTO", Cut(SHORT + 1, SHORT, 2 * TILES, auto=True))
    monkeypatch.setattr(segments, "AUTO_PROCESSORS", 1)
    x = make_inputs(replace(NARROW, T=400, H=1, state=False, final=final, checkpoints=False))
    d_o = {"o": output_gradients(x)["o"]}
    with registered(EMULATED["sm90@emulator"]):
        kept, again = (
            run(lambda x: call(x, "sm90@emulator"), x._replace(segments="auto", recompute_above=above), d_o)
            for above in (1.0, 0.0)
        )
    for name, t in kept.items():
        assert torch.equal(again[name], t), name


# ---------------------------------------------------------------- the same bits


@in_every_form
def test_order_and_number_of_blocks(form: str) -> None:
    x = make_inputs(replace(SLOW, lengths=(130, 0, 300)))
    want = cut(x, form)
    for seed, processors in ((1, 16), (2, 32), (3, 40)):
        assert_same(cut(x, form, processors, seed), want)


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_transitions_by_specialised_ctas(groups: int, fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of blocks of one role, saved tensors too, however blocks are shared out."""
    x = make_inputs(replace(SLOW, B=2, T=300))._replace(fine_gradients=fine)

    def run(roles: bool, seed: int = 0) -> list[Tensor]:
        monkeypatch.setattr(segments, "splits", lambda s, properties: roles)
        machine = emulated.Emulator(processors=16, seed=seed)
        out, saved = in_segments(x, machine, Cut(SHORT + 1, SHORT, TILES), save=True)
        assert saved is not None
        assert (saved.T_fp16 is not None) == fine
        transitions = saved.transitions.unflatten(0, (x.v.shape[0], -1))[:, :-1]  # nobody writes those of last segments
        return [*outputs(out).values(), transitions, *saved._replace(transitions=None).tensors()]

    def split(scanned: int, chunks: int, *_: float) -> tuple[float, Split]:
        return 0.0, Split(groups, 16 - 2 * groups, -(-scanned // groups) * chunks)

    want = run(roles=False)
    monkeypatch.setattr(costs, "transitions_split", split)
    for seed in range(3):
        assert all(map(torch.equal, run(roles=True, seed=seed), want))


def test_who_computes_transitions() -> None:
    hopper, blackwell = (Properties(16, arch, 2**40) for arch in (90, 100))
    s, packed, narrow = (
        Signature.of(make_inputs(replace(SLOW, **more))) for more in ({"T": 70}, {"lengths": (70,)}, {"K": 64, "V": 64})
    )
    assert segments.splits(s, hopper)
    assert not segments.splits(s, blackwell)
    assert not segments.splits(packed, hopper)
    assert not segments.splits(narrow, hopper)
    with emulated.without_two_roles():
        assert not segments.splits(s, hopper)


def test_split_of_transitions() -> None:
    """Each multiprocessor has one block, and the slower of the two roles is as fast as it can be."""
    _, split = costs.transitions_split(scanned=60, chunks=128, all_chunks=8192, processors=132)
    assert split == Split(20, 92, 3 * 128)
    assert costs.transitions_split(scanned=1, chunks=16, all_chunks=32, processors=16)[1] == Split(1, 14, 16)


@in_every_form
def test_alone_batched_and_packed(form: str) -> None:
    x = make_inputs(replace(SLOW, B=3, T=200, checkpoints=False))
    together = cut(x, form)
    rows = [x._replace(**{n: getattr(x, n)[i : i + 1] for n in BATCHED}) for i in range(3)]
    alone = [cut(row, form) for row in rows]
    assert_same(KDAOutput(torch.cat([a.o for a in alone]), torch.cat([a.final_state for a in alone]), None), together)
    flat = {n: getattr(x, n).flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta")}
    packed = cut(x._replace(**flat, cu_seqlens=200 * torch.arange(4)), form)
    assert_same(packed._replace(o=packed.o.view_as(together.o)), together)


@in_every_form
def test_where_a_sequence_is_cut(form: str) -> None:
    """Outputs are those of the whole sequence up to the first border, and differ by rounding after it."""
    x = make_inputs(replace(SLOW, lengths=(300, 100)))
    got, want = cut(x, form), whole(x, form)
    differs = (got.o != want.o).flatten(2).any(2)[0]
    assert Cut(65, SHORT, TILES).segment_tokens(300, 1) == 128
    assert not differs[:128].any()
    assert differs[128:300].any()
    assert Cut(65, SHORT, TILES).segment_tokens(100, 1) == 64
    assert not differs[300:364].any()
    assert differs[364:].any()


@in_every_form
def test_what_is_not_cut_has_the_bits_of_the_whole(form: str) -> None:
    x = make_inputs(replace(SLOW, lengths=(300, 100, 0)))
    got, want = cut(x, form, longer=200), whole(x, form)
    assert torch.equal(got.o[:, 300:], want.o[:, 300:])
    assert torch.equal(got.final_state[1:], want.final_state[1:])
    assert not torch.equal(got.o[:, :300], want.o[:, :300])


@in_every_form
@pytest.mark.parametrize("longer", [200, 301])
def test_packed_sequences_are_launched_in_segments_and_whole(longer: int, form: str) -> None:
    """If none is cut, the launches in segments write nothing, else the other one."""
    x = make_inputs(replace(SLOW, lengths=(300, 100, 0)))
    machine = emulated.Emulator(FORMS[form], 16)
    both = cut(x, form, longer=longer)
    plan = plan_of(x, machine, Cut(longer, SHORT, TILES))
    assert plan.whole is not None
    found = []
    for part in (plan._replace(whole=None), plan.whole):
        with emulated.GuardedMemory():
            found.append(forms.run(spec.aligned_inputs(emulated.guarded_inputs(x)), part, spec.ALL_IN_CHUNKS)[0])
    busy, idle = found if longer <= 300 else reversed(found)
    assert_same(busy, both)
    assert idle.o.isnan().all()
    assert idle.final_state.isnan().all()
    if longer > 300:
        assert_same(busy, whole(x, form))


@pytest.mark.parametrize(
    ("backend", "recompute"), [("sm90@emulator", False), ("sm90@emulator", True), ("sm100@emulator", False)]
)
def test_gradients_of_a_packed_call_that_is_not_cut(
    backend: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "ALWAYS", Cut(401, SHORT, TILES))
    x = make_inputs(replace(NARROW, lengths=(150, 0, 1, 400), group=2))._replace(recompute_above=float(not recompute))
    with registered(EMULATED[backend]):
        never, always = (run_draws(lambda x: call(x, backend), [x._replace(segments=s)]) for s in ("never", "always"))
    assert [n for n, t in never.items() if not torch.equal(always[n], t)] == []


def test_sizes_of_segments() -> None:
    """Powers of two of 1,024 tokens or more; 64 tiles of a sequence at most, but for few more with odd heads."""
    for heads in (1, 2, 3, 4, 8, 16, 63, 64, 96):
        for length in (1, 1024, 1025, 8192, 65536, 100_000, 2**20, 2**27):
            tokens = ALWAYS.segment_tokens(length, heads)
            count = ALWAYS.most_segments(length, heads, packed=False)
            assert tokens >= 1024
            assert tokens & (tokens - 1) == 0
            assert (count - 1) * tokens < length <= count * tokens or count == 1
            assert (count - 1) * heads < 64
            assert count <= ALWAYS.most_segments(2**27, heads, packed=True)
    assert [ALWAYS.segment_tokens(131072, 4), ALWAYS.segment_tokens(2**20, 1)] == [8192, 16384]


# ---------------------------------------------------------------- the option

LONG = replace(SLOW, K=64, V=64, T=ALWAYS.shortest + 70, checkpoints=False)


def called(x: Inputs, mode: str, backend: str) -> KDAOutput:
    with registered(EMULATED[backend]):
        return kda(
            *x[:5], A_log=x.A_log, dt_bias=x.dt_bias, initial_state=x.initial_state, lower_bound=x.lower_bound,
            return_final_state=True, segments=mode, backend=backend,
        )  # fmt: skip


@pytest.mark.parametrize("backend", ["sm90@emulator", "sm100@emulator"])
def test_always(backend: str) -> None:
    x = make_inputs(LONG)
    never, auto, always = (called(x, mode, backend) for mode in ("never", "auto", "always"))
    assert_same(auto, never)
    assert torch.equal(always.o[:, : ALWAYS.shortest], never.o[:, : ALWAYS.shortest])
    assert not torch.equal(always.o, never.o)
    truth, yardstick = (outputs(oracle(cast(x._replace(checkpoint_every=0)))) for cast in (to_fp64, lambda x: x))
    check(outputs(always), truth, limits_of(yardstick, truth, BF16))


def test_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cuts from some length on, up to some heads, without states and on a large GPU with bulk copies."""
    x = make_inputs(LONG)._replace(segments="auto", initial_state=None, final_state=False)
    large, small, without = (emulated.Emulator(arch, processors=n) for arch, n in ((100, 32), (100, 15), (80, 32)))
    monkeypatch.setattr(spec, "AUTO", Cut(LONG.T, auto=True))
    assert forms.is_cut(x, large)
    assert not forms.is_cut(x, small)
    assert not forms.is_cut(x, without)
    hand_on = {"final_state": True, "checkpoint_every": 64, "initial_state": make_inputs(LONG).initial_state}
    for name, value in hand_on.items():
        assert not forms.is_cut(x._replace(**{name: value}), large)
    monkeypatch.setattr(segments, "AUTO_HEADS", 0)
    assert not forms.is_cut(x, large)
    monkeypatch.undo()
    assert not forms.is_cut(x, large)


@pytest.mark.parametrize(
    ("backend", "change", "message"),
    [
        ("eager", {}, "segments is 'always', needs 'never' or 'auto'"),
        ("sm80@emulator", {}, "segments is 'always', needs a GPU with bulk copies, sm_80 has none"),
        ("sm90@emulator", {"out": True}, "segments must be 'never' or 'auto' with state_indices"),
        ("sm90@emulator", {"mode": "often"}, "segments must be 'never', 'auto' or 'always', got 'often'"),
        ("sm90@emulator", {"mode": True}, "segments must be 'never', 'auto' or 'always', got True"),
    ],
)
@pytest.mark.filterwarnings("ignore:kda.*more release of kda_layers:DeprecationWarning")
def test_refusals(backend: str, change: dict[str, Any], message: str) -> None:
    x = make_inputs(replace(LONG, T=70))
    options: dict[str, Any] = {"out": torch.empty_like(x.v)} if "out" in change else {}
    emulated_backend = EMULATED[backend if backend in EMULATED else "sm90@emulator"]

    def run(mode: Any) -> KDAOutput:
        return kda(
            *x[:5], A_log=x.A_log, dt_bias=x.dt_bias, lower_bound=x.lower_bound, segments=mode, backend=backend,
            **options,
        )  # fmt: skip

    with registered(emulated_backend):
        run("never")  # what is known of a call does not hide it
        with pytest.raises(ValueError, match=re.escape(message)):
            run(change.get("mode", "always"))


def test_memory_is_that_of_sequences_that_are_cut() -> None:
    """A pack has at most as many segments as fit into it."""
    x = make_inputs(replace(LONG, lengths=(1100, 1, 1, 1, 1, 1)))
    cut = ALWAYS
    assert cut.rows(x) == 1105 // 1025 * cut.most_segments(1105, 1, packed=True) == 2
    assert cut.rows(x._replace(cu_seqlens=None)) == 2


def test_every_mode_runs_on_a_cpu() -> None:
    """'auto' cuts nothing where 'always' is not served."""
    x = make_inputs(replace(LONG, T=70))

    def of(mode: str) -> Tensor:
        return kda(*x[:5], A_log=x.A_log, dt_bias=x.dt_bias, lower_bound=x.lower_bound, segments=mode).o

    assert torch.equal(of("auto"), of("never"))
    with pytest.raises(ValueError, match="segments is 'always'"):
        of("always")


def test_every_variant_is_listed() -> None:
    for target, capability in (("sm_90a", 90), ("sm_100a", 100), ("sm_80", 80)):
        listed = {str(sorted(d.items())) for b in KDA.backends().values() for _, d in b.variants(target)}
        found = [*segments.variants(capability), *reverse_scan.variants_in_segments(capability)]
        transitions, last_scans, scans = 24 + 12 + 4, 8, 4 + 2  # 12 and 2 are fine, 4 for gates of heads
        by_roles = 12 + 6 + 4 if capability == 90 else 0  # 6 are fine, 4 for gates of heads
        assert len(set(found)) == len(found) == (0 if capability == 80 else transitions + by_roles + last_scans + scans)
        assert {str(sorted(v.defines.items())) for v in found} <= listed
