"""Tensors that the forward kernel keeps for the backward, and those of the reverse scan, in the emulator.

Gradients of every case are compared with the recurrence by the tests of every backend; here are, for a few cases, the
tensors between the kernels. Forms are those of test_cuda_forward.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kda_layers.kernels.kda.contract import CHUNK, Inputs
from kda_layers.kernels.kda.cuda.backward.reverse_scan import Scanned
from kda_layers.kernels.kda.cuda.spec import Saved
from kda_layers.kernels.kda.reference import activate
from kda_layers.testing.hard_inputs import hard_inputs, repeated_token
from tests.kernels import emulated
from tests.kernels.cases import (
    BF16,
    Case,
    call,
    check,
    error,
    ids,
    limits_of,
    make_inputs,
    oracle,
    output_gradients,
    run,
    sequences,
    to_fp64,
)
from tests.kernels.emulated_backends import EMULATED, registered
from tests.kernels.test_cuda_forward import FORMS, PACKED, SOFTPLUS, WIDE, in_every_form, pytestmark, softplus_resets

__all__ = ["pytestmark"]

CASES = [
    replace(WIDE, T=130),
    replace(WIDE, B=2, T=65, state=False, final=False),
    replace(SOFTPLUS, group=2, lengths=PACKED, slow=True, offsets_dtype=torch.int64),
    replace(WIDE, lengths=(0, 0, 5), final=False, beta="given", beta_wide=True),
]


ROWS = ("prepared", "states")  # of `Saved`, by chunks


class Gradients(NamedTuple):
    """Gradients of what the forward returns, where it was asked for."""

    o: Tensor
    final: Tensor | None
    checkpoints: Tensor | None


def gradients_of(x: Inputs) -> Gradients:
    d, none = output_gradients(x), dict[str, Tensor]()
    final, checkpoints = (d if wanted else none for wanted in (x.final_state, x.checkpoint_every))
    return Gradients(d["o"], final.get("final_state"), checkpoints.get("checkpoints"))


def forward(x: Inputs, form: str, **launch: Any) -> Saved:
    return emulated.forward_saving(x, **FORMS[form][x.gate_activation] | launch)[1]


def reverse(x: Inputs, saved: Saved, d: Gradients, form: str, **launch: Any) -> Scanned:
    return emulated.reverse_scan(x, saved, d, **{"arch": FORMS[form][x.gate_activation]["arch"]} | launch)


def by_name(x: Inputs, saved: Saved, got: Scanned) -> dict[str, Tensor]:
    """The tensors that exist, without the rows that packed sequences leave over."""
    lengths = [x.q.shape[1]] * x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.diff().tolist()
    rows = sum(-(-n // CHUNK) for n in lengths)
    states = emulated.swizzled(saved.states[:rows])
    kept = {"states": states, "errors": saved.errors, "d_v": got.d_v, "d_states": got.d_states[:rows]}
    return kept if got.d_initial is None else kept | {"d_initial": got.d_initial}


def recurrence(x: Inputs, d: Gradients) -> dict[str, Tensor]:
    """The same tensors from the recurrence, token by token, and autograd."""
    wide = x.q.dtype if x.q.dtype == torch.float64 else torch.float32
    x = activate(x)
    x = x._replace(v=x.v.to(wide).requires_grad_())
    heads = torch.arange(x.v.shape[2]) // (x.v.shape[2] // x.q.shape[2])
    q, k = (t.to(wide)[:, :, heads] for t in (x.q, x.k))
    decay, beta = x.g.to(wide).exp(), x.beta.to(wide)
    if x.cu_seqlens is None:
        spans = [(b, 0, x.q.shape[1]) for b in range(x.q.shape[0])]
    else:
        offsets = x.cu_seqlens.tolist()
        spans = [(0, *ends) for ends in itertools.pairwise(offsets)]
    initial = x.initial_state if x.initial_state is not None else q.new_zeros(len(spans), *x.v.shape[2:], q.shape[3])
    initial = initial.to(wide).requires_grad_()
    starts, ends, errors, o, outputs = [], [], [], [], []
    for n, (b, first, last) in enumerate(spans):
        S, whole = initial[n], 0
        for t in range(first, last):
            if (t - first) % CHUNK == 0:
                starts.append(S)
            S = S * decay[b, t, :, None]
            error = beta[b, t, :, None] * (x.v[b, t] - (S * k[b, t, :, None]).sum(-1))
            S = S + error[..., None] * k[b, t, :, None]
            errors.append(error)
            o.append(x.scale * (S * q[b, t, :, None]).sum(-1))
            if (t - first + 1) % CHUNK == 0 or t == last - 1:
                S = S.clone()  # as later chunks see it, not this token's output
                ends.append(S)
            if (t - first + 1) % CHUNK == 0 and d.checkpoints is not None:
                row = whole if x.cu_seqlens is None else sum((z - a) // CHUNK for _, a, z in spans[:n]) + whole
                outputs.append((S, d.checkpoints[b, row]))
                whole += 1
        if d.final is not None:
            outputs.append((S, d.final[n]))
    outputs.append((torch.stack(o), d.o.flatten(0, 1)))
    got = torch.autograd.grad(
        [y for y, _ in outputs], [x.v, initial, *ends], [g.to(wide) for _, g in outputs], materialize_grads=True
    )
    result = {"states": torch.stack(starts), "errors": torch.stack(errors).view_as(x.v), "d_v": got[0]}
    result["d_states"] = torch.stack(got[2:])
    if x.initial_state is not None:
        result["d_initial"] = got[1]
    return {n: t.detach() for n, t in result.items()}


def check_in_budget(x: Inputs, form: str) -> None:
    d = gradients_of(x)
    saved = forward(x, form)
    got = by_name(x, saved, reverse(x, saved, d, form))
    truth, yardstick = recurrence(to_fp64(x), d), recurrence(x, d)
    check(got, truth, limits_of(yardstick, truth, x.q.dtype))


def assert_same(got: Any, want: Any) -> None:
    both = {n: (a, b) for n, a, b in zip(want._fields, got, want, strict=True) if n != "read"}
    same = {n: a is b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for n, (a, b) in both.items()}
    assert all(same.values()), [n for n, s in same.items() if not s]


@in_every_form
@pytest.mark.parametrize("case", **ids(CASES))
def test_against_fp64(case: Case, form: str) -> None:
    check_in_budget(make_inputs(case), form)


@in_every_form
def test_resets(form: str) -> None:
    """Softplus gates that erase channels, or all of a state, between ordinary ones."""
    check_in_budget(hard_inputs(softplus_resets, 200, 64, 2, torch.float16)._replace(checkpoint_every=64), form)


# ---------------------------------------------------------------- fine gradients


@in_every_form
def test_a_repeated_token(form: str) -> None:
    """With a gradient of the final state; in bf16 alone, rounding T' and dV' costs beta's gradient more than 3 %."""
    x = hard_inputs(repeated_token, 512, 64, 2, BF16)._replace(checkpoint_every=0)
    d, truth = gradients_of(x), run(oracle, to_fp64(x), output_gradients(x))
    errors = []
    for fine in (False, True):
        each = x._replace(fine_gradients=fine)
        saved = forward(each, form)
        scanned = reverse(each, saved, d, form)
        got = emulated.gradients(each, saved, scanned, d.o, arch=FORMS[form]["lower_bound"]["arch"])
        errors.append({n: error(getattr(got, n), truth[f"d_{n}"]) for n in ("q", "k", "v", "g", "beta")})
    plain, fine = errors
    assert fine["beta"] < 0.03 < plain["beta"], errors  # 0.014 and 0.040
    assert fine["v"] < plain["v"] / 2, errors  # 0.010 and 0.024
    assert all(fine[n] < 1.02 * e for n, e in plain.items()), errors  # of q, k and g they are equal within 1 %


