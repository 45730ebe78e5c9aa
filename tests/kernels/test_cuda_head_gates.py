"""Gates of heads in the CUDA kernels, in the emulator: one logit of a token.

A step has the bits of the logit repeated for every channel; whole sequences have kernels of their own, and are compared
with fp64. The tests of every backend compare the operators with fp64 for such gates, too.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_layers import KDAOutput
from kda_layers.kernels.kda import op
from kda_layers.kernels.kda.backends.cuda import BACKENDS
from kda_layers.kernels.kda.contract import HEAD_GATES, Inputs, PrefillInputs, problem_of
from kda_layers.kernels.kda.cuda import forms
from kda_layers.kernels.kda.cuda import prefill as pooled
from kda_layers.kernels.kda.cuda.decode import decode as decode_launcher
from kda_layers.kernels.kda.cuda.forward.costs import Split
from kda_layers.kernels.kda.reference import activate
from kda_layers.states import quantize_state
from tests import cuda_emulator
from tests.kernels import emulated
from tests.kernels.cases import (
    BF16,
    FP16,
    FP32,
    Case,
    check,
    ids,
    limits_of,
    make_inputs,
    oracle,
    output_gradients,
    outputs,
    run,
    step_inputs,
    to_fp64,
)
from tests.kernels.emulated_backends import EMULATED, registered
from tests.kernels.test_head_gates import for_each_channel

pytestmark = pytest.mark.emulated

FUSED = ("gate", "beta", "qk_l2norm", HEAD_GATES)
NARROW = Case(H=1, K=64, V=64, dtype=FP16, head_gates=True, state=True)


def of_heads(case: Case) -> tuple[Inputs, Inputs, Inputs]:
    """The inputs of a case, and as kernels get them: with the gates of heads, and with these repeated."""
    x = make_inputs(case)
    return x, activate(x, FUSED), for_each_channel(x)


def in_wider_rows(t: Tensor, before: int) -> Tensor:
    """The same values as a slice, from element `before` on, of rows that hold more than a token's heads."""
    B, T, HV = t.shape[:3]
    rows = t.new_full((B, T, before + HV + 4), torch.nan)
    rows[..., before : before + HV] = t[..., 0]
    return rows[..., before : before + HV, None]


# ---------------------------------------------------------------- decoding

STEPS = [
    *(Case(T=2, B=2, H=1, group=2, gate=g, head_gates=True, state=True) for g in ("lower_bound", "log_decay")),
    *(replace(NARROW, T=9, gate="softplus", g_wide=wide) for wide in (False, True)),
    Case(lengths=(3, 0, 1), H=1, group=2, head_gates=True, dt_bias=False, A_log=False, state=True),
]


