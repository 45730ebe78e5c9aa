"""The saving forward by blocks of two roles in the emulator: the bits of forward.cu, of all that it saves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers import KDAOutput
from kda_layers.kernels.kda.contract import HEAD_GATES, Inputs
from kda_layers.kernels.kda.cuda import forms
from kda_layers.kernels.kda.cuda.forward import costs, two_roles
from kda_layers.kernels.kda.cuda.forward.costs import Split
from kda_layers.kernels.kda.cuda.spec import Saved, Signature
from kda_layers.kernels.kda.reference import activate
from tests import cuda_emulator
from tests.kernels import emulated
from tests.kernels.cases import BF16, FP16, Case, ids, make_inputs, output_gradients, outputs
from tests.kernels.emulated_backends import EMULATED

pytestmark = pytest.mark.emulated

# Groups that scan, and blocks that prepare; three groups share two of four tiles. Saved chunks need no ring.
SPLITS = [Split(1, 2, 0), Split(3, 2, 0), Split(4, 6, 0)]
NARROW = Case(K=64, V=64, dtype=FP16, gate="softplus", g_wide=True, T=200, state=True, checkpoints=False)
PACKED = Case(lengths=(130, 0, 64, 1, 200, 5, 63), state=True)
CASES = [
    Case(B=2, T=330, state=True, checkpoints=False),
    Case(B=2, T=300, H=1, group=2, slow=True, final=False),  # runs of 7, 7 and 6 chunks
    Case(T=40, state=True, dt_bias=False, A_log=False, l2norm=False, scale=0.3, checkpoints=False),
    Case(T=192, dtype=FP16, gate="log_decay", beta="2sigmoid", g_wide=True),
    NARROW,
    PACKED,
    Case(lengths=(64,) * 5, H=2, group=1, slow=True, final=False, checkpoints=False),
    Case(lengths=(300, 65, 66), K=64, V=64, dtype=FP16, gate="softplus", g_wide=True, checkpoints=False),
    Case(lengths=(0, 0), state=True, checkpoints=False),
    Case(T=130, state=True, gate="softplus", head_gates=True, checkpoints=False),
    Case(lengths=(70, 1, 64), H=1, gate="log_decay", g_wide=True, head_gates=True),
]


def inputs(case: Case) -> Inputs:
    """The inputs of a case as kernels get them."""
    x = make_inputs(case)
    return activate(x, ("gate", "beta", "qk_l2norm", HEAD_GATES)) if case.head_gates else x


def in_two_roles(x: Inputs, i: int, seed: int = 0, resident: int | None = None) -> tuple[KDAOutput, Saved]:
    """Results with SPLITS[i], and at most as many groups as there are heads to scan."""
    heads = x.v.shape[0] * x.v.shape[2] if x.cu_seqlens is None else costs.MOST_GROUPS_PACKED
    split = SPLITS[i]._replace(groups=min(SPLITS[i].groups, heads))
    return emulated.two_roles_saving(x, split, seed=seed, resident=resident)


def tensors(results: tuple[KDAOutput, Saved]) -> dict[str, Tensor]:
    """Every output and saved tensor, as bytes: what is not written is NaN in both forms."""
    every = {**outputs(results[0]), **results[1]._asdict()}
    return {n: t.contiguous().view(torch.uint8) for n, t in every.items() if t is not None}


def assert_same(got: tuple[KDAOutput, Saved], want: tuple[KDAOutput, Saved]) -> None:
    every, found = tensors(want), tensors(got)
    assert found.keys() == every.keys()
    assert [n for n, t in every.items() if not torch.equal(found[n], t)] == []


@pytest.mark.parametrize("case", **ids(CASES))
def test_bits_of_the_forward_kernel(case: Case) -> None:
    x = inputs(case)
    want = emulated.forward_saving(x)
    assert (want[1].T_fp16 is not None) == (case.final and case.dtype == BF16)
    for i in range(len(SPLITS)):
        assert_same(in_two_roles(x, i), want)


@pytest.mark.parametrize("case", **ids([CASES[1], NARROW, PACKED, CASES[6]]))
def test_order_of_concurrent_operations(case: Case) -> None:
    x = inputs(case)
    want = in_two_roles(x, 0)
    for seed in range(1, 6):
        assert_same(in_two_roles(x, seed % 3, seed), want)


@pytest.mark.parametrize("resident", [2, 4])
@pytest.mark.parametrize("case", **ids([CASES[1], NARROW, PACKED]))
def test_few_blocks_at_once(case: Case, resident: int) -> None:
    """Other kernels may hold most multiprocessors: a block waits only for those before it."""
    x = inputs(case)
    assert_same(in_two_roles(x, 1, resident=resident), in_two_roles(x, 1))


@pytest.mark.parametrize("more", [{"B": 2}, {"lengths": (130, 65)}, {"B": 2, "checkpoints": True}], ids=str)
def test_accesses_are_ordered(more: dict[str, Any]) -> None:
    """Also those of bulk stores, which read shared memory until they are waited for."""
    x = make_inputs(dataclasses.replace(NARROW, **more))
    with cuda_emulator.order_checked():
        in_two_roles(x, 1)


@pytest.mark.parametrize("recompute_above", [1.0, 0.0])
@pytest.mark.parametrize("case", **ids([Case(B=2, T=130, state=True), Case(lengths=(70, 0, 130), final=False)]))
def test_gradients_of_a_call(case: Case, recompute_above: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that takes this kernel, in its forward or in its backward, has the gradients of one that does not."""
    x = make_inputs(case)._replace(recompute_above=recompute_above)
    backend, d, launched = EMULATED["sm90@emulator"], output_gradients(x), []
    run = forms.run

    def call() -> list[Tensor | None]:
        out, saved = backend.forward(x, True)
        assert bool(saved) == bool(recompute_above)
        return [*outputs(out).values(), *backend.backward(x, saved, d["o"], d.get("final_state"), d.get("checkpoints"))]

    def recorded(x: Inputs, plan: Any, last: Any) -> Any:
        launched.append((plan.launches[0].cooperative, plan.saves))
        return run(x, plan, last)

    with emulated.without_two_roles():
        want = call()
    form = forms.TWO_ROLES._replace(serves=lambda *_: [], expected_us=lambda *_: 0.0)
    monkeypatch.setattr(forms, "FORMS", (form, forms.ONE_ROLE))
    monkeypatch.setattr(forms, "TWO_ROLES", form)
    monkeypatch.setattr(forms, "run", recorded)
    monkeypatch.setattr(two_roles, "split_of", lambda *_: Split(2, 4, 8))
    forms._planned.cache_clear()
    got = call()
    forms._planned.cache_clear()
    assert launched == ([(False, True)] if recompute_above else [(True, False), (False, True)])
    assert [i for i, t in enumerate(want) if t is not None and not torch.equal(got[i], t)] == []


