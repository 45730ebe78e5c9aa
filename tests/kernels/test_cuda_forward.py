"""The forward kernel in the emulator: the same bits in every order and plan, and inputs that are hard for it.

The tests of every backend run it, too, as `sm90@emulator` and so on (see emulated_backends.py): they compare it with
the recurrence. Here are the forms and plans that a problem of theirs does not choose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kda_layers import KDAOutput
from kda_layers.kernels.kda.contract import Inputs
from kda_layers.kernels.kda.cuda import forms
from kda_layers.testing.hard_inputs import hard_inputs, resets
from tests.kernels import emulated
from tests.kernels.cases import (
    BF16,
    FP16,
    Case,
    budget,
    check,
    ids,
    limits_of,
    make_inputs,
    oracle,
    output_gradients,
    outputs,
    sequences,
    to_fp64,
)
from tests.kernels.emulated_backends import EMULATED
from tests.kernels.test_hard_inputs import HALF_WRONG, expected
from tests.kernels.test_property import cases_in_16_bits

pytestmark = pytest.mark.emulated

# Of each form few kernels are compiled: for K = V = 128 and the lower bound, for 128 and precomputed log-decays, for 64
# and softplus.
FORMS: dict[str, dict[str, dict[str, int]]] = {
    "warpgroups": {
        "lower_bound": {"arch": 90, "BV": 16, "cluster": 1},
        "log_decay": {"arch": 90, "BV": 16, "cluster": 1},
        "softplus": {"arch": 90, "BV": 32, "cluster": 2},
    },
    "warps": {"lower_bound": {"arch": 80}, "log_decay": {"arch": 100}, "softplus": {"arch": 80}},
}

in_every_form = pytest.mark.parametrize("form", FORMS)
WIDE = Case(H=1, state=True)
SOFTPLUS = Case(K=64, V=64, dtype=FP16, gate="softplus", state=True)
PACKED = (65, 0, 1, 130, 64, 0)


def chunk(x: Inputs, form: str, **launch: Any) -> KDAOutput:
    return emulated.forward(x, **FORMS[form][x.gate_activation] | launch)


def assert_same(got: KDAOutput, want: KDAOutput) -> None:
    assert outputs(got).keys() == outputs(want).keys()
    assert [n for n, t in outputs(want).items() if not torch.equal(outputs(got)[n], t)] == []


def check_in_budget(x: Inputs, compute: Callable[[Inputs], KDAOutput]) -> None:
    truth, yardstick = (outputs(oracle(cast(x))) for cast in (to_fp64, lambda x: x))
    check(outputs(compute(x)), truth, limits_of(yardstick, truth, x.q.dtype))


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(case=cases_in_16_bits(gates=("lower_bound",), widths=(64,), dtypes=(BF16,), g_wide=True))
def test_random_shapes(case: Case) -> None:
    check_in_budget(make_inputs(case), lambda x: chunk(x, "warpgroups", processors=9))


# ---------------------------------------------------------------- the same bits


@in_every_form
@pytest.mark.parametrize("case", **ids([replace(WIDE, lengths=(65, 0, 1, 200)), replace(SOFTPLUS, B=2)]))
def test_order_of_concurrent_operations(case: Case, form: str) -> None:
    x = make_inputs(case)
    want = chunk(x, form)
    for seed in range(1, 4):
        assert_same(chunk(x, form, seed=seed), want)


@in_every_form
def test_number_of_blocks(form: str) -> None:
    """From one CTA group that computes all work tiles to one for each of them."""
    x = make_inputs(replace(WIDE, lengths=(65, 0, 200, 1)))
    want = chunk(x, form)
    for processors in (8, 24, 10**6):
        assert_same(chunk(x, form, processors=processors), want)


@pytest.mark.parametrize(
    ("form", "plan"),
    [("warpgroups", {"BV": 32, "cluster": 2}), ("warpgroups", {"cluster": 4}), ("warps", {"arch": 100})],
    ids=str,
)
def test_tilings(form: str, plan: dict[str, int]) -> None:
    x = make_inputs(replace(WIDE, H=2, T=200))
    assert_same(chunk(x, form, **plan), chunk(x, form))


@in_every_form
def test_batched_packed_and_alone(form: str) -> None:
    """A sequence gives the same alone, in a batch and packed."""
    x = make_inputs(replace(WIDE, B=3))
    together = chunk(x, form)
    flat = {n: getattr(x, n).flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta")}
    packed = x._replace(**flat, cu_seqlens=x.q.shape[1] * torch.arange(4))
    alone = [chunk(s, form) for s in sequences(packed)]
    assert_same(KDAOutput(*(torch.cat(t) for t in zip(*alone, strict=True))), together)
    got = chunk(packed, form)
    assert_same(KDAOutput(*(t.view_as(want) for t, want in zip(got, together, strict=True))), together)


@pytest.mark.parametrize("recompute_above", [1.0, 0.0])
@pytest.mark.parametrize("T", [128, 70])
def test_one_packed_sequence_is_not_packed(T: int, recompute_above: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, what is saved, and gradients are those of a call without offsets, by kernels for one length."""
    x = make_inputs(Case(lengths=(T,), H=1, state=True))._replace(recompute_above=recompute_above)
    backend, d, signatures = EMULATED["sm90@emulator"], output_gradients(x), []
    planned = forms.planned
    monkeypatch.setattr(forms, "planned", lambda machine, s: signatures.append(s) or planned(machine, s))

    def call(x: Inputs) -> list[Tensor | None]:
        alone, _ = backend.forward(x, False)
        out, saved = backend.forward(x, True)
        assert [t.shape for t in saved] == [t.shape for t in backend.saved_like(x)]
        gradients = backend.backward(x, saved, d["o"], d["final_state"], d["checkpoints"])
        return [*outputs(alone).values(), *outputs(out).values(), *saved, *gradients]

    got, want = call(x), call(x._replace(cu_seqlens=None))
    assert signatures
    assert not any(s.packed for s in signatures)
    same = [a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(got, want, strict=True)]
    assert all(same), same


