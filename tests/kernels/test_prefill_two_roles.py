"""`kda_prefill` by blocks of two roles in the emulator: the bits of one role, in any slots."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from kda_layers.kernels.kda.contract import PrefillInputs
from kda_layers.kernels.kda.cuda import forms, prefill
from kda_layers.kernels.kda.cuda.forward import last_tokens, two_roles
from kda_layers.kernels.kda.cuda.forward.costs import Split
from tests import cuda_emulator
from tests.kernels import emulated
from tests.kernels.cases import FP16, Case, ids, make_inputs

# Groups that scan, blocks that prepare, ring slots of a group; three groups share tiles of sequences of one length.
SPLITS = [Split(1, 2, 4), Split(3, 2, 5), Split(4, 6, 12)]
LENGTHS = (130, 0, 64, 3, 200, 5, 63)
CASES = [
    Case(B=2, T=330, state=True, checkpoints=False),
    Case(B=3, T=128, H=1, group=2, slow=True, state=True, checkpoints=False),
    Case(T=200, dtype=FP16, gate="softplus", g_wide=True, state=True, checkpoints=False),
    Case(B=2, T=130, group=2, head_gates=True, gate="softplus", state=True, checkpoints=False),
    Case(lengths=LENGTHS, state=True, checkpoints=False),
    Case(lengths=LENGTHS, H=1, group=2, slow=True, beta_wide=True, state=True, checkpoints=False),
    Case(lengths=(64, 131, 192), dtype=FP16, gate="log_decay", g_wide=True, state=True, checkpoints=False),
    Case(lengths=(64, 131, 192), H=1, group=2, head_gates=True, state=True, checkpoints=False),
    Case(lengths=(197,), H=2, state=True, checkpoints=False),  # one packed sequence is not packed
]


def in_wider_rows(t: Tensor) -> Tensor:
    """A view of rows of tokens that are longer than all heads."""
    wide = torch.full((*t.shape[:2], t.shape[2] + 1, *t.shape[3:]), torch.nan, dtype=t.dtype)
    wide[:, :, : t.shape[2]] = t
    return wide[:, :, : t.shape[2]]


def inputs_of(case: Case, stops: bool = True, index: torch.dtype = torch.int32, strided: bool = False) -> PrefillInputs:
    """Every third sequence has no slot; boundary states are asked for after 0, 64, ... tokens."""
    x = make_inputs(case)
    assert x.initial_state is not None
    N = x.initial_state.shape[0]
    slots = torch.tensor([-1 if n % 3 == 1 else N - n for n in range(N)], dtype=index)
    pool = torch.full((N + 1, *x.initial_state.shape[1:]), torch.nan)
    pool[slots[slots >= 0]] = x.initial_state[slots >= 0]
    lengths = case.lengths or (case.T,) * N
    at = torch.tensor([min(64 * n, length // 64 * 64) for n, length in enumerate(lengths)], dtype=index)
    fields = {n: getattr(x, n, None) for n in PrefillInputs._fields}
    if x.g.ndim == 3:  # of heads, as the operator hands them on
        fields["g"] = x.g[..., None]
    if strided:
        fields |= {n: in_wider_rows(fields[n]) for n in ("q", "k", "v", "beta")}
    return PrefillInputs(**fields)._replace(
        o=torch.full_like(x.v, torch.nan), state=pool, state_indices=slots, checkpoint_at=at if stops else None,
        checkpoints=torch.zeros_like(x.initial_state) if stops else None,
    )  # fmt: skip


def run(x: PrefillInputs, split: Split | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Outputs, the pool and boundary states; by two roles if there is a `split`."""
    written = {"o": x.o, "state": x.state, "checkpoints": x.checkpoints}
    x = x._replace(**{n: None if t is None else t.clone() for n, t in written.items()})  # type: ignore[arg-type]
    form = forms.ONE_ROLE if split is None else forms.TWO_ROLES
    with (
        mock.patch.object(two_roles, "split_of", return_value=split),
        mock.patch.object(forms, "FORMS", (form._replace(serves=lambda *_: []),)),
        mock.patch.object(forms, "attempt", wraps=forms.attempt) as attempted,
        emulated.GuardedMemory(),
    ):
        prefill.prefill(x, emulated.Emulator(processors=16, seed=seed))
    assert attempted.called
    found = {"o": x.o, "state": x.state, "checkpoints": x.checkpoints}
    return {n: t.nan_to_num(nan=7.0) for n, t in found.items() if t is not None}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert [n for n in want if not torch.equal(got[n], want[n])] == []