def test_declined_where_it_is_to_be_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a GPU may be too small for the forward that the backward runs again: blocks of one role do it."""
    x, launch, entries = make_inputs(Case(T=130, state=True)), emulated.Kernel.launch, []

    def refuse(kernel: emulated.Kernel, *args: Any, cooperative: bool = False, **more: Any) -> None:
        if cooperative:
            raise RuntimeError("launching failed: CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE")
        entries.append(kernel)
        launch(kernel, *args, **more)

    monkeypatch.setattr(emulated.Kernel, "launch", refuse)
    monkeypatch.setattr(two_roles, "declined", None)
    monkeypatch.setattr(two_roles, "split_of", lambda *_: Split(2, 4, 8))
    monkeypatch.setattr(forms, "form_that_saves", lambda *_: forms.TWO_ROLES)
    with emulated.GuardedMemory(), pytest.warns(RuntimeWarning, match="specialised CTAs are off from now on"):
        got = forms.forward_whole_chunks(emulated.guarded_inputs(x), emulated.Emulator())
    assert len(entries) == 1
    assert all(torch.equal(a, b) for a, b in zip(got, emulated.forward_saving(x)[0], strict=True))


def test_counters_of_packed_sequences() -> None:
    """However lengths fall, no group has more chunks than counters: heads of a sequence are the groups' in turn."""
    for heads, groups in ((2, 1), (2, 3), (3, 2), (8, 8), (8, 28)):
        x = make_inputs(Case(lengths=(200, 0, 64, 1), H=heads, group=1, checkpoints=False))
        chunks, s = [4, 0, 1, 1], Signature.of(x, True)
        most = max(sum(chunks[t // heads] for t in range(g, 4 * heads, groups)) for g in range(groups))
        assert most <= two_roles.most_chunks(s, groups)