def test_a_call_with_a_final_state_is_fine() -> None:
    x = hard_inputs(repeated_token, 256, 64, 2, BF16)._replace(checkpoint_every=0)
    d_out, backend = output_gradients(x), "sm90@emulator"
    with registered(EMULATED[backend]):
        got = run(lambda x: call(x, backend), x, d_out)
    assert error(got["d_beta"], run(oracle, to_fp64(x), d_out)["d_beta"]) < 0.03  # 0.017, 0.086 if it is not


FINE = replace(WIDE, K=64, V=64, T=130, checkpoints=False, slow=True)


@in_every_form
def test_columns_of_any_scale(form: str) -> None:
    """Columns of V are independent: times a power of two, their gradients are, too, bit by bit."""
    x = make_inputs(FINE)
    d, saved = gradients_of(x), forward(x, form)
    assert saved.T_fp16 is not None
    powers = torch.exp2(torch.linspace(-66, 66, 64).round())  # 1e-20 to 1e20
    powers[5] = 0
    scaled = Gradients((d.o * powers).to(d.o.dtype), d.final * powers[:, None], None)
    want, got = reverse(x, saved, d, form), reverse(x, saved, scaled, form)
    assert torch.equal(got.d_v.float(), want.d_v.float() * powers)
    assert torch.equal(got.d_states.float(), want.d_states.float() * powers[:, None])
    assert torch.equal(got.d_initial, want.d_initial * powers[:, None])


@in_every_form
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_not_finite_columns(bad: float, form: str) -> None:
    """A gradient that is not finite shows in its column, and nowhere else."""
    x = make_inputs(FINE)
    d, saved = gradients_of(x), forward(x, form)
    sick = d._replace(final=d.final.clone())
    sick.final[:, :, 7] = bad
    want, got = reverse(x, saved, d, form), reverse(x, saved, sick, form)
    others = [i for i in range(64) if i != 7]
    assert not got.d_v[..., 7].isfinite().any()
    assert not got.d_initial[:, :, 7].isfinite().any()
    assert torch.equal(got.d_v[..., others], want.d_v[..., others])
    assert torch.equal(got.d_initial[:, :, others], want.d_initial[:, :, others])


