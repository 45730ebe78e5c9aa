"""The adapter of flash-linear-attention: what it refuses and why, and the table of chunks that packed sequences need.

Its kernels run on a GPU only; there the matrix of tests applies to them (make test-gpu).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kda_layers import explain, kda_step
from kda_layers.kernels.kda.backends import fla
from kda_layers.kernels.kda.contract import CHUNK, KDA, Problem, default_problem
from kda_layers.kernels.kda.fla import package
from kda_layers.kernels.kda.fla.package import chunk_table
from kda_layers.kernels.kda.slots import clear_padding, with_initial, with_padding
from tests.kernels.cases import BF16, FP32, FP64, Case, make_inputs, options, step_inputs

GPU = dataclasses.replace(default_problem("cpu"), device="cuda", arch=90)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "problems", list)


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"device": "cpu", "arch": 0}, "device is cpu, needs cuda"),
        ({"arch": 75}, "arch is sm_75, needs sm_80 or newer"),
        ({"arch": 120}, None),
        ({"dtype": FP64}, "dtype is float64, needs bfloat16, float16 or float32"),
        ({"dtype": FP32}, "dtype is float32, which it multiplies in tf32, needs bfloat16 or float16"),
        ({"dtype": FP32, "decode": True}, None),
        ({"K": 8}, "K is 8, needs 9 to 256"),
        ({"K": 257}, "K is 257, needs 9 to 256"),
        ({"K": 8, "decode": True}, None),
        ({"K": 257, "decode": True}, "K is 257, needs at most 256"),
        ({"V": 1000, "group": 7, "packed": True, "has_state": True}, None),
        ({"gate_activation": "softplus"}, None),
        ({"checkpoints": True}, "checkpoints with gradients, needs checkpoint_every=0 or torch.no_grad()"),
        ({"checkpoints": True, "needs_grad": False}, None),
    ],
    ids=str,
)  # fmt: skip
def test_reasons(change: dict[str, Any], reason: str | None) -> None:
    assert fla.BACKEND.unsupported(dataclasses.replace(GPU, **change)) == ([] if reason is None else [reason])


@pytest.mark.usefixtures("importable")
def test_every_reason_is_given() -> None:
    problem = dataclasses.replace(GPU, device="cpu", arch=0, dtype=FP32, K=300, checkpoints=True)
    assert len(fla.BACKEND.unsupported(problem)) == 4


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "fla-core is not installed, needs pip install flash-linear-attention==0.6.0"),
        ("0.5.2", "fla-core is 0.5.2, needs 0.6"),
        ("0.60.0", "fla-core is 0.60.0, needs 0.6"),
        ("0.6.0", "fla-core 0.6.0 cannot be imported (AttributeError: this Triton has no such thing)"),
    ],
)
def test_what_is_installed(version: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is missing, of another version or broken is a reason, not a crash."""

    def installed(name: str) -> str:
        assert name == "fla-core"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    def broken() -> None:
        raise AttributeError("this Triton has no such thing")

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(package, "operator_stages", broken)
    package.problems.cache_clear()
    try:
        assert fla.BACKEND.unsupported(GPU) == [reason]
        assert f"fla      cannot: {reason}" in explain(GPU)
        with pytest.raises(ValueError, match="backend 'fla' cannot serve"):
            KDA.select(GPU, "fla")
    finally:
        package.problems.cache_clear()