def step(x: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and the states after them, from copies of the initial states in `dtype`."""
    assert x.initial_state is not None
    states = dict(state=x.initial_state.to(dtype, copy=True))
    if dtype == torch.int8:
        states = dict(zip(("state", "state_scale"), quantize_state(x.initial_state), strict=True))
    return [emulated.decode(step_inputs(x, **states)), *states.values()]


@pytest.mark.parametrize("case", **ids(STEPS))
def test_steps_against_fp64(case: Case) -> None:
    x, native, _ = of_heads(case)
    truth, yardstick = (dict(o=r.o, state=r.final_state) for r in (oracle(cast(x)) for cast in (to_fp64, lambda x: x)))
    check(dict(zip(truth, step(native, FP32), strict=True)), truth, limits_of(yardstick, truth, x.q.dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.int8], ids=["fp32", "bf16", "int8"])
@pytest.mark.parametrize("case", **ids(STEPS))
def test_bits_of_a_step(case: Case, dtype: torch.dtype) -> None:
    _, native, repeated = of_heads(case)
    for got, want in zip(step(native, dtype), step(repeated, dtype), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("case", **ids(STEPS))
def test_bits_of_a_verification(case: Case) -> None:
    """The updates of drafted tokens, too: they keep a decay for each channel."""
    _, native, repeated = of_heads(case)
    HV, V, K = native.initial_state.shape[1:]
    results = []
    for x in (native, repeated):
        state = x.initial_state.clone()
        updates = torch.zeros(state.shape[0], case.T if case.lengths is None else 3, HV, 2 * K + V)
        more: dict[str, Any] = dict(num_accepted=torch.zeros(state.shape[0], dtype=torch.int32))
        o = emulated.verify(step_inputs(x, state=state, updates=updates, **more))
        results.append((o, state, updates))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    decays = results[0][2][..., :K]
    assert decays.count_nonzero()
    assert torch.equal(decays, decays[..., :1].expand_as(decays))


@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "fp32"])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_gates_of_a_step_are_read_where_they_are(before: int, wide: bool) -> None:
    """A head's logit and bias need no alignment, and the rows of tokens any stride: nothing is copied."""
    _, x, _ = of_heads(Case(T=3, B=2, H=3, head_gates=True, g_wide=wide, state=True))
    assert x.dt_bias is not None
    moved = x._replace(g=in_wider_rows(x.g, before), dt_bias=torch.cat((x.dt_bias[:1], x.dt_bias))[1:])
    inputs = step_inputs(moved, state=x.initial_state.clone())
    machine = emulated.Emulator()
    *_, read = decode_launcher.pack(inputs, torch.empty_like(x.v), machine)
    assert read is inputs
    o = decode_launcher.decode(inputs, machine)
    want_o, want = step(x, FP32)
    assert torch.equal(o, want_o)
    assert torch.equal(inputs.state, want)


# ---------------------------------------------------------------- whole sequences

WIDE = Case(H=1, group=2, T=200, head_gates=True, state=True)
CASES = [
    WIDE,
    replace(WIDE, gate="log_decay", g_wide=True, T=65),
    replace(WIDE, gate="softplus", slow=True, lengths=(65, 0, 1, 130), offsets_dtype=torch.int64),
    replace(NARROW, T=130, gate="softplus", dt_bias=False, A_log=False),
    replace(NARROW, T=70, B=2, g_wide=True, slow=True),
]
on_every_case = pytest.mark.parametrize("case", **ids(CASES))
on_every_arch = pytest.mark.parametrize("arch", [90, 80])  # with q, k and logits loaded a chunk ahead, and without


def assert_same(got: KDAOutput, want: KDAOutput) -> None:
    assert [n for n, t in outputs(want).items() if not torch.equal(outputs(got)[n], t)] == []


def check_forward(got: KDAOutput, x: Inputs) -> None:
    truth, yardstick = (outputs(oracle(cast(x))) for cast in (to_fp64, lambda x: x))
    check(outputs(got), truth, limits_of(yardstick, truth, x.q.dtype))


@on_every_arch
@on_every_case
def test_the_forward_against_fp64(case: Case, arch: int) -> None:
    x, native, _ = of_heads(case)
    got = emulated.forward(native, arch=arch)
    check_forward(got, x)
    assert_same(emulated.forward_saving(native, arch=arch)[0], got)


@pytest.mark.parametrize("case", **ids([replace(c, checkpoints=False) for c in CASES]))
def test_bits_of_specialised_blocks(case: Case) -> None:
    """Blocks that only prepare change their head, and its bias, with every chunk."""
    _, x, _ = of_heads(case)
    assert_same(emulated.two_roles(x, Split(1, 2, 4)), emulated.forward(x))


def test_segments_against_fp64() -> None:
    x, native, _ = of_heads(Case(T=2100, H=1, head_gates=True, slow=True, checkpoints=False))
    found = []
    for form in (contextlib.nullcontext(), emulated.without_two_roles()):
        with form:
            found.append(forms.forward(native._replace(segments="always"), emulated.Emulator(), False)[0])
    check_forward(found[0], x)
    assert_same(*found)


@pytest.mark.parametrize("T", [2, 66, 130])
def test_last_tokens_against_fp64(T: int) -> None:
    """The decode kernel computes the tokens after a sequence's whole chunks."""
    x, native, _ = of_heads(replace(WIDE, T=T, checkpoints=False))
    check_forward(forms.forward(native, emulated.Emulator(), False)[0], x)


def prefill(x: Inputs) -> list[Tensor]:
    """Outputs, states and boundary states of a pool of one more slot than sequences."""
    assert x.initial_state is not None
    N = x.initial_state.shape[0]
    pool = torch.cat((x.initial_state, torch.full_like(x.initial_state[:1], torch.nan)))
    o, boundary, at = torch.empty_like(x.v), torch.zeros_like(x.initial_state), torch.full((N,), 64)
    given = dict(o=o, state=pool, checkpoints=boundary, checkpoint_at=at, state_indices=torch.arange(N).flip(0))
    pooled.prefill(
        PrefillInputs(**{n: given.get(n, getattr(x, n, None)) for n in PrefillInputs._fields}), emulated.Emulator()
    )
    return [o, pool[:N], boundary]


@on_every_case
def test_a_prefill_against_fp64(case: Case) -> None:
    x, native, _ = of_heads(case)
    o, state, _ = prefill(native)
    assert x.initial_state is not None
    x = x._replace(initial_state=x.initial_state.flip(0))  # as slots are
    truth, yardstick = (dict(o=r.o, state=r.final_state) for r in (oracle(cast(x)) for cast in (to_fp64, lambda x: x)))
    check(dict(o=o, state=state.flip(0)), truth, limits_of(yardstick, truth, x.q.dtype))


@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "fp32"])
def test_gates_of_a_prefill_are_read_where_they_are(wide: bool) -> None:
    _, x, _ = of_heads(replace(WIDE, T=66, B=2, g_wide=wide))
    want = prefill(x)
    moved = x._replace(g=in_wider_rows(x.g, 1))
    assert pooled._in_rows(moved.g) is moved.g
    assert all(map(torch.equal, prefill(moved), want))