@in_every_form
def test_near_zero_betas(form: str) -> None:
    """fp16 holds T' of betas about 1e-7."""
    x = make_inputs(FINE)
    x = x._replace(beta=(0.1 * x.beta - 16).to(x.beta.dtype))
    check_in_budget(x, form)


# ---------------------------------------------------------------- the same bits


@in_every_form
def test_saved_tensors_are_the_same(form: str) -> None:
    """Saved tensors and outputs do not depend on the order of concurrent operations, the blocks or the slices."""
    x = make_inputs(replace(WIDE, lengths=(65, 0, 1, 200)))
    plain = emulated.forward(x, **FORMS[form]["lower_bound"])
    out, want = emulated.forward_saving(x, **FORMS[form]["lower_bound"])
    assert_same(out, plain)
    plans: list[dict[str, int]] = [{"seed": 1}, {"seed": 2, "processors": 40}]
    if form == "warpgroups":
        plans.append({"BV": 32, "cluster": 2})
    for plan in plans:
        assert_same(forward(x, form, **plan), want)


@in_every_form
def test_the_scan_is_the_same(form: str) -> None:
    """The scan does not depend on the order of concurrent operations or the number of blocks, and counts its chunks."""
    x = make_inputs(replace(WIDE, H=2, lengths=(65, 0, 1, 300)))
    d, saved = gradients_of(x), forward(x, form)
    want = reverse(x, saved, d, form)
    assert want.taken.item() == 0
    assert want.scanned is not None
    assert want.scanned.view(4, 2, -1).tolist() == [[[n] * (len(want.scanned) // 8)] * 2 for n in (2, 0, 1, 5)]
    for launch in ({"seed": 1}, {"seed": 2, "processors": 2}, {"seed": 3, "processors": 6}, {"processors": 1}):
        assert_same(reverse(x, saved, d, form, **launch), want)


def test_offsets_that_decrease_end() -> None:
    """Nothing checks offsets on a GPU: gradients are wrong, but no block waits for a chunk that is never scanned."""
    x = make_inputs(replace(SOFTPLUS, H=1, group=1, lengths=(448,), state=False, final=False, checkpoints=False))
    d, form = gradients_of(x), "warpgroups"
    saved = forward(x, form)
    launch = {"arch": FORMS[form][x.gate_activation]["arch"]}
    wrong = x._replace(cu_seqlens=torch.tensor([0, 320, 64, 128, 448], dtype=torch.int32))
    rows = wrong.cu_seqlens.shape[0] - 1 + 448 // CHUNK
    more = saved._replace(**{n: t.new_zeros(rows, *t.shape[1:]) for n, t in saved._asdict().items() if n in ROWS})
    emulated.gradients(wrong, more, reverse(wrong, more, d, form), d.o, **launch)


@in_every_form
def test_packed_and_alone(form: str) -> None:
    """A sequence gives the same bits alone and packed."""
    x = make_inputs(replace(SOFTPLUS, lengths=(3, 130, 0, 64, 1)))
    d = gradients_of(x)
    saved = forward(x, form)
    got = by_name(x, saved, reverse(x, saved, d, form))
    first, row = 0, 0
    alone: list[dict[str, Tensor]] = []
    for n, s in enumerate(sequences(x)):
        T = s.q.shape[1]
        if not T:
            assert torch.equal(got["d_initial"][n], d.final[n])
            continue
        mine = Gradients(d.o[:, first : first + T], d.final[n : n + 1], d.checkpoints[:, row : row + T // CHUNK])
        kept = forward(s, form)
        alone.append(by_name(s, kept, reverse(s, kept, mine, form)))
        first, row = first + T, row + T // CHUNK
    for name, dim in {"states": 0, "errors": 1, "d_v": 1, "d_states": 0}.items():
        assert torch.equal(got[name], torch.cat([a[name] for a in alone], dim))
    assert torch.equal(got["d_initial"][[0, 1, 3, 4]], torch.cat([a["d_initial"] for a in alone]))


@in_every_form
def test_nan_stays_in_its_sequence(form: str) -> None:
    x = make_inputs(replace(SOFTPLUS, lengths=(70, 3, 65)))
    d, saved = gradients_of(x), forward(x, form)
    sick = d._replace(o=d.o.clone())
    sick.o[:, 70:73] = torch.nan
    want, got = reverse(x, saved, d, form), reverse(x, saved, sick, form)
    assert got.d_v[:, 70:73].isnan().all()
    others = [*range(70), *range(73, 138)]
    assert torch.equal(got.d_v[:, others], want.d_v[:, others])
    assert torch.equal(got.d_initial[[0, 2]], want.d_initial[[0, 2]])
    assert torch.equal(got.d_states[[0, 1, 3, 4]], want.d_states[[0, 1, 3, 4]])