@pytest.mark.parametrize("enabled", [True, False])
def test_kernels_of_another_package_are_a_reason(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """fla-core's own registry, in which TileLang's backend stands next to one that does not matter here."""

    def registered(kind: str, available: bool) -> SimpleNamespace:
        return SimpleNamespace(backend_type=kind, is_available=lambda: available, is_enabled=lambda: enabled)

    kda = SimpleNamespace(_backends={"a": registered("triton_ascend", False), "b": registered("tilelang", True)})
    common = SimpleNamespace(_backends={"c": registered("intracard_cp", True)})
    fake = SimpleNamespace(_operation_registries={"kda": kda, "common": common})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.0")
    monkeypatch.setattr(package, "operator_stages", lambda: None)
    monkeypatch.setattr(package, "layer_functions", lambda: None)
    monkeypatch.setitem(sys.modules, "fla.backends", fake)
    package.problems.cache_clear()
    try:
        assert [r.split(",")[0] for r in package.problems()] == (["tilelang is installed"] if enabled else [])
    finally:
        package.problems.cache_clear()


@pytest.mark.usefixtures("importable")
def test_it_is_chosen_over_eager_on_a_gpu() -> None:
    problem: Problem = dataclasses.replace(GPU, V=999)  # one that no other test asks for: choices are remembered
    assert KDA.select(problem).name == "fla"


def test_too_many_rows_are_named() -> None:
    x = make_inputs(Case(T=1, B=2, H=1, K=16, V=1, dtype=BF16))
    many = x._replace(v=x.v[:1].expand(2**15, -1, -1, -1).expand(-1, -1, 2, -1))
    with pytest.raises(ValueError, match=r"B \* HV must be at most 65535 for backend 'fla', got 65536"):
        fla.BACKEND.forward(many, save=False)


@pytest.mark.parametrize(
    "lengths", [(5,), (64,), (65,), (0, 1, 64, 0, 65, 1, 0), (0, 0, 5), (1,) * 100, (3000, 0, 17)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_chunk_table(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Every chunk of every sequence in order; surplus rows lie behind the end of the sequence that they name."""
    x = make_inputs(Case(lengths=lengths, H=1, K=1, V=1, offsets_dtype=dtype))
    table, first = chunk_table(x.cu_seqlens, x.q.shape[1])
    assert table.dtype == first.dtype == dtype
    chunks = [-(-n // CHUNK) for n in lengths]
    want = [[n, c] for n, count in enumerate(chunks) for c in range(count)]
    assert table[: len(want)].tolist() == want
    assert first.tolist() == [sum(chunks[:n]) for n in range(len(lengths) + 1)]
    for n, c in table[len(want) :].tolist():
        assert 0 <= n < len(lengths)
        assert c >= chunks[n]
    saved = fla.BACKEND.saved_like(x)
    assert [t.shape for t in saved[-2:]] == [table.shape, first.shape]


@pytest.mark.parametrize("lengths", [None, (70, 0, 65, 3), (64, 128), (1, 1)], ids=str)
@pytest.mark.parametrize("T", [130, 128])
def test_states_at_boundaries_from_states_before_chunks(T: int, lengths: tuple[int, ...] | None) -> None:
    x = make_inputs(Case(T=T, B=1 if lengths else 2, lengths=lengths, H=1, K=1, V=1))
    table = chunk_table(x.cu_seqlens, x.q.shape[1])
    N = 2 if lengths is None else len(lengths)
    each = [T] * 2 if lengths is None else list(lengths)
    # The state of sequence n after t tokens is the number 1000 n + t.
    final = torch.tensor([1000.0 * n + t for n, t in enumerate(each)]).view(N, 1, 1, 1)
    before = [[1000.0 * n + CHUNK * c for c in range(-(-t // CHUNK))] for n, t in enumerate(each)]
    want = [[1000.0 * n + CHUNK * (c + 1) for c in range(t // CHUNK)] for n, t in enumerate(each)]
    if lengths is None:
        h = torch.tensor(before).view(2, -1, 1, 1, 1)
    else:
        flat_before, flat_want = ([state for row in rows for state in row] for rows in (before, want))
        h = torch.full((1, len(table[0]), 1, 1, 1), torch.nan)
        h.view(-1)[: len(flat_before)] = torch.tensor(flat_before)
        want = [flat_want + [0.0] * (sum(each) // CHUNK - len(flat_want))]
    got = fla._checkpoints(x, h, final, table)
    assert got.flatten(1).tolist() == want
    assert got.is_contiguous()


# ---------------------------------------------------------------- padding in a pool of states


@pytest.mark.parametrize("slots_in_pool", [1, 5])
def test_padding_is_sent_to_a_scratch_slot(slots_in_pool: int) -> None:
    """Its kernel takes every slot as it is: what has none must point to memory of its own."""
    pool = torch.zeros(slots_in_pool, 2, 4, 4)
    x = make_inputs(Case(B=4, T=2, H=2, K=4, V=4, dtype=FP32))
    indices = torch.tensor([[0, -1], [-1, 0], [-1, -1], [slots_in_pool, 0]], dtype=torch.int32)
    safe, padding, scratch = with_padding(step_inputs(x, state=pool, state_indices=indices))
    (scratch_slot,) = set(safe.state_indices.flatten().tolist()) - {0}
    assert safe.state_indices.tolist() == [[0, scratch_slot]] + [[scratch_slot] * 2] * 3
    assert padding.tolist() == [False, True, True, True]
    start = pool.data_ptr() + scratch_slot * safe.state.stride(0) * 4
    assert scratch.data_ptr() <= start
    assert start + pool[0].nbytes <= scratch.data_ptr() + scratch.nbytes


def test_padding_by_the_accepted_slot() -> None:
    x = make_inputs(Case(B=3, T=2, H=2, K=4, V=4, dtype=FP32))
    indices, accepted = torch.tensor([[0, -1], [-1, 1], [2, 3]]), torch.tensor([2, 2, 3])
    inputs = step_inputs(x, state=torch.zeros(4, 2, 4, 4), state_indices=indices, num_accepted=accepted)
    safe, padding, _ = with_padding(inputs)
    assert padding.tolist() == [True, False, True]
    assert safe.state_indices[1, 1] == 1
    assert safe.num_accepted.tolist() == [2, 2, 2]


@pytest.mark.parametrize("columns", [None, 2])
def test_initial_states_are_copied_to_the_slots_that_are_read(columns: int | None) -> None:
    """Its kernel reads and writes one pool; a sequence that lacks either slot is padding."""
    x = make_inputs(Case(B=4, T=2, H=2, K=4, V=4, dtype=FP32))
    slots = torch.tensor([3, 1, 5, -1], dtype=torch.int32)
    if columns is not None:
        slots = torch.stack((slots, torch.tensor([2, 0, 4, 7], dtype=torch.int32)), 1)
    initial, pool = torch.randn(3, 2, 4, 4), torch.zeros(8, 2, 4, 4)
    given = dict(state_indices=slots, initial_state=initial, initial_indices=torch.tensor([2, -1, 2, 0]))
    want = pool.clone()
    o = kda_step(*x[:5], want, **options(x), **given, backend="eager")
    inputs = with_initial(step_inputs(x, state=pool, **given))
    assert inputs.initial_state is None
    assert inputs.initial_indices is None
    assert torch.equal(kda_step(*x[:5], pool, **options(x), state_indices=inputs.state_indices, backend="eager"), o)
    assert torch.equal(pool, want)
    assert o[[0, 2]].all()
    assert not o[[1, 3]].any()


def test_outputs_of_padding_are_cleared() -> None:
    padding, offsets = torch.tensor([True, False, True]), torch.tensor([0, 1, 4, 6])
    o = torch.full((1, 6, 1, 2), torch.nan)
    clear_padding(o, padding, offsets)
    assert o[0, :, 0, 0].isnan().tolist() == [False, True, True, True, False, False]
    o = torch.full((3, 2, 1, 2), torch.nan)
    clear_padding(o, padding, None)
    assert o[:, 0, 0, 0].isnan().tolist() == [False, True, False]
