"""The gradients kernel alone in the emulator, against fp64 autograd through the recurrence.

What the forward and the reverse scan save for it comes from the recurrence in fp64, rounded to the dtype in which it is
saved. The tests of every backend compare the gradients of all kernels together, for every case.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kda_layers.kernels.kda.contract import CHUNK, HEAD_GATES, Inputs
from kda_layers.kernels.kda.cuda.backward import gradients as launcher
from kda_layers.kernels.kda.cuda.backward.reverse_scan import Scanned
from kda_layers.kernels.kda.cuda.spec import Saved
from kda_layers.kernels.kda.reference import activate
from kda_layers.testing.hard_inputs import Kind, hard_inputs, one_gate_a_head
from tests import cuda_emulator
from tests.kernels import emulated
from tests.kernels.cases import (
    FP16,
    Case,
    check,
    ids,
    limits_of,
    make_inputs,
    oracle,
    output_gradients,
    run,
    to_fp64,
)
from tests.kernels.emulated import end_of_memory
from tests.kernels.test_cuda_forward import softplus_resets

pytestmark = pytest.mark.emulated

NAMES = ("q", "k", "g", "beta", "A_log", "dt_bias")


class Left(NamedTuple):
    """Inputs of the gradients kernel from forward and reverse scan."""

    saved: Saved
    scanned: Scanned
    d_o: Tensor


def saved_by(x: Inputs, d_out: dict[str, Tensor]) -> Left:
    """The saved tensors, exact but for the rounding to their dtype."""
    dtype, rows = x.q.dtype, launcher.chunk_rows(x)
    y = activate(to_fp64(x))
    B, T, HV, V = y.v.shape
    heads = torch.arange(HV) // (HV // y.q.shape[2])
    q, k = y.q[:, :, heads], y.k[:, :, heads]
    v = y.v.clone().requires_grad_()
    offsets = [0, T] if y.cu_seqlens is None else y.cu_seqlens.tolist()
    spans = [(slice(b, b + 1), 0, T) for b in range(B)] if y.cu_seqlens is None else [
        (slice(0, 1), a, b) for a, b in itertools.pairwise(offsets)
    ]  # fmt: skip
    starts, ends, finals, outputs, all_errors = [], [], [], [], []
    checkpoints: list[Tensor] = []
    for n, (batch, first, last) in enumerate(spans):
        S = q.new_zeros(1, HV, V, q.shape[3]) if y.initial_state is None else y.initial_state[n : n + 1]
        S = S.clone().requires_grad_()
        for t in range(first, last):
            if (t - first) % CHUNK == 0:
                starts.append(S)
            kt, qt = k[batch, t, :, None], q[batch, t, :, None]
            decayed = S * y.g[batch, t, :, None].exp()
            errors = y.beta[batch, t, :, None] * (v[batch, t] - (decayed * kt).sum(-1))
            S = decayed + errors[..., None] * kt
            all_errors.append(errors)
            outputs.append(y.scale * (S * qt).sum(-1))
            if (t - first + 1) % CHUNK == 0 or t == last - 1:
                S = S.clone()  # its gradient is what comes from behind the chunk
                ends.append(S)
            if (t - first + 1) % CHUNK == 0:
                checkpoints.append(S)
        finals.append(S)
    d_o = d_out["o"].to(dtype)
    total = (torch.stack(outputs).view(B, T, HV, V) * d_o.double()).sum()
    total = total + (torch.cat(finals) * d_out["final_state"].double()).sum()
    d_checkpoints = d_out["checkpoints"].double().flatten(0, 1)
    total = total + sum((S[0] * d).sum() for S, d in zip(checkpoints, d_checkpoints, strict=False))
    d_v, *d_ends = torch.autograd.grad(total, [v, *ends])

    def by_chunk(states: list[Tensor]) -> Tensor:
        out = torch.full((rows, HV, V, q.shape[3]), torch.nan, dtype=dtype)
        out[: len(states)] = torch.cat(states).to(dtype)
        return out

    errors = torch.stack(all_errors).view(B, T, HV, V)
    scanned = torch.tensor([-(-(last - first) // CHUNK) for _, first, last in spans], dtype=torch.int32)
    counters = scanned[:, None, None].repeat(1, HV, V // 64), torch.zeros(1, dtype=torch.int32)
    with torch.no_grad():
        saved = Saved(torch.empty(0), emulated.swizzled(by_chunk(starts)), errors.to(dtype))
        return Left(saved, Scanned(d_v.to(dtype), by_chunk(d_ends), None, *counters), d_o)


def gradients(x: Inputs, left: Left, processors: int = 3, **launch: Any) -> dict[str, Tensor]:
    """Outputs of the gradients kernel, by name, in the shapes of the inputs."""
    saved, scanned = (type(part)(*map(end_of_memory, part)) for part in left[:2])
    native = activate(x, ("gate", "beta", "qk_l2norm", HEAD_GATES))
    got = emulated.gradients(native, saved, scanned, end_of_memory(left.d_o), processors=processors, **launch)
    found = {n: (getattr(got, n), getattr(x, n)) for n in NAMES}
    return {f"d_{n}": d.reshape(t.shape) for n, (d, t) in found.items() if d is not None}


def check_in_budget(draws: list[Inputs], **launch: Any) -> None:
    got, truth, yardstick = [], [], []
    for x in draws:
        d_out = output_gradients(x)
        names = [f"d_{n}" for n in NAMES if getattr(x, n) is not None]
        for results, cast in ((truth, to_fp64), (yardstick, lambda x: x)):
            every = run(oracle, cast(x), d_out)
            results.append({n: every[n] for n in names})
        got.append(gradients(x, saved_by(x, d_out), **launch))
    stacked = [{n: torch.stack([r[n] for r in results]) for n in results[0]} for results in (got, truth, yardstick)]
    check(stacked[0], stacked[1], limits_of(stacked[2], stacked[1], draws[0].q.dtype))


# ---------------------------------------------------------------- shapes and options

ARCHS = (90, 80)  # wgmma, mma.sync
WIDE = Case(H=1, state=True)
SOFTPLUS = Case(K=64, V=64, dtype=FP16, gate="softplus", state=True)
PACKED = (65, 0, 1, 130, 64, 0)

CASES = [
    replace(WIDE, T=65),
    replace(SOFTPLUS, group=4, H=1, lengths=PACKED, offsets_dtype=torch.int64),
    Case(H=1, gate="log_decay", state=True, lengths=(1,) * 40),
]


def drawn(case: Case) -> list[Inputs]:
    return [make_inputs(case, draw=n) for n in range(4)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", **ids(CASES))
def test_against_fp64(case: Case, arch: int) -> None:
    check_in_budget(drawn(case), arch=arch)


# ---------------------------------------------------------------- hard inputs


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "case",
    **ids(
        [
            replace(WIDE, beta="given"),
            replace(WIDE, beta="given", slow=True, group=2),
            replace(SOFTPLUS, beta="given", beta_wide=True, l2norm=False),
        ]
    ),
)
def test_near_zero_betas(case: Case, arch: int) -> None:
    """Precomputed betas of zero, and below what fp16 holds: the gradient of a beta that writes nothing is not 0."""
    draws = drawn(case)
    for x in draws:
        x.beta[:, ::3], x.beta[:, 1::7] = 0.0, 1e-7
    check_in_budget(draws, arch=arch)


def test_memory_accesses_with_near_zero_betas_are_ordered() -> None:
    """Half of the warps do not compute what these betas need, and go on."""
    x = make_inputs(Case(H=1, beta="given", slow=True, lengths=(17, 0, 66)))
    x.beta[:, ::3] = 0.0
    saved = saved_by(x, output_gradients(x))
    with cuda_emulator.order_checked():
        gradients(x, saved, processors=1)


def resets_with_a_rate(T: int, D: int, H: int) -> dict[str, Any]:
    """The gradient of A_log multiplies what is left of a reset's own gradient by its log-decay, -1e4."""
    x = softplus_resets(T, D, H)
    return x | {"A_log": torch.zeros_like(x["beta"][0, 0]), "dt_bias": torch.zeros_like(x["g"][0, 0])}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", [resets_with_a_rate, one_gate_a_head(resets_with_a_rate)], ids=["channels", "heads"])