def splits_of(x: PrefillInputs) -> list[Split]:
    """SPLITS, with no more groups than there are heads to scan."""
    packed = x.cu_seqlens is not None and x.cu_seqlens.shape[0] > 2
    most = 32 if packed else x.v.shape[0] * x.v.shape[2]
    return [split._replace(groups=min(split.groups, most)) for split in SPLITS]


@pytest.mark.emulated
@pytest.mark.parametrize("case", **ids(CASES))
def test_bits_of_one_role(case: Case) -> None:
    x = inputs_of(case)
    want = run(x)
    for split in splits_of(x):
        assert_same(run(x, split), want)


@pytest.mark.emulated
@pytest.mark.parametrize("case", **ids([CASES[1], CASES[5], CASES[7]]))
def test_rows_with_strides(case: Case) -> None:
    want = run(inputs_of(case))
    x = inputs_of(case, strided=True, index=torch.int64)
    assert_same(run(x, splits_of(x)[1]), want)


@pytest.mark.emulated
@pytest.mark.parametrize("case", **ids([CASES[0], CASES[4]]))
def test_without_boundary_states_or_slots(case: Case) -> None:
    x = inputs_of(case, stops=False)
    N = x.v.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    assert x.state is not None
    x = x._replace(state_indices=None, state=x.state[:N].nan_to_num_(nan=0.25))
    assert_same(run(x, splits_of(x)[1]), run(x))


@pytest.mark.emulated
def test_listed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many sequences: those are listed that have chunks, or whose state before all tokens is asked for."""
    monkeypatch.setattr(last_tokens, "MANY_IN_PLACE", 3)
    x = inputs_of(CASES[4])
    want = run(x)
    for split in SPLITS:
        assert_same(run(x, split), want)


@pytest.mark.emulated
@pytest.mark.parametrize("case", **ids([CASES[0], CASES[4]]))
def test_order_of_concurrent_operations(case: Case) -> None:
    """Accesses are ordered, too: states that are read and written in place among them."""
    x = inputs_of(case)
    want = run(x)
    for seed in (1, 2):
        assert_same(run(x, SPLITS[seed], seed), want)
    with cuda_emulator.order_checked():
        assert_same(run(x, SPLITS[1]), want)


@pytest.mark.emulated
@pytest.mark.parametrize("padding", ["some", "all"])
@pytest.mark.parametrize("case", **ids([CASES[1], CASES[4]]))
def test_padding_may_hold_anything(case: Case, padding: str) -> None:
    """Sequences without a slot, of NaN, have outputs of zeros and change nothing."""
    x = inputs_of(case)
    assert x.state_indices is not None
    if padding == "all":
        x.state_indices.fill_(-1)
    want = run(x)
    for n in torch.nonzero(x.state_indices < 0)[:, 0].tolist():
        rows, tokens = slice(n, n + 1), slice(None)
        if x.cu_seqlens is not None:
            rows, tokens = slice(None), slice(*x.cu_seqlens[n : n + 2].tolist())
        for t in (x.q, x.k, x.v, x.g, x.beta):
            t[rows, tokens] = torch.nan
        assert not want["o"][rows, tokens].any()
    assert_same(run(x, splits_of(x)[1]), want)
