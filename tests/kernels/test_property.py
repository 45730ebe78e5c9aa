"""Random shapes, lengths and gates from 1e-6 to 1e4 nats a token: the eager backend in fp64 is the recurrence.

Every backend stays within its budget at random shapes in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kda_layers.kernels.kda.contract import Inputs, problem_of
from tests.kernels.cases import (
    BEST_DEVICE,
    BF16,
    FP16,
    FP64,
    Case,
    call,
    check,
    limits_of,
    make_inputs,
    on_every_backend,
    oracle,
    output_gradients,
    outputs,
    run,
    sequences,
    serve,
    to_fp64,
)

pytestmark = pytest.mark.slow

RELATIVE = 1e-10
NOTHING = 1e-100  # inputs are of size 1: gradients below this are of gates that have erased everything

fixed = settings(max_examples=40, deadline=None, derandomize=True, database=None)

GATES = {
    "log_decay": {"gate": "log_decay", "beta": "given"},
    "softplus": {"gate": "softplus", "beta": "2sigmoid"},
    "lower_bound": {"gate": "lower_bound", "beta": "sigmoid"},
}


@st.composite
def cases(draw: st.DrawFn, packed: bool) -> Case:
    lengths = draw(st.lists(st.integers(0, 140), min_size=1, max_size=5).filter(any)) if packed else None
    return Case(
        T=draw(st.integers(1, 200)),
        B=1 if packed else draw(st.integers(1, 3)),
        H=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 4])),
        K=draw(st.integers(1, 20)),
        V=draw(st.integers(1, 20)),
        dtype=FP64,
        lengths=None if lengths is None else tuple(lengths),
        state=draw(st.booleans()),
        slow=draw(st.booleans()),
        l2norm=draw(st.booleans()),
        layout=draw(st.sampled_from(["contiguous", "fused", "heads_first"])),
        **GATES[draw(st.sampled_from(sorted(GATES)))],
    )


@st.composite
def cases_in_16_bits(
    draw: st.DrawFn,
    gates: Sequence[str] = tuple(GATES),
    widths: Sequence[int] = (64, 128),
    dtypes: Sequence[torch.dtype] = (BF16, FP16),
    g_wide: bool = False,
) -> Case:
    """Draw a case that fast backends serve, packed or not."""
    case = draw(cases(packed=draw(st.booleans())))
    width = draw(st.sampled_from(widths))
    return replace(
        case, **GATES[draw(st.sampled_from(gates))], K=width, V=width, dtype=draw(st.sampled_from(dtypes)),
        g_wide=g_wide, layout="contiguous" if g_wide else case.layout,
        offsets_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )  # fmt: skip


magnitudes = st.lists(st.floats(-6.0, 4.0), min_size=1, max_size=4).map(tuple)  # as powers of ten


def inputs(case: Case, powers: tuple[float, ...]) -> Inputs:
    """The case's inputs with gates, or their logits, of all these magnitudes among them."""
    x = make_inputs(case)
    generator = torch.Generator().manual_seed(0)
    pick = torch.randint(len(powers), x.g.shape, generator=generator)
    size = 10.0 ** torch.tensor(powers, dtype=FP64)[pick]
    g = torch.rand(x.g.shape, generator=generator, dtype=FP64) * size
    return x._replace(g=-g if case.gate == "log_decay" else torch.where(pick % 2 == 0, g, -g))


def check_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    wrong = {
        n: float((got[n] - t).norm())
        for n, t in want.items()
        if not (got[n] - t).norm() <= RELATIVE * t.norm() + NOTHING
    }
    assert not wrong


@fixed
@given(case=cases(packed=False), powers=magnitudes)
@example(case=Case(T=200, H=1, K=8, V=8, dtype=FP64, gate="log_decay", beta="given", state=True), powers=(4.0, -6.0))
def test_eager_is_the_recurrence(case: Case, powers: tuple[float, ...]) -> None:
    x = inputs(case, powers)
    d_out = output_gradients(x)
    check_same(run(lambda x: call(x, "eager"), x, d_out), run(oracle, x, d_out))


@fixed
@given(case=cases(packed=True), powers=magnitudes)
@example(case=Case(lengths=(0, 64, 0, 1, 128, 63), H=1, K=8, V=8, dtype=FP64, state=True), powers=(0.0, 2.0))
def test_packed_sequences_are_strangers(case: Case, powers: tuple[float, ...]) -> None:
    """Packed, each sequence gives what it gives alone; the gate's parameters add up their gradients."""
    x = inputs(case, powers)
    d_out = output_gradients(x)
    offsets = x.cu_seqlens.tolist()
    alone: dict[str, list[Tensor]] = {}
    row = 0
    for n, s in enumerate(sequences(x)):
        a, b = offsets[n], offsets[n + 1]
        if a == b:  # nothing happens: the state and its gradient pass
            zero = torch.zeros_like(d_out["final_state"][:1])
            state, d_state = (zero if s.initial_state is None else s.initial_state), d_out["final_state"][n : n + 1]
            result = {"final_state": state} | ({} if s.initial_state is None else {"d_initial_state": d_state})
        else:
            count = (b - a) // 64
            d = {
                "o": d_out["o"][:, a:b],
                "final_state": d_out["final_state"][n : n + 1],
                "checkpoints": d_out["checkpoints"][:, row : row + count],
            }
            row += count
            result = run(lambda x: call(x, "eager"), s, d)
        for name, t in result.items():
            alone.setdefault(name, []).append(t)
    got = run(lambda x: call(x, "eager"), x, d_out)
    unused = got["checkpoints"][:, row:] if "checkpoints" in got else torch.zeros(0)
    assert (unused == 0).all()
    if "checkpoints" in got:
        got["checkpoints"] = got["checkpoints"][:, :row]
        alone.setdefault("checkpoints", [got["checkpoints"][:, :0]])
    along = {"final_state": 0, "d_initial_state": 0}
    want = {
        n: sum(t[1:], t[0]) if n in ("d_A_log", "d_dt_bias") else torch.cat(t, along.get(n, 1))
        for n, t in alone.items()
    }
    check_same(got, want)


@on_every_backend
@settings(fixed, max_examples=10 if BEST_DEVICE == "cpu" else 24)  # Triton compiles for each
@given(case=cases_in_16_bits())
def test_in_16_bits(case: Case, backend: str, required_backends: frozenset[str]) -> None:
    x = make_inputs(case, BEST_DEVICE)
    serve(backend, problem_of(x), required_backends)
    truth, yardstick = (outputs(oracle(cast(x))) for cast in (to_fp64, lambda x: x))
    with torch.no_grad():
        check(outputs(call(x, backend)), truth, limits_of(yardstick, truth, case.dtype))