def test_strided_gates_of_the_forward() -> None:
    _, x, _ = of_heads(WIDE)
    assert_same(emulated.forward(x._replace(g=in_wider_rows(x.g, 1))), emulated.forward(x))


# ---------------------------------------------------------------- gradients


def gradients(x: Inputs, d_out: dict[str, Tensor], arch: int = 90, seed: int = 0) -> dict[str, Tensor]:
    """Gradients of every input by all kernels."""
    launch = dict(arch=arch, seed=seed)
    d_o, d_final = d_out["o"].to(x.v.dtype), d_out["final_state"].float()
    saved = emulated.forward_saving(x, **launch)[1]
    scanned = emulated.reverse_scan(x, saved, (d_o, d_final, None), **launch)
    got = emulated.gradients(x, saved, scanned, d_o, processors=3, **launch)
    return {f"d_{n}": t for n, t in got._asdict().items() if t is not None}


TRAINED = [replace(case, checkpoints=False) for case in CASES] + [
    replace(
        WIDE, T=70, beta="given", g_wide=True, checkpoints=False
    ),  # betas near zero, which have a path of their own
]


def trained(case: Case, draw: int = 0) -> tuple[Inputs, Inputs, dict[str, Tensor]]:
    """The inputs of a case, those that kernels get, and gradients of the outputs."""
    x = make_inputs(case, draw=draw)
    if case.beta == "given":
        x.beta[:, ::3] = 0.0
    return x, activate(x, FUSED), output_gradients(x)


@on_every_arch
@pytest.mark.parametrize("case", **ids(TRAINED))
def test_gradients_against_fp64(case: Case, arch: int) -> None:
    results: list[list[dict[str, Tensor]]] = [[], [], []]
    for draw in range(case.draws):
        x, native, d_out = trained(case, draw)
        got = gradients(native, d_out, arch)
        assert (got["d_g"].shape, got["d_g"].dtype) == (native.g.shape, native.g.dtype)
        found = [run(oracle, cast(x), d_out) for cast in (to_fp64, lambda x: x)]
        names = [n for n in found[0] if n in got]
        assert {"d_g", "d_q"} <= {*names}
        for to, result in zip(results, (got, *found), strict=True):
            to.append({n: result[n].reshape(found[0][n].shape) for n in names})
    got, truth, yardstick = ({n: torch.stack([r[n] for r in every]) for n in every[0]} for every in results)
    check(got, truth, limits_of(yardstick, truth, x.q.dtype))


def test_gradients_in_any_order() -> None:
    _, native, d_out = trained(replace(CASES[2], checkpoints=False))
    want = gradients(native, d_out)
    for seed in (1, 2):
        got = gradients(native, d_out, seed=seed)
        assert [n for n, t in want.items() if not torch.equal(got[n], t)] == []


def test_memory_accesses_are_ordered() -> None:
    _, native, d_out = trained(Case(T=66, B=2, H=1, group=2, head_gates=True, checkpoints=False, state=True))
    with cuda_emulator.order_checked():
        gradients(native, d_out)
        emulated.two_roles(native, Split(1, 2, 4))


# ---------------------------------------------------------------- the operators


def test_no_gate_is_repeated() -> None:
    """The plan of a step is kept with the choice of its backend, as for gates of channels."""
    x = make_inputs(STEPS[0])
    backend = EMULATED["sm90@emulator"]
    with registered(backend):
        assert not backend.notes(problem_of(x))
        name, run, *fused = op._prepare_step(step_inputs(x), backend.name)
    assert name == backend.name
    assert run is not None
    assert HEAD_GATES in fused


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_few_variants_are_compiled_ahead(arch: str) -> None:
    """The listed variants are those of models that have gates of heads; any other is compiled when it is called."""
    variants = [defines for backend in BACKENDS for _, defines in backend.variants(arch)]
    of_heads = [d for d in variants if d.get("HEAD_GATES")]
    assert 0 < len(of_heads) < len(variants) / 8
    assert {(d["K"], d["IO"]) for d in of_heads} == {(128, "Bf16")}