@in_every_form
def test_ragged_and_alone(form: str) -> None:
    x = make_inputs(replace(SOFTPLUS, lengths=(3, 130, 0, 64, 1)))
    got = chunk(x, form)
    alone = [chunk(s, form) for s in sequences(x) if s.q.shape[1]]
    assert torch.equal(got.o, torch.cat([a.o for a in alone], 1))
    assert torch.equal(got.final_state[[0, 1, 3, 4]], torch.cat([a.final_state for a in alone]))
    assert torch.equal(got.final_state[2], x.initial_state[2])
    assert torch.equal(got.checkpoints[:, :3], torch.cat([a.checkpoints for a in alone], 1))
    assert not got.checkpoints[:, 3:].any()


@in_every_form
def test_unused_checkpoints_are_zeros(form: str) -> None:
    """Sequences of 64 n + 63 tokens leave the most rows unused."""
    lengths = (127, 63, 63, 191, 63)
    got = chunk(make_inputs(replace(WIDE, lengths=lengths)), form).checkpoints
    assert got is not None
    used = sum(length // 64 for length in lengths)
    assert got.shape[1] == used + len(lengths) - 1
    assert got[:, :used].isfinite().all()
    assert not got[:, used:].any()


# ---------------------------------------------------------------- hard inputs


@in_every_form
@pytest.mark.parametrize("l2norm", [True, False])
def test_tokens_of_zeros(l2norm: bool, form: str) -> None:
    """Queries, keys and values of padding, some, and of a whole chunk."""
    x = make_inputs(replace(WIDE, l2norm=l2norm, T=200))
    x.q[:, ::3], x.k[:, ::5], x.v[:, ::7], x.initial_state[..., ::2] = 0.0, 0.0, 0.0, 0.0
    x.q[:, 64:128], x.k[:, 64:128] = 0.0, 0.0
    check_in_budget(x, lambda x: chunk(x, form))


def softplus_resets(T: int, D: int, H: int) -> dict:
    """Logits whose softplus gates are the log-decays of `resets`: -200 and -1e4 among ordinary ones."""
    x = resets(T, D, H)
    return x | {"g": -x["g"] + torch.log(-x["g"].expm1()), "gate_activation": "softplus"}


def faint_softplus(T: int, D: int, H: int) -> dict:
    """Gates from the far end of softplus, where 1 + e^x has one digit of e^x; hundreds of them erase the state."""
    x = resets(T, D, H)
    A_log = torch.full_like(x["beta"][0, 0], 9.5)
    return x | {"g": torch.full_like(x["g"], -15.0), "A_log": A_log, "gate_activation": "softplus"}


@in_every_form
@pytest.mark.parametrize("kind", [softplus_resets, faint_softplus], ids=lambda kind: kind.__name__)
def test_hard_inputs(kind: Callable[[int, int, int], dict], form: str) -> None:
    truth, yardstick = expected(kind, 400, 64, 2, FP16, False, True, True, "cpu")
    got = outputs(chunk(hard_inputs(kind, 400, 64, 2, FP16), form))
    assert all(t.isfinite().all() for t in got.values())
    check(got, truth, {n: min(budget(e, FP16), HALF_WRONG) for n, e in yardstick.items()})
