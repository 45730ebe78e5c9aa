"""Groups that lead by the state alone, others that follow with the outputs, in the emulator: the bits of one role."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from kda_layers import KDAOutput
from kda_layers.kernels.kda.contract import Inputs
from kda_layers.kernels.kda.cuda import forms
from kda_layers.kernels.kda.cuda.forward import costs, two_roles
from kda_layers.kernels.kda.cuda.forward.costs import STRETCH, Split
from tests import cuda_emulator
from tests.kernels import emulated, test_prefill_two_roles, test_saving_two_roles
from tests.kernels.cases import FP16, Case, ids, make_inputs
from tests.kernels.test_forward_two_roles import H100, assert_same, signature

CHUNK = 64
NARROW = Case(K=64, V=64, H=1, dtype=FP16, gate="softplus", g_wide=True, T=14 * CHUNK, checkpoints=False)
CASES = [
    Case(T=13 * CHUNK + 18, state=True, checkpoints=False),
    Case(B=2, T=25 * CHUNK, H=1, group=1, slow=True, final=False, checkpoints=False),  # stretches of 12, 12 and 1
    Case(T=16 * CHUNK, H=1, group=2, gate="log_decay", head_gates=True, g_wide=True, state=True, checkpoints=False),
    NARROW,
]


def splits_of(x: Inputs) -> list[Split]:
    """One group that follows all, as many as lead, and such that take stretches of any; the fewest ring slots."""
    leading = x.v.shape[0] * x.v.shape[2]
    return [Split.of(leading, 2, 1), Split.of(leading, 4, leading), Split.of(leading, 2, 2 * leading - 1)]


@pytest.mark.emulated
@pytest.mark.parametrize("case", **ids(CASES))
def test_bits_of_the_forward_kernel(case: Case) -> None:
    x = make_inputs(case)
    if case.head_gates:  # as the operator hands them on
        x = x._replace(g=x.g[..., None])
    want = emulated.forward(x)
    for split in splits_of(x):
        assert split.ring_slots == split.least_slots
        assert_same(emulated.two_roles(x, split), want)


@pytest.mark.emulated
def test_order_of_concurrent_operations() -> None:
    x = make_inputs(NARROW)
    want = emulated.forward(x)
    for seed in range(1, 7):
        assert_same(emulated.two_roles(x, splits_of(x)[seed % 3], seed=seed), want)


@pytest.mark.emulated
@pytest.mark.parametrize("case", **ids([replace(NARROW, T=62 * CHUNK), replace(NARROW, T=75 * CHUNK, group=1)]))
def test_slots_and_states_that_are_used_again(case: Case) -> None:
    """So many chunks that ring slots, and where states are handed over, are written over what was read."""
    x = make_inputs(case)
    want, leading = emulated.forward(x), x.v.shape[2]
    for seed, followers in enumerate((1, leading, 2 * leading)):
        split = Split.of(leading, 6, followers)
        assert max(split.ring_slots, STRETCH * split.handed_states) < case.T // CHUNK
        assert_same(emulated.two_roles(x, split, seed=seed), want)


SAVING = [CASES[1], CASES[2], replace(NARROW, T=37 * CHUNK + 5, state=True, final=False)]


@pytest.mark.emulated
@pytest.mark.parametrize("case", **ids(SAVING))
def test_saved_tensors(case: Case) -> None:
    """The forward saves what it does in one role. Saved chunks need no ring: leaders wait for nobody."""
    x = test_saving_two_roles.inputs(case)
    want = emulated.forward_saving(x)
    for seed, split in enumerate(splits_of(x)):
        got = emulated.two_roles_saving(x, split, seed=seed, resident=4 if seed == 1 else None)
        test_saving_two_roles.assert_same(got, want)


@pytest.mark.emulated
@pytest.mark.parametrize("final", [True, False])
def test_last_tokens(final: bool) -> None:
    """The decode kernel continues from states that followers store."""
    case = replace(NARROW, T=13 * CHUNK + 3, state=True, final=final)
    x, machine = make_inputs(case), emulated.Emulator(processors=16)

    def call() -> KDAOutput:
        with emulated.GuardedMemory():
            return forms.forward(emulated.guarded_inputs(x), machine, False)[0]

    with emulated.without_two_roles():
        want = call()
    form = forms.TWO_ROLES._replace(serves=lambda *_: [], expected_us=lambda *_: 0.0)
    split = splits_of(x)[1]
    with (
        mock.patch.object(two_roles, "split_of", return_value=split),
        mock.patch.object(forms, "FORMS", (form, forms.ONE_ROLE)),
    ):
        assert_same(call(), want)


@pytest.mark.emulated
def test_accesses_are_ordered() -> None:
    """Also those of states that are handed over; the machine raises an error where nothing orders two."""
    x = make_inputs(replace(NARROW, state=True))
    with cuda_emulator.order_checked():
        emulated.two_roles(x, splits_of(x)[2])
        emulated.two_roles_saving(x, splits_of(x)[2])


@pytest.mark.emulated
@pytest.mark.parametrize("chunks", [2 * STRETCH, 2 * STRETCH + 1])
def test_slots_and_boundary_states(chunks: int) -> None:
    """In and at the end of stretches, a sequence without a slot, and final states in the place of initial ones."""
    case = Case(B=3, T=chunks * CHUNK, K=64, V=64, H=1, dtype=FP16, state=True, checkpoints=False)
    x = test_prefill_two_roles.inputs_of(case)
    assert x.checkpoint_at is not None
    x = x._replace(checkpoint_at=torch.tensor([STRETCH * CHUNK, 64, (STRETCH + 3) * CHUNK], dtype=torch.int32))
    leading = 3 * x.v.shape[2]
    want = test_prefill_two_roles.run(x)
    for split in (Split.of(leading, 2, 1), Split.of(leading, 2, leading)):
        test_prefill_two_roles.assert_same(test_prefill_two_roles.run(x, split), want)


# Heads of 8,192 tokens, and how many groups follow with what prepares; what an H200 ran in the least time.
CHOICES = [(1, 2, 8), (4, 8, 32), (8, 16, 64), (10, 20, 72), (11, 22, 66), (12, 20, 68), (14, 0, 98), (16, 0, 96)]
SAVING_CHOICES = [(4, 12, 32), (8, 24, 64), (11, 22, 66), (12, 24, 60), (13, 23, 60), (15, 22, 58), (18, 0, 96)]


@pytest.mark.parametrize(
    ("heads", "followers", "preparers", "saves"),
    [*((*choice, False) for choice in CHOICES), *((*choice, True) for choice in SAVING_CHOICES)],
)
def test_measured_choices(heads: int, followers: int, preparers: int, saves: bool) -> None:
    s = signature(1, 8192, heads)._replace(saves=saves)
    assert forms.choose(s, H100) is forms.TWO_ROLES
    split = two_roles.split_of(s, 132)
    assert (split.groups, split.followers, split.preparers) == (heads, followers, preparers)
    assert 2 * (heads + followers) + preparers <= 132
    assert split.ring_slots >= split.least_slots


@pytest.mark.parametrize(
    "more",
    [{"stores": True}, {"packed": True}, {"chunks": STRETCH}, {"tiles": 14}],
    ids=lambda more: str(*more),
)
def test_calls_that_nobody_follows(more: dict[str, Any]) -> None:
    work = costs.Work.of(signature(1, 8192, 4))
    assert costs.splits_with_followers(work, 132)
    assert costs.splits_with_followers(work._replace(**more), 132) == []


# B, T, H -> ms of one H200, most of the version "S in halves" of docs/internals/studies/2026-11-25-few-heads.md
TIMES = {
    (1, 2048, 8): 0.0500, (1, 4096, 8): 0.0720, (1, 16384, 8): 0.2131, (2, 8192, 4): 0.1204, (1, 65536, 8): 0.757,
    (1, 8192, 1): 0.1181, (1, 8192, 4): 0.1180, (1, 8192, 8): 0.1179, (1, 8192, 10): 0.1230, (1, 8192, 11): 0.1264,
    (1, 8192, 12): 0.1344,
}  # fmt: skip


@pytest.mark.parametrize(("shape", "ms"), TIMES.items(), ids=str)
def test_expected_times(shape: tuple[int, int, int], ms: float) -> None:
    (us, _), *_ = sorted(costs.splits_with_followers(costs.Work.of(signature(*shape)), 132))
    assert abs(us / 1000 / ms - 1) < 0.03