def test_resets(kind: Kind, arch: int) -> None:
    """Softplus gates that erase channels, or all of a state, between ordinary ones."""
    check_in_budget([hard_inputs(kind, 200, 64, 1, FP16)], arch=arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_same_bits(arch: int) -> None:
    """Gradients do not depend on the order of concurrent operations or the number of blocks."""
    x = make_inputs(replace(WIDE, group=2, lengths=(65, 0, 1, 70)))
    saved = saved_by(x, output_gradients(x))
    want = gradients(x, saved, arch=arch)
    for seed, processors in ((1, 1), (2, 3), (3, 100)):
        got = gradients(x, saved, arch=arch, seed=seed, processors=processors)
        assert [n for n, t in want.items() if not torch.equal(got[n], t)] == []


def test_betas_gradient_is_taken_from_what_tokens_write() -> None:
    """With random keys it is nearer the truth than <bX, V'> / beta^2, which has every rounding of bX."""
    wrong: dict[str, list[Tensor]] = {"got": [], "by bX": []}
    for draw in range(2):
        x = make_inputs(Case(T=192, H=1, beta="given", beta_wide=True), draw=draw)
        d_out = {"o": output_gradients(x)["o"].to(x.v.dtype)}
        _, saved = emulated.forward_saving(x)
        scanned = emulated.reverse_scan(x, saved, (d_out["o"], None, None))
        truth = run(oracle, to_fp64(x), {"o": d_out["o"].double()})["d_beta"]
        rounded = x.beta.to(x.v.dtype).double()
        found = {
            "got": gradients(x, Left(saved, scanned, d_out["o"]))["d_beta"].double(),
            "by bX": (scanned.d_v.double() * saved.errors.double()).sum(-1) / rounded.square(),
        }
        for name, d_beta in found.items():
            wrong[name].append((d_beta - truth).norm() / truth.norm())
    got, by_bX = (torch.stack(errors).square().mean().sqrt() for errors in wrong.values())
    assert got < 0.8 * by_bX  # 0.57 of it over three draws
